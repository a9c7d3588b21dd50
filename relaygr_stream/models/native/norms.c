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
    vec sum[TOGETHER], squares[TOGETHER], first[TOGETHER], mean[TOGETHER], inverse[TOGETHER];
#pragma GCC unroll 4
    for (int64_t r = 0; r < count; r++) {
        first[r] = v_all_first(load(x + r * x_row));
        sum[r] = squares[r] = v_zero();
    }
    for (int64_t d = 0; d < width; d += TILE)
#pragma GCC unroll 4
        for (int64_t r = 0; r < count; r++) {
            vec beyond = v_sub(load(x + r * x_row + d), first[r]);
            sum[r] = v_add(sum[r], beyond);
            squares[r] = v_fma(beyond, beyond, squares[r]);
        }
#pragma GCC unroll 4
    for (int64_t r = 0; r < count; r++) {
        float off = v_sum(sum[r]) / width, of_all = v_sum(squares[r]) / width;
        mean[r] = v_add(first[r], v_all(off));
        if (BITS > 16) {
            squares[r] = v_zero();
            for (int64_t d = 0; d < width; d += TILE) {
                vec beyond = v_sub(load(x + r * x_row + d), mean[r]);
                squares[r] = v_fma(beyond, beyond, squares[r]);
            }
            of_all = v_sum(squares[r]) / width;
            off = 0;
        }
        vec variance = v_max(v_all(of_all - off * off), v_zero());
        inverse[r] = v_div(v_all(1), v_sqrt(v_add(variance, v_all(eps))));
    }
    for (int64_t d = 0; d < width; d += TILE) {
        vec w = load(weight + d), b = load(bias + d);
#pragma GCC unroll 4
        for (int64_t r = 0; r < count; r++) {
            vec one = v_mul(v_sub(load(x + r * x_row + d), mean[r]), inverse[r]);
            one = v_fma(one, w, b);
            store(out + r * out_row + d, u ? v_mul(load(u + r * x_row + d), one) : one);
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
