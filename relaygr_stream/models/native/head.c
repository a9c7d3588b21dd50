/* TaskHead of embeddings.py in float32: LayerNorm of a candidate's outputs, and a product with each task's weights. */
#include "parts.h"

typedef struct {
    const float *norm_weight, *norm_bias, *weight, *bias; /* weight: (tasks, dim) */
    int64_t dim, tasks;
    float eps;
} Head;

static void logits_of(const Head *h, const num *x, float *logits) {
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (int64_t d = 0; d < h->dim; d += TILE) sum = _mm512_add_ps(sum, load(x + d));
    __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / h->dim);
    for (int64_t d = 0; d < h->dim; d += TILE) {
        __m512 beyond = _mm512_sub_ps(load(x + d), mean);
        squares = _mm512_fmadd_ps(beyond, beyond, squares);
    }
    __m512 variance = _mm512_set1_ps(_mm512_reduce_add_ps(squares) / h->dim + h->eps);
    __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1), _mm512_sqrt_ps(variance));
    for (int64_t task = 0; task < h->tasks; task++) {
        const float *weight = h->weight + task * h->dim;
        sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < h->dim; d += TILE) {
            __m512 normed = _mm512_mul_ps(_mm512_sub_ps(load(x + d), mean), inverse);
            normed = _mm512_fmadd_ps(normed, _mm512_loadu_ps(h->norm_weight + d), _mm512_loadu_ps(h->norm_bias + d));
            sum = _mm512_fmadd_ps(normed, _mm512_loadu_ps(weight + d), sum);
        }
        logits[task] = _mm512_reduce_add_ps(sum) + h->bias[task];
    }
}

/* Writes the logits (all candidates, tasks) from the outputs of all rows. */
void relaygr_logits(const Head *h, const Sequence *sequences, int64_t count, const num *x, float *logits) {
    for (const Sequence *s = sequences; s < sequences + count; s++) {
        x += s->behaviours * h->dim;
        for (int64_t i = 0; i < s->candidates; i++, x += h->dim, logits += h->tasks) logits_of(h, x, logits);
    }
}
