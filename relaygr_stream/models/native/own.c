/* Attention of each row to itself, for candidates: too small for tiles or blocks, and the same for every kind. */
#include "parts.h"

/* Ignores `columns`, `weight` and the visibility. */
void attend_to_self(const Attention *a, const float *weights) {
    const Stretch *own = a->stretches;
    for (int64_t row = 0; row < a->rows; row++) {
        vec weight = v_all(weights[row]);
        for (int64_t head = 0; head < a->heads; head++) {
            const num *q = a->q + head * a->q_head + row * a->q_row;
            const num *k = own->k + head * own->k_head + row * own->k_row, *v = own->v + head * own->v_head + row * own->v_row;
            num *out = a->out + head * a->out_head + row * a->out_row;
            vec sum = v_zero();
            for (int64_t d = 0; d < a->dqk; d += TILE) sum = v_fma(load(q + d), load(k + d), sum);
            vec own = silu(v_mul(v_all(v_sum(sum)), v_all(a->scale)));
            own = v_mul(own, weight);
            for (int64_t d = 0; d < a->dv; d += TILE)
                store(out + d, v_fma(own, load(v + d), load(out + d)));
        }
    }
}
