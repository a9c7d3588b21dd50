/* A product with weights that are packed once, for any number of rows.
 *
 * It computes 12 rows x 32 columns at a time, with the sums over the whole depth in registers, then applies activation
 * or addition and stores the results. Packed weights are read once, from front to back, for all rows. Each sum has the
 * same operations in the same order for any set of rows.
 */
#include "parts.h"

enum {
    MOST_ROWS = 12,
    ACROSS = 2 * TILE /* columns */
};

/* [32 columns][depth][32]. */
void pack_weights(const num *weights, int64_t row, int64_t depth, int64_t columns, num *packed) {
    for (int64_t column = 0; column < columns; column += ACROSS)
        for (int64_t d = 0; d < depth; d++, packed += ACROSS)
            memcpy(packed, weights + d * row + column, ACROSS * sizeof(num));
}

/* The sums of `count` rows from `row` on, 32 columns from `column` on. Rows are addressed relative to every third row,
 * as many addresses as the processor has registers for. */
static inline __attribute__((always_inline)) void sum_rows(
    const Product *p, int64_t row, int64_t column, float *to, const int64_t count
) {
    const int64_t depth = p->depth, step = p->a_row;
    const num *a = p->a + row * step, *weights = p->weights + column * depth;
    const num *third[MOST_ROWS / 3] = {a, a + 3 * step, a + 6 * step, a + 9 * step};
    __m512 sums[MOST_ROWS][2];
    __m512 left = p->bias ? load(p->bias + column) : _mm512_setzero_ps();
    __m512 right = p->bias ? load(p->bias + column + TILE) : _mm512_setzero_ps();
#pragma GCC unroll 12
    for (int64_t r = 0; r < count; r++) {
        sums[r][0] = left;
        sums[r][1] = right;
    }
    for (int64_t d = 0; d < depth; d++, weights += ACROSS) {
        left = load(weights);
        right = load(weights + TILE);
#pragma GCC unroll 12
        for (int64_t r = 0; r < count; r++) {
            __m512 x = _mm512_set1_ps(third[r / 3][r % 3 * step + d]);
            sums[r][0] = _mm512_fmadd_ps(x, left, sums[r][0]);
            sums[r][1] = _mm512_fmadd_ps(x, right, sums[r][1]);
        }
    }
#pragma GCC unroll 12
    for (int64_t r = 0; r < count; r++) {
        store(to + r * ACROSS, sums[r][0]);
        store(to + r * ACROSS + TILE, sums[r][1]);
    }
}

/* Activation or addition for 16 sums. */
static inline void finish(const Product *p, const float *sums, int64_t row, int64_t column) {
    __m512 x = load(sums);
    int64_t at = row * p->out_row + column;
    if (p->activated) x = silu(x);
    if (p->before) x = _mm512_add_ps(x, load(p->before + at));
    store(p->out + at, x);
}

/* The number of rows computed at once: 12, or eights and fours of the last rows, since fewer rows leave the processor
 * waiting for sums. */
static int64_t rows_at_once(int64_t rows) {
    if (rows >= MOST_ROWS && rows != 16) return MOST_ROWS;
    return rows >= 8 ? 8 : rows >= 4 ? 4 : 1;
}

void multiply(const Product *p) {
    _Alignas(LINE) float sums[MOST_ROWS * ACROSS];
    for (int64_t column = 0; column < p->columns; column += ACROSS)
        for (int64_t row = 0, count; row < p->rows; row += count) {
            count = rows_at_once(p->rows - row);
            if (count == MOST_ROWS)
                sum_rows(p, row, column, sums, MOST_ROWS);
            else if (count == 8)
                sum_rows(p, row, column, sums, 8);
            else if (count == 4)
                sum_rows(p, row, column, sums, 4);
            else
                sum_rows(p, row, column, sums, 1);
            for (int64_t r = 0; r < count; r++)
                for (int64_t c = 0; c < ACROSS; c += TILE) finish(p, sums + r * ACROSS + c, row + r, column + c);
        }
}
