/* A product with weights that are packed once. oneDNN packs them in every call, which at 64 rows takes as long as the
 * product itself.
 *
 * It computes 32 rows x 32 columns at a time, with the sums over the whole depth in four tiles. Vectors then apply
 * activation or addition before the results are stored. Packed weights are read once, from front to back, for all rows;
 * callers keep the rows' left operand in the second-level cache.
 */
#include "parts.h"

/* [32 columns][32 of depth][column tile][16 pairs of depth][16 columns][2]: what a step of the depth loads is 2 KiB. */
void pack_weights(const bf16 *weights, int64_t row, int64_t depth, int64_t columns, bf16 *packed) {
    for (int64_t column = 0; column < columns; column += TILE)
        for (int64_t d = 0; d < depth; d++) {
            bf16 *to = packed + column / PAIR * PAIR * depth + d / PAIR * PAIR * PAIR + column % PAIR * PAIR;
            for (int64_t i = 0; i < TILE; i++) to[d % PAIR / 2 * PAIR + 2 * i + d % 2] = weights[d * row + column + i];
        }
}

/* Sums of 32 rows and columns without activation or addition. */
typedef struct {
    const float *sums;
    int64_t row, column, rows; /* the next row of the product, its first column, rows left */
} Unfinished;

/* The last operation on a sum. */
typedef enum { PLAIN, ACTIVATED, ADDED } End;

static inline __attribute__((always_inline)) void finish_row(const Product *p, Unfinished *last, const End end) {
    __m512 left = _mm512_load_ps(last->sums), right = _mm512_load_ps(last->sums + TILE);
    bf16 *out = p->out + last->row * p->out_row + last->column;
    if (end == ACTIVATED) {
        left = silu(left);
        right = silu(right);
    }
    if (end == ADDED) {
        const bf16 *before = p->before + last->row * p->out_row + last->column;
        left = _mm512_add_ps(left, load(before));
        right = _mm512_add_ps(right, load(before + TILE));
    }
    _mm512_storeu_si512(out, both_rounded(left, right));
    last->sums += PAIR;
    last->row++;
    last->rows--;
}

/* 32 rows x 32 columns. Between the tiles' instructions, where vectors are idle, rows of the last sums are finished.
 * `bias`: of the columns, the start of the sums. `ahead`: the next columns' weights to prefetch; NULL: none. */
static inline __attribute__((always_inline)) void sum_tiles(
    const Product *p, const bf16 *a, const bf16 *weights, const float *bias, float *sums, const bf16 *ahead,
    Unfinished *last, const End end
) {
    const int64_t a_row = p->a_row, each = (PAIR * PAIR + p->depth - 1) / p->depth;
    stores_done();
    _tile_loadd(0, bias, 0);
    _tile_loadd(1, bias + TILE, 0);
    _tile_loadd(2, bias, 0);
    _tile_loadd(3, bias + TILE, 0);
    for (int64_t d = 0; d < p->depth; d += PAIR, weights += PAIR * PAIR) {
        if (ahead)
            for (int64_t i = 0; i < PAIR; i++) fetch((const char *)(ahead + (d + i) * PAIR));
        _tile_loadd(4, a + d, a_row * 2);
        _tile_loadd(5, a + TILE * a_row + d, a_row * 2);
        _tile_loadd(6, weights, LINE);
        _tile_loadd(7, weights + TILE * PAIR, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        for (int64_t i = 0; i < each && last->rows; i++) finish_row(p, last, end);
    }
    _tile_stored(0, sums, PAIR * 4);
    _tile_stored(1, sums + TILE, PAIR * 4);
    _tile_stored(2, sums + TILE * PAIR, PAIR * 4);
    _tile_stored(3, sums + TILE * PAIR + TILE, PAIR * 4);
}

static inline __attribute__((always_inline)) void multiply_to(const Product *p, const End end) {
    static _Thread_local _Alignas(64) float sums[2][PAIR * PAIR];
    _Alignas(64) float bias[PAIR] = {0};
    Unfinished last = {.rows = 0};
    int64_t turn = 0;
    for (int64_t column = 0; column < p->columns; column += PAIR) {
        if (p->bias) {
            _mm512_store_ps(bias, load(p->bias + column));
            _mm512_store_ps(bias + TILE, load(p->bias + column + TILE));
        }
        for (int64_t row = 0; row < p->rows; row += PAIR, turn ^= 1) {
            const bf16 *a = p->a + row * p->a_row, *weights = p->weights + column * p->depth;
            const bf16 *ahead = row ? NULL : weights + PAIR * p->depth;
            sum_tiles(p, a, weights, bias, sums[turn], ahead, &last, end);
            last = (Unfinished){sums[turn], row, column, least(PAIR, p->rows - row)};
        }
    }
    while (last.rows) finish_row(p, &last, end);
}

void multiply(const Product *p) {
    if (p->activated)
        multiply_to(p, ACTIVATED);
    else if (p->before)
        multiply_to(p, ADDED);
    else
        multiply_to(p, PLAIN);
}
