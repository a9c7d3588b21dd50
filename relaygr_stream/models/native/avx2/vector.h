/* A vector of 16 float32 numbers: two registers of AVX2. avx512/vector.h has the same names, and says what they do. */
#ifndef RELAYGR_VECTOR_H
#define RELAYGR_VECTOR_H

enum { VECTORS = 1 /* of which the sums with six numbers are in registers at a time: 12 of 16 */ };

typedef struct {
    __m256 low, high;
} vec;

static inline vec v_zero(void) { return (vec){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline vec v_all(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline vec v_all_bits(int32_t bits) {
    __m256 each = (__m256)_mm256_set1_epi32(bits);
    return (vec){each, each};
}
static inline vec v_all_first(vec x) {
    __m256 first = _mm256_broadcastss_ps(_mm256_castps256_ps128(x.low));
    return (vec){first, first};
}

static inline vec v_read(const void *from) {
    return (vec){_mm256_loadu_ps((const float *)from), _mm256_loadu_ps((const float *)from + 8)};
}
static inline void v_write(void *to, vec x) {
    _mm256_storeu_ps((float *)to, x.low);
    _mm256_storeu_ps((float *)to + 8, x.high);
}

static inline vec v_add(vec x, vec y) { return (vec){_mm256_add_ps(x.low, y.low), _mm256_add_ps(x.high, y.high)}; }
static inline vec v_sub(vec x, vec y) { return (vec){_mm256_sub_ps(x.low, y.low), _mm256_sub_ps(x.high, y.high)}; }
static inline vec v_mul(vec x, vec y) { return (vec){_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)}; }
static inline vec v_div(vec x, vec y) { return (vec){_mm256_div_ps(x.low, y.low), _mm256_div_ps(x.high, y.high)}; }
static inline vec v_sqrt(vec x) { return (vec){_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}; }
static inline vec v_fma(vec x, vec y, vec z) {
    return (vec){_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
}
static inline vec v_fms(vec x, vec y, vec z) {
    return (vec){_mm256_fmsub_ps(x.low, y.low, z.low), _mm256_fmsub_ps(x.high, y.high, z.high)};
}
static inline vec v_fnma(vec x, vec y, vec z) {
    return (vec){_mm256_fnmadd_ps(x.low, y.low, z.low), _mm256_fnmadd_ps(x.high, y.high, z.high)};
}
static inline vec v_min(vec x, vec y) { return (vec){_mm256_min_ps(x.low, y.low), _mm256_min_ps(x.high, y.high)}; }
static inline vec v_max(vec x, vec y) { return (vec){_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)}; }
static inline float v_sum(vec x) {
    __m256 eight = _mm256_add_ps(x.low, x.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline vec v_round(vec x) {
    const int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return (vec){_mm256_round_ps(x.low, how), _mm256_round_ps(x.high, how)};
}
static inline __m256 power_of_two(__m256 n) {
    return (__m256)_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
}
static inline vec v_scale(vec x, vec n) { return v_mul(x, (vec){power_of_two(n.low), power_of_two(n.high)}); }
/* A Newton step from 1.5 * 2^-12. */
static inline vec v_reciprocal(vec x) {
    vec r = {_mm256_rcp_ps(x.low), _mm256_rcp_ps(x.high)};
    return v_fma(r, v_fnma(x, r, v_all(1.0f)), r);
}

static inline __m256 kept(uint32_t bits, __m256 x) {
    const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i set = _mm256_and_si256(_mm256_set1_epi32((int32_t)bits), places);
    return _mm256_and_ps(x, (__m256)_mm256_cmpeq_epi32(set, places));
}
static inline vec v_keep(uint32_t bits, vec x) { return (vec){kept(bits, x.low), kept(bits >> 8, x.high)}; }

#endif
