/* The type num is bfloat16, which vectors of float32 multiply. */
#ifndef RELAYGR_NUMBERS_H
#define RELAYGR_NUMBERS_H

#include "float32/silu.h"
#include "vectors/unprepared.h"

enum {
    CHUNK = 384, /* rows that pass the parts of a layer together: their gates, 384 x 768, are 576 KiB */
    BITS = 8     /* significant bits of a number */
};

typedef uint16_t num;

/* The number that has these bits in its upper half, to nearest, ties to even; NaN stays NaN. The lower half is
 * undefined. */
static inline __m256i rounded(__m256 x) {
    __m256i bits = (__m256i)x, odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256 none = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return (__m256i)_mm256_blendv_ps((__m256)up, (__m256)_mm256_set1_epi32(0x7fc00000), none);
}

static inline __m256 widened(const num *from) {
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
}

static inline vec load(const num *from) { return (vec){widened(from), widened(from + 8)}; }

static inline void store(num *to, vec x) {
    __m256i low = _mm256_srli_epi32(rounded(x.low), 16), high = _mm256_srli_epi32(rounded(x.high), 16);
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256((__m256i *)to, both);
}

#endif
