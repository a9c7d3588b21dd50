/* What a lane of 32 bits holds in the vectors' products: two bfloat16 numbers. */
#ifndef RELAYGR_LANES_H
#define RELAYGR_LANES_H

#include "common.h"

enum { LANE = 2 /* numbers */ };

static inline __m256 lower(__m256 x) { return (__m256)_mm256_slli_epi32((__m256i)x, 16); }

static inline __m256 upper(__m256 x) { return (__m256)_mm256_and_si256((__m256i)x, _mm256_set1_epi32(-0x10000)); }

static inline __m256 add_products(__m256 x, __m256 y, __m256 sum) {
    return _mm256_fmadd_ps(lower(x), lower(y), _mm256_fmadd_ps(upper(x), upper(y), sum));
}

static inline vec multiply_add(vec x, vec y, vec sum) {
    return (vec){add_products(x.low, y.low, sum.low), add_products(x.high, y.high, sum.high)};
}

static inline __m256 pairs(__m256 first, __m256 second) {
    return (__m256)_mm256_blend_epi16(_mm256_srli_epi32(rounded(first), 16), rounded(second), 0xaa);
}

/* The scores of LANE columns as lanes: those of the first in the lower halves. */
static inline vec joined(const vec scores[LANE]) {
    return (vec){pairs(scores[0].low, scores[1].low), pairs(scores[0].high, scores[1].high)};
}

/* LANE rows of V, side by side in lanes. */
static inline void join_rows(const num *const rows[LANE], int64_t width, num *to) {
    for (int64_t d = 0; d < width; d += TILE, to += LANE * TILE) {
        __m256i even = _mm256_loadu_si256((const __m256i *)(rows[0] + d));
        __m256i odd = _mm256_loadu_si256((const __m256i *)(rows[1] + d));
        __m256i outer = _mm256_unpacklo_epi16(even, odd), inner = _mm256_unpackhi_epi16(even, odd);
        _mm256_storeu_si256((__m256i *)to, _mm256_permute2x128_si256(outer, inner, 0x20));
        _mm256_storeu_si256((__m256i *)(to + TILE), _mm256_permute2x128_si256(outer, inner, 0x31));
    }
}

/* Undoes the order that join_rows gives to 32 numbers of a row. */
static inline void in_order(vec sums[2]) { (void)sums; }

#endif
