/* Attention of each row to itself, for candidates: too small for tiles or blocks, and the same for every kind. */
#include "parts.h"

/* Ignores `columns`, `weight` and the visibility. */
void attend_to_self(const Attention *a, const float *weights) {
    const Stretch *own = a->stretches;
    for (int64_t row = 0; row < a->rows; row++) {
        __m512 weight = _mm512_set1_ps(weights[row]);
        for (int64_t head = 0; head < a->heads; head++) {
            const num *q = a->q + head * a->q_head + row * a->q_row;
            const num *k = own->k + head * own->k_head + row * own->k_row, *v = own->v + head * own->v_head + row * own->v_row;
            num *out = a->out + head * a->out_head + row * a->out_row;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t d = 0; d < a->dqk; d += TILE) sum = _mm512_fmadd_ps(load(q + d), load(k + d), sum);
            __m512 own = silu(_mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_add_ps(sum)), _mm512_set1_ps(a->scale)));
            own = _mm512_mul_ps(own, weight);
            for (int64_t d = 0; d < a->dv; d += TILE)
                store(out + d, _mm512_fmadd_ps(own, load(v + d), load(out + d)));
        }
    }
}
