/* A product with weights that are packed once, for any number of rows, in float32 or bfloat16 (lanes.h).
 *
 * It computes 6 rows x VECTORS vectors of columns at a time, with the sums over the whole depth in registers, then
 * applies activation or addition and stores the results. Packed weights are read once, from front to back, for all
 * rows. Each sum has the same operations in the same order for any set of rows.
 */
#include "lane_at.h"
#include "parts.h"

enum {
    MOST_ROWS = 6,
    GROUP = (VECTORS == 1 ? 1 : 2) * TILE, /* columns packed together */
    ACROSS = VECTORS * TILE /* most columns at a time */
};

/* [GROUP columns][lane of depth][GROUP][LANE]. */
void pack_weights(const num *weights, int64_t row, int64_t depth, int64_t columns, num *packed) {
    for (int64_t column = 0; column < columns; column += GROUP)
        for (int64_t d = 0; d < depth; d += LANE)
            for (int64_t c = column; c < column + GROUP; c++)
                for (int64_t i = 0; i < LANE; i++) *packed++ = weights[(d + i) * row + c];
}

/* The sums of `count` rows from `row` on, `wide` vectors of columns from `column` on. Rows are addressed relative to
 * every third row, as many addresses as the processor has registers for. */
static inline __attribute__((always_inline)) void sum_rows(
    const Product *p, int64_t row, int64_t column, float *to, const int64_t count, const int64_t wide
) {
    const int64_t depth = p->depth, step = p->a_row;
    const num *a = p->a + row * step, *weights = p->weights + column * depth;
    const num *third[2] = {a, a + 3 * step};
    vec sums[MOST_ROWS][VECTORS], w[VECTORS];
#pragma GCC unroll 4
    for (int64_t i = 0; i < wide; i++) w[i] = p->bias ? load(p->bias + column + i * TILE) : v_zero();
#pragma GCC unroll 6
    for (int64_t r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++) sums[r][i] = w[i];
    for (int64_t d = 0; d < depth; d += LANE, weights += GROUP * LANE) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++)
            w[i] = v_read(weights + i / 2 * GROUP * depth + i % 2 * TILE * LANE);
#pragma GCC unroll 6
        for (int64_t r = 0; r < count; r++) {
            vec x = v_all_bits(lane_at(third[r / 3] + r % 3 * step + d));
#pragma GCC unroll 4
            for (int64_t i = 0; i < wide; i++) sums[r][i] = multiply_add(x, w[i], sums[r][i]);
        }
    }
#pragma GCC unroll 6
    for (int64_t r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++) v_write(to + r * ACROSS + i * TILE, sums[r][i]);
}

static inline __attribute__((always_inline)) void sum_rows_of(
    const Product *p, int64_t row, int64_t column, float *to, int64_t count, const int64_t wide
) {
    if (count == MOST_ROWS)
        sum_rows(p, row, column, to, MOST_ROWS, wide);
    else if (count == 5)
        sum_rows(p, row, column, to, 5, wide);
    else if (count == 4)
        sum_rows(p, row, column, to, 4, wide);
    else
        for (int64_t r = 0; r < count; r++) sum_rows(p, row + r, column, to + r * ACROSS, 1, wide);
}

/* Activation or addition for 16 sums. */
static inline void finish(const Product *p, const float *sums, int64_t row, int64_t column) {
    vec x = v_read(sums);
    int64_t at = row * p->out_row + column;
    if (p->activated) x = silu(x);
    if (p->before) x = v_add(x, load(p->before + at));
    store(p->out + at, x);
}

void multiply(const Product *p) {
    _Alignas(LINE) float sums[MOST_ROWS * ACROSS];
    for (int64_t column = 0, across; column < p->columns; column += across) {
        across = least(ACROSS, p->columns - column);
        int64_t parts = (p->rows + MOST_ROWS - 1) / MOST_ROWS; /* of rows, as even as possible: fewer rows are slower */
        for (int64_t row = 0, count; row < p->rows; row += count, parts--) {
            count = (p->rows - row + parts - 1) / parts;
            if (VECTORS == 1 || across == ACROSS)
                sum_rows_of(p, row, column, sums, count, VECTORS);
            else
                sum_rows_of(p, row, column, sums, count, VECTORS / 2);
            for (int64_t r = 0; r < count; r++)
                for (int64_t c = 0; c < across; c += TILE) finish(p, sums + r * ACROSS + c, row + r, column + c);
        }
    }
}
