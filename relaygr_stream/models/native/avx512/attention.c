/* SiLU attention in float32 on x86-64 with AVX-512. K and V are read in place, scores stay in the first-level cache.
 *
 * The rows are transposed once: q as [dqk][row]. The scores of a column for 16 rows are then a vector, computed by
 * broadcasting each number of K. These scores, [column][row], are broadcast in turn to vectors of V. So neither K nor
 * V, the largest operands, is packed.
 *
 * Each score and each sum over columns has the same operations in the same order for any set of rows, so chunks and
 * batches change no bit.
 */
#include "parts.h"

enum {
    ROWS = 96,   /* rows transposed together */
    PANEL = 64,  /* columns: with 64 wide heads, 16 KiB of K and of V, and 24 KiB of scores */
    COLUMNS = 8, /* columns of one step of scores */
    VECTORS = 3, /* most vectors of 16 rows in one step of scores */
    SUMMED = 6,  /* most rows whose 64 sums are in registers */
    WIDE = 4     /* vectors of dv in these sums */
};

static _Thread_local struct {
    _Alignas(LINE) float q[WIDTH * ROWS];      /* [dqk][row], rows up to a multiple of 16 are zeros */
    _Alignas(LINE) float scores[PANEL * ROWS]; /* [column][row] */
    _Alignas(LINE) float k[COLUMNS * WIDTH];   /* the last columns */
} room;

/* The columns that row r of the block sees: [low, high). */
static inline int64_t low_of(const Attention *a, int64_t r) { return most(0, least(a->recent_to, a->recent + r)); }

static inline int64_t high_of(const Attention *a, int64_t r) {
    return least(a->columns, most(a->causal_from, a->causal + r));
}

/* A mask of the 16 rows from r on that see the column. */
static inline __mmask16 seen_by(const Attention *a, int64_t column, int64_t r) {
    int64_t from = column < a->causal_from ? 0 : most(0, column - a->causal + 1 - r);
    int64_t to = column >= a->recent_to ? TILE : most(0, column - a->recent + 1 - r);
    uint32_t below = to >= TILE ? 0xffff : (1u << to) - 1, skipped = from >= TILE ? 0xffff : (1u << from) - 1;
    return (__mmask16)(below & ~skipped);
}

/* Products of 8 columns and 16 rows or more. ahead: the part of K and V to prefetch; NULL: none. */
static inline __attribute__((always_inline)) void multiply_keys(
    const num *k, int64_t k_row, const float *q, int64_t dqk, float *products, const char *const ahead[2],
    const int64_t vectors
) {
    const num *third[3] = {k, k + 3 * k_row, k + 6 * k_row};
    __m512 sums[COLUMNS][VECTORS];
#pragma GCC unroll 8
    for (int64_t c = 0; c < COLUMNS; c++)
#pragma GCC unroll 3
        for (int64_t i = 0; i < vectors; i++) sums[c][i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dqk; d++, q += ROWS) {
        if (ahead) fetch(ahead[d % 2] + d / 2 * LINE);
        __m512 rows[VECTORS];
#pragma GCC unroll 3
        for (int64_t i = 0; i < vectors; i++) rows[i] = _mm512_load_ps(q + i * TILE);
#pragma GCC unroll 8
        for (int64_t c = 0; c < COLUMNS; c++) {
            __m512 x = _mm512_set1_ps(third[c / 3][c % 3 * k_row + d]);
#pragma GCC unroll 3
            for (int64_t i = 0; i < vectors; i++) sums[c][i] = _mm512_fmadd_ps(x, rows[i], sums[c][i]);
        }
    }
#pragma GCC unroll 8
    for (int64_t c = 0; c < COLUMNS; c++)
#pragma GCC unroll 3
        for (int64_t i = 0; i < vectors; i++) _mm512_store_ps(products + c * ROWS + i * TILE, sums[c][i]);
}

/* Products -> scores. hide: whether some rows do not see all columns. */
static void activate(const Attention *a, float *scores, int64_t column, int64_t first, int64_t vectors, int hide) {
    const __m512 scale = _mm512_set1_ps(a->scale), weight = _mm512_set1_ps(a->weight);
    for (int64_t c = 0; c < COLUMNS; c++, scores += ROWS)
        for (int64_t i = 0; i < vectors; i++) {
            __m512 s = _mm512_mul_ps(silu(_mm512_mul_ps(_mm512_load_ps(scores + i * TILE), scale)), weight);
            if (hide) s = _mm512_maskz_mov_ps(seen_by(a, column + c, first + i * TILE), s);
            _mm512_store_ps(scores + i * TILE, s);
        }
}

/* out += scores x V of `count` rows, `wide` vectors of dv. */
static inline __attribute__((always_inline)) void add_values(
    const Attention *a, const float *scores, const num *v, int64_t columns, num *out, const int64_t count,
    const int64_t wide
) {
    __m512 sums[SUMMED][WIDE];
#pragma GCC unroll 6
    for (int64_t r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++) sums[r][i] = load(out + r * a->out_row + i * TILE);
    for (int64_t c = 0; c < columns; c++, scores += ROWS, v += a->v_row) {
        __m512 values[WIDE];
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++) values[i] = load(v + i * TILE);
#pragma GCC unroll 6
        for (int64_t r = 0; r < count; r++) {
            __m512 s = _mm512_set1_ps(scores[r]);
#pragma GCC unroll 4
            for (int64_t i = 0; i < wide; i++) sums[r][i] = _mm512_fmadd_ps(s, values[i], sums[r][i]);
        }
    }
