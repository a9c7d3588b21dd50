/* A vector of 16 float32 numbers: a register of AVX-512. avx2/vector.h has the same names. */
#ifndef RELAYGR_VECTOR_H
#define RELAYGR_VECTOR_H

enum { VECTORS = 4 /* of which the sums with six numbers are in registers at a time: 24 of 32 */ };

typedef __m512 vec;

static inline vec v_zero(void) { return _mm512_setzero_ps(); }
static inline vec v_all(float x) { return _mm512_set1_ps(x); }
static inline vec v_all_bits(int32_t bits) { return (vec)_mm512_set1_epi32(bits); }
/* All of them the first of x. */
static inline vec v_all_first(vec x) { return _mm512_broadcastss_ps(_mm512_castps512_ps128(x)); }

static inline vec v_read(const void *from) { return _mm512_loadu_ps(from); }
static inline void v_write(void *to, vec x) { _mm512_storeu_ps(to, x); }

static inline vec v_add(vec x, vec y) { return _mm512_add_ps(x, y); }
static inline vec v_sub(vec x, vec y) { return _mm512_sub_ps(x, y); }
static inline vec v_mul(vec x, vec y) { return _mm512_mul_ps(x, y); }
static inline vec v_div(vec x, vec y) { return _mm512_div_ps(x, y); }
static inline vec v_sqrt(vec x) { return _mm512_sqrt_ps(x); }
/* x * y + z, x * y - z, z - x * y */
static inline vec v_fma(vec x, vec y, vec z) { return _mm512_fmadd_ps(x, y, z); }
static inline vec v_fms(vec x, vec y, vec z) { return _mm512_fmsub_ps(x, y, z); }
static inline vec v_fnma(vec x, vec y, vec z) { return _mm512_fnmadd_ps(x, y, z); }
/* y where one of them is NaN */
static inline vec v_min(vec x, vec y) { return _mm512_min_ps(x, y); }
static inline vec v_max(vec x, vec y) { return _mm512_max_ps(x, y); }
static inline float v_sum(vec x) { return _mm512_reduce_add_ps(x); }

static inline vec v_round(vec x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* x * 2^n for whole n in [-126, 126] */
static inline vec v_scale(vec x, vec n) { return _mm512_scalef_ps(x, n); }
/* 1 / x to 2^-22 for x in [1, 2^126]: a Newton step from 2^-14 */
static inline vec v_reciprocal(vec x) {
    vec r = _mm512_rcp14_ps(x);
    return v_fma(r, v_fnma(x, r, v_all(1.0f)), r);
}

/* x where the bit of its place is set, and zero elsewhere */
static inline vec v_keep(uint32_t bits, vec x) { return _mm512_maskz_mov_ps((__mmask16)bits, x); }

#endif
