/* LayerNorm of rows, and the gate. Several rows at a time hide the latency of a row's sums and read the weights once.
 *
 * Sums are float32, of the differences to the row's first element. The squares about an element are at most `width`
 * times the squares about the mean, so subtracting the mean loses at most log2(width) of 24 bits, and bfloat16 keeps 8.
 * For float32, which keeps 24, another pass sums the squares about the mean. */
#include "parts.h"

enum { TOGETHER = 4 /* rows */ };

/* `count` rows of LayerNorm(x) * weight + bias, times u if u is not NULL (with the row stride of x). */
static inline __attribute__((always_inline)) void normalize_rows(
    const num *x, const num *u, int64_t x_row, num *out, int64_t out_row, const int64_t count, int64_t width,
    const num *weight, const num *bias, float eps
) {
    __m512 sum[TOGETHER], squares[TOGETHER], first[TOGETHER], mean[TOGETHER], inverse[TOGETHER];
#pragma GCC unroll 4
    for (int64_t r = 0; r < count; r++) {
        first[r] = _mm512_broadcastss_ps(_mm512_castps512_ps128(load(x + r * x_row)));
        sum[r] = squares[r] = _mm512_setzero_ps();
    }
    for (int64_t d = 0; d < width; d += TILE)
#pragma GCC unroll 4
        for (int64_t r = 0; r < count; r++) {
            __m512 beyond = _mm512_sub_ps(load(x + r * x_row + d), first[r]);
            sum[r] = _mm512_add_ps(sum[r], beyond);
            squares[r] = _mm512_fmadd_ps(beyond, beyond, squares[r]);
        }
#pragma GCC unroll 4
    for (int64_t r = 0; r < count; r++) {
        float off = _mm512_reduce_add_ps(sum[r]) / width, of_all = _mm512_reduce_add_ps(squares[r]) / width;
        mean[r] = _mm512_add_ps(first[r], _mm512_set1_ps(off));
        if (BITS > 16) {
            squares[r] = _mm512_setzero_ps();
            for (int64_t d = 0; d < width; d += TILE) {
                __m512 beyond = _mm512_sub_ps(load(x + r * x_row + d), mean[r]);
                squares[r] = _mm512_fmadd_ps(beyond, beyond, squares[r]);
            }
            of_all = _mm512_reduce_add_ps(squares[r]) / width;
            off = 0;
        }
        __m512 variance = _mm512_max_ps(_mm512_set1_ps(of_all - off * off), _mm512_setzero_ps());
        inverse[r] = _mm512_div_ps(_mm512_set1_ps(1), _mm512_sqrt_ps(_mm512_add_ps(variance, _mm512_set1_ps(eps))));
    }
    for (int64_t d = 0; d < width; d += TILE) {
        __m512 w = load(weight + d), b = load(bias + d);
#pragma GCC unroll 4
        for (int64_t r = 0; r < count; r++) {
            __m512 one = _mm512_mul_ps(_mm512_sub_ps(load(x + r * x_row + d), mean[r]), inverse[r]);
            one = _mm512_fmadd_ps(one, w, b);
            store(out + r * out_row + d, u ? _mm512_mul_ps(load(u + r * x_row + d), one) : one);
        }
    }
}

void normalize(
    const num *x, int64_t x_row, num *out, int64_t out_row, int64_t rows, int64_t width, const num *weight,
    const num *bias, float eps
) {
    int64_t row = 0;
    for (; row + TOGETHER <= rows; row += TOGETHER, x += TOGETHER * x_row, out += TOGETHER * out_row)
        normalize_rows(x, NULL, x_row, out, out_row, TOGETHER, width, weight, bias, eps);
    for (; row < rows; row++, x += x_row, out += out_row)
        normalize_rows(x, NULL, x_row, out, out_row, 1, width, weight, bias, eps);
}

void gate(
    num *gates, int64_t row, int64_t rows, int64_t width, int64_t group, const num *weight, const num *bias,
    float eps
) {
    for (int64_t first = 0; first < width; first += group) {
        num *u = gates + first;
        int64_t i = 0;
        for (; i + TOGETHER <= rows; i += TOGETHER, u += TOGETHER * row)
            normalize_rows(
                u + width, u, row, u + 2 * width, row, TOGETHER, group, weight + first, bias + first, eps
            );
        for (; i < rows; i++, u += row)
            normalize_rows(u + width, u, row, u + 2 * width, row, 1, group, weight + first, bias + first, eps);
    }
}