#pragma GCC unroll 6
    for (int64_t r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++) store(out + r * a->out_row + i * TILE, sums[r][i]);
}

static inline __attribute__((always_inline)) void add_values_of(
    const Attention *a, const float *scores, const num *v, int64_t columns, num *out, int64_t count, const int64_t wide
) {
    if (count == SUMMED)
        add_values(a, scores, v, columns, out, SUMMED, wide);
    else if (count == 5)
        add_values(a, scores, v, columns, out, 5, wide);
    else if (count == 4)
        add_values(a, scores, v, columns, out, 4, wide);
    else
        for (int64_t r = 0; r < count; r++) add_values(a, scores + r, v, columns, out + r * a->out_row, 1, wide);
}

/* The sums of at most 16 rows: six, five and five at a time; eight as four and four. */
static void add_all_values(
    const Attention *a, const float *scores, const num *v, int64_t columns, num *out, int64_t rows
) {
    int64_t parts = (rows + SUMMED - 1) / SUMMED;
    for (int64_t row = 0, count; row < rows; row += count, parts--) {
        count = (rows - row + parts - 1) / parts;
        for (int64_t d = 0; d < a->dv; d += WIDE * TILE) {
            num *to = out + row * a->out_row + d;
            if (a->dv - d >= WIDE * TILE)
                add_values_of(a, scores + row, v + d, columns, to, count, WIDE);
            else
                add_values_of(a, scores + row, v + d, columns, to, count, WIDE / 2);
        }
    }
}

static void turn_over(const num *q, int64_t row, int64_t rows, int64_t padded, int64_t dqk) {
    for (int64_t d = 0; d < dqk; d++) {
        for (int64_t r = 0; r < rows; r++) room.q[d * ROWS + r] = q[r * row + d];
        for (int64_t r = rows; r < padded; r++) room.q[d * ROWS + r] = 0;
    }
}

/* K of 8 columns from `column` on. Fewer last columns are copied into a buffer, since the memory behind them must not
 * be read; the results of the buffer's rest are not used. */
static inline const num *columns_of(const Attention *a, const num *k, int64_t column, int64_t *row) {
    int64_t count = a->columns - column;
    *row = a->k_row;
    if (count >= COLUMNS) return k + column * a->k_row;
    for (int64_t c = 0; c < count; c++) memcpy(room.k + c * a->dqk, k + (column + c) * a->k_row, a->dqk * sizeof(num));
    *row = a->dqk;
    return room.k;
}

/* Up to 48 of the transposed rows, from `row` on, over the panel's columns that any of them sees. */
static void attend_panel(
    const Attention *a, int64_t head, int64_t first, int64_t row, int64_t rows, int64_t from, int64_t to
) {
    const num *k = a->k + head * a->k_head, *v = a->v + head * a->v_head;
    int64_t vectors = (rows + TILE - 1) / TILE, last = first + row + rows - 1;
    int64_t begin = most(from, low_of(a, first + row)), end = least(to, high_of(a, last));
    if (begin >= end) return;
    int64_t all_from = low_of(a, last), all_to = high_of(a, first + row);
    for (int64_t column = begin, k_row; column < end; column += COLUMNS) {
        const num *columns = columns_of(a, k, column, &k_row);
        const float *q = room.q + row;
        float *scores = room.scores + (column - begin) * ROWS + row;
        int hide = column < all_from || column + COLUMNS > all_to;
        const char *next[2] = {
            (const char *)(k + (column + PANEL) * a->k_row), (const char *)(v + (column + PANEL) * a->v_row)
        };
        const char *const *ahead = row ? NULL : next;
        if (vectors == 1)
            multiply_keys(columns, k_row, q, a->dqk, scores, ahead, 1);
        else if (vectors == 2)
            multiply_keys(columns, k_row, q, a->dqk, scores, ahead, 2);
        else
            multiply_keys(columns, k_row, q, a->dqk, scores, ahead, 3);
        activate(a, scores, column, first + row, vectors, hide);
    }
    for (int64_t r = row; r < row + rows; r += TILE)
        add_all_values(
            a, room.scores + r, v + begin * a->v_row, end - begin, a->out + head * a->out_head + (first + r) * a->out_row,
            least(TILE, row + rows - r)
        );
}

static void attend_head(const Attention *a, int64_t head, int64_t first, int64_t rows) {
    int64_t low = low_of(a, first), high = high_of(a, first + rows - 1);
    /* As few parts as possible, of equal size if possible: four vectors are two and two. */
    int64_t vectors = (rows + TILE - 1) / TILE, parts = (vectors + VECTORS - 1) / VECTORS;
    turn_over(a->q + head * a->q_head + first * a->q_row, a->q_row, rows, vectors * TILE, a->dqk);
    for (int64_t from = low; from < high; from += PANEL)
        for (int64_t row = 0, part = 0, count; part < parts; part++, row += count) {
            count = least((vectors - row / TILE + parts - part - 1) / (parts - part) * TILE, rows - row);
            attend_panel(a, head, first, row, count, from, least(from + PANEL, high));
        }
}

void attend(const Attention *a) {
    if (!a->accumulate)
        for (int64_t head = 0; head < a->heads; head++)
            for (int64_t row = 0; row < a->rows; row++)
                memset(a->out + head * a->out_head + row * a->out_row, 0, a->dv * sizeof(num));
    for (int64_t first = 0; first < a->rows; first += ROWS)
        for (int64_t head = 0; head < a->heads; head++) attend_head(a, head, first, least(ROWS, a->rows - first));
}
