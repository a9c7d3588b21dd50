/* What a lane of 32 bits holds in the vectors' products: one float32 number. */
#ifndef RELAYGR_LANES_H
#define RELAYGR_LANES_H

#include "common.h"

enum { LANE = 1 /* numbers */ };

static inline __m512 multiply_add(__m512 x, __m512 y, __m512 sum) { return _mm512_fmadd_ps(x, y, sum); }

/* Scores: SiLU(scale * product). */
typedef struct {
    __m512 scale;
} Silu;

static inline void make_silu(Silu *silu_of, float scale) { silu_of->scale = _mm512_set1_ps(scale); }

static inline __m512 score_of(__m512 product, const Silu *silu_of) {
    return silu(_mm512_mul_ps(product, silu_of->scale));
}

/* The scores of LANE columns as lanes. */
static inline __m512i joined(const __m512 scores[LANE]) { return (__m512i)scores[0]; }

/* LANE rows of V, side by side in lanes. */
static inline void join_rows(const num *const rows[LANE], int64_t width, num *to) {
    memcpy(to, rows[0], width * sizeof(num));
}

/* Undoes the order that join_rows gives to 32 numbers of a row. */
static inline void in_order(__m512 sums[2]) { (void)sums; }

#endif
