/* TaskHead of embeddings.py in float32: LayerNorm of a candidate's outputs, and a product with each task's weights. */
#include "parts.h"
#include "team.h"

typedef struct {
    const float *norm_weight, *norm_bias, *weight, *bias; /* weight: (tasks, dim) */
    int64_t dim, tasks;
    float eps;
} Head;

static void logits_of(const Head *h, const num *x, float *logits) {
    vec sum = v_zero(), squares = v_zero();
    for (int64_t d = 0; d < h->dim; d += TILE) sum = v_add(sum, load(x + d));
    vec mean = v_all(v_sum(sum) / h->dim);
    for (int64_t d = 0; d < h->dim; d += TILE) {
        vec beyond = v_sub(load(x + d), mean);
        squares = v_fma(beyond, beyond, squares);
    }
    vec variance = v_all(v_sum(squares) / h->dim + h->eps);
    vec inverse = v_div(v_all(1), v_sqrt(variance));
    for (int64_t task = 0; task < h->tasks; task++) {
        const float *weight = h->weight + task * h->dim;
        sum = v_zero();
        for (int64_t d = 0; d < h->dim; d += TILE) {
            vec normed = v_mul(v_sub(load(x + d), mean), inverse);
            normed = v_fma(normed, v_read(h->norm_weight + d), v_read(h->norm_bias + d));
            sum = v_fma(normed, v_read(weight + d), sum);
        }
        logits[task] = v_sum(sum) + h->bias[task];
    }
}

typedef struct {
    const Head *h;
    const Sequence *sequences;
    int64_t count, candidates, parts;
    const num *x;
    float *logits;
} Logits;

static void logits_part(const void *of, int64_t part) {
    const Logits *l = of;
    Range share = share_of(l->candidates, 1, part, l->parts);
    const num *x = l->x;
    int64_t before = 0;
    for (const Sequence *s = l->sequences; s < l->sequences + l->count; s++) {
        x += s->behaviours * l->h->dim;
        for (int64_t i = most(share.from - before, 0); i < least(share.to - before, s->candidates); i++)
            logits_of(l->h, x + i * l->h->dim, l->logits + (before + i) * l->h->tasks);
        x += s->candidates * l->h->dim;
        before += s->candidates;
    }
}

/* Writes the logits (all candidates, tasks) from the outputs of all rows, in up to `threads` threads. */
void relaygr_logits(
    const Head *h, const Sequence *sequences, int64_t count, const num *x, float *logits, int64_t threads
) {
    Logits l = {h, sequences, count, 0, team_enter(threads), x, logits};
    for (int64_t i = 0; i < count; i++) l.candidates += sequences[i].candidates;
    team_run(l.parts, l.parts, logits_part, &l);
    team_leave(l.parts);
}
