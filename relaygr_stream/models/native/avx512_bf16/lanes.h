/* What a lane of 32 bits holds in the vectors' products: two bfloat16 numbers. */
#ifndef RELAYGR_LANES_H
#define RELAYGR_LANES_H

#include "common.h"
#include "silu_table.h"

enum { LANE = 2 /* numbers */ };

#ifdef __AVX512BF16__

static inline __m512 multiply_add(__m512 x, __m512 y, __m512 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}

#else

static inline __m512 lower(__m512 x) { return (__m512)_mm512_slli_epi32((__m512i)x, 16); }

static inline __m512 upper(__m512 x) { return (__m512)_mm512_and_si512((__m512i)x, _mm512_set1_epi32(-0x10000)); }

static inline __m512 multiply_add(__m512 x, __m512 y, __m512 sum) {
    return _mm512_fmadd_ps(lower(x), lower(y), _mm512_fmadd_ps(upper(x), upper(y), sum));
}

#endif

/* Scores: SiLU(scale * product). */
typedef SiluTable Silu;

static inline void make_silu(Silu *silu_of, float scale) { make_silu_table(silu_of, scale); }

static inline __m512 score_of(__m512 product, const Silu *silu_of) { return silu_of_scores(product, silu_of); }

/* The scores of LANE columns as lanes: those of the first in the lower halves. */
static inline vec joined(const __m512 scores[LANE]) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
        16, 0
    );
    return (vec)_mm512_permutexvar_epi16(order, both_rounded(scores[0], scores[1]));
}

/* LANE rows of V, side by side in lanes; of 32 numbers in the order of `interleave`. */
static inline void join_rows(const num *const rows[LANE], int64_t width, num *to) {
    for (int64_t d = 0; d < width; d += PAIR, to += 2 * PAIR)
        interleave(_mm512_loadu_si512(rows[0] + d), _mm512_loadu_si512(rows[1] + d), to, to + PAIR);
}

#endif
