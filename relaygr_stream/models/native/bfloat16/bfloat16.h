/* bfloat16 as numbers, for the kinds that have its instructions. */
#ifndef RELAYGR_BFLOAT16_H
#define RELAYGR_BFLOAT16_H

enum {
    PAIR = 32, /* bfloat16 numbers in a vector */
    BITS = 8   /* significant bits of a number */
};

typedef uint16_t bf16;
typedef bf16 num;

static inline __m512 load(const bf16 *from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
}

#ifdef __AVX512BF16__

static inline __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

static inline __m512i both_rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

#else

/* To nearest, ties to even; NaN stays NaN. */
static inline __m256i rounded(__m512 x) {
    __m512i bits = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 none = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, none, _mm512_set1_epi32(0x7fc00000)), 16));
}

static inline __m512i both_rounded(__m512 low, __m512 high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(rounded(low)), rounded(high), 1);
}

#endif

static inline void store(bf16 *to, __m512 x) { _mm256_storeu_si256((__m256i *)to, rounded(x)); }

/* x / (1 + exp(-x)). 2^f for f in [0, 1) by a polynomial of degree 4 (relative error 4e-6), the reciprocal to 2^-14:
 * far below the 2^-9 to which bfloat16 rounds the result. */
static inline __m512 silu(__m512 x) {
    __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
    __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.3534167e-2f), f, _mm512_set1_ps(5.2011464e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4144275e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9300383e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0000026f));
    __m512 e = _mm512_scalef_ps(p, t); /* p * 2^floor(t): infinite and zero where exp is */
    return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}

/* Two rows of 32 numbers -> pairs of both, of every other four numbers in the first vector, of the rest in the second.
 * `in_order` undoes that for the sums, of which there are fewer. */
static inline void interleave(__m512i even, __m512i odd, void *first, void *second) {
    _mm512_store_si512(first, _mm512_unpacklo_epi16(even, odd));
    _mm512_store_si512(second, _mm512_unpackhi_epi16(even, odd));
}

static inline void in_order(__m512 sums[2]) {
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    __m512d low = (__m512d)sums[0], high = (__m512d)sums[1];
    sums[0] = (__m512)_mm512_permutex2var_pd(low, first, high);
    sums[1] = (__m512)_mm512_permutex2var_pd(low, second, high);
}

#endif
