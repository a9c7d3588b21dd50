/* The layers of an HSTU stack, all in one call.
 *
 * First it computes LayerNorm and [v | k] of all rows, and writes [v | k] into the region or a buffer. Then rows pass
 * in chunks that stay in the second-level cache: LayerNorm -> [u | q], u activated -> attention -> gate -> product + x
 * -> x. layers.py and arguments.py describe the arguments.
 */
#include "parts.h"

typedef struct {
    int64_t dim, heads, dqk, dv, norm_group;
    float eps;
} Shape;

typedef struct {
    const num *norm_weight, *norm_bias, *uvqk, *uvqk_bias, *gate_weight, *gate_bias, *output;
} Layer;

typedef struct {
    num *x;                  /* (rows, dim), input and output of each layer */
    num *normed, *gates, *q; /* buffers for a chunk: (CHUNK, dim), (CHUNK, 3 H dv), (CHUNK, H dqk) */
    num *k, *v;              /* the destination of the rows' own K and V, in layer 0 */
    int64_t k_head, k_row, v_head, v_row, k_layer, v_layer, rows;
    const Attention *attentions; /* the attentions of every layer, with K and V of layer 0, without q and out */
    int64_t count;
    const float *self_weights; /* weight of each row's attention to itself; NULL: 0 */
    float scale;
} Rows;

/* 0: this process may use the kind's instructions. */
int relaygr_unavailable(void) { return unavailable(); }

/* The number of rows of the buffers in `Rows`. */
int64_t relaygr_chunk_rows(void) { return CHUNK; }

void relaygr_pack(const num *weights, int64_t row, int64_t depth, int64_t columns, num *packed) {
    pack_weights(weights, row, depth, columns, packed);
}

static void normalize_chunk(const Shape *s, const Layer *w, const Rows *r, int64_t first, int64_t rows) {
    normalize(r->x + first * s->dim, s->dim, r->normed, s->dim, rows, s->dim, w->norm_weight, w->norm_bias, s->eps);
}

/* out = normed x `columns` columns of W_uvqk from `column` on. */
static void project(
    const Shape *s, const Layer *w, const Rows *r, int64_t rows, int64_t column, int64_t columns, num *out,
    int64_t out_row, int activated
) {
    Product p = {
        .a = r->normed, .weights = w->uvqk + column * s->dim, .a_row = s->dim, .rows = rows, .depth = s->dim,
        .columns = columns, .bias = w->uvqk_bias + column, .out = out, .out_row = out_row, .activated = activated
    };
    multiply(&p);
}

static void project_kv(const Shape *s, const Layer *w, const Rows *r, int64_t layer, int64_t first, int64_t rows) {
    int64_t v_column = s->heads * s->dv, k_column = 2 * v_column + s->heads * s->dqk;
    num *v = r->v + layer * r->v_layer + first * r->v_row, *k = r->k + layer * r->k_layer + first * r->k_row;
    for (int64_t head = 0; head < s->heads; head++)
        project(s, w, r, rows, v_column + head * s->dv, s->dv, v + head * r->v_head, r->v_row, 0);
    for (int64_t head = 0; head < s->heads; head++)
        project(s, w, r, rows, k_column + head * s->dqk, s->dqk, k + head * r->k_head, r->k_row, 0);
}

/* Attention of the rows of `a` that are in the chunk, if there are any. */
static void attend_chunk(
    const Shape *s, const Rows *r, const Attention *a, int64_t layer, int64_t first, int64_t rows
) {
    int64_t begin = most(a->first, first), end = least(a->first + a->rows, first + rows), skipped = begin - a->first;
    if (begin >= end) return;
    Attention part = *a;
    part.rows = end - begin;
    part.causal += skipped;
    part.recent += skipped;
    for (Stretch *each = part.stretches; each < part.stretches + 2; each++) {
        each->k += layer * each->k_layer;
        each->v += layer * each->v_layer;
    }
    part.q_head = s->dqk, part.q_row = s->heads * s->dqk;
    part.out_head = s->dv, part.out_row = 3 * s->heads * s->dv;
    part.q = r->q + (begin - first) * part.q_row;
    part.out = r->gates + s->heads * s->dv + (begin - first) * part.out_row;
    attend(&part);
}

static void attend_chunk_to_self(const Shape *s, const Rows *r, int64_t first, int64_t rows) {
    int64_t width = s->heads * s->dv;
    Attention a = {
        .q = r->q, .out = r->gates + width, .q_head = s->dqk, .q_row = s->heads * s->dqk, .out_head = s->dv,
        .out_row = 3 * width, .heads = s->heads, .rows = rows, .dqk = s->dqk, .dv = s->dv, .scale = r->scale,
        .stretches = {{
            .k = r->k + first * r->k_row, .v = r->v + first * r->v_row, .k_head = r->k_head, .k_row = r->k_row,
            .v_head = r->v_head, .v_row = r->v_row, .columns = rows
        }}
    };
    attend_to_self(&a, r->self_weights + first);
}

static void run_chunk(const Shape *s, const Layer *w, const Rows *r, int64_t layer, int64_t first, int64_t rows) {
    int64_t width = s->heads * s->dv, q_width = s->heads * s->dqk;
    num *x = r->x + first * s->dim;
    project(s, w, r, rows, 0, width, r->gates, 3 * width, 1);
    project(s, w, r, rows, 2 * width, q_width, r->q, q_width, 0);
    for (int64_t i = 0; i < r->count; i++) attend_chunk(s, r, r->attentions + i, layer, first, rows);
    if (r->self_weights) attend_chunk_to_self(s, r, first, rows);
    gate(r->gates, 3 * width, rows, width, s->norm_group, w->gate_weight, w->gate_bias, s->eps);
    Product p = {
        .a = r->gates, .weights = w->output, .a_row = 3 * width, .rows = rows, .depth = 3 * width, .columns = s->dim,
        .before = x, .out = x, .out_row = s->dim
    };
    multiply(&p);
}

/* The end of the chunk that starts at row `first`. It does not cut a ranking that fits into a chunk, since each part of
 * a ranking reads its K and V again. */
static int64_t chunk_end(const Rows *r, int64_t first) {
    int64_t end = least(first + CHUNK, r->rows), before = first;
    for (int64_t i = 0; i < r->count; i++) {
        int64_t start = r->attentions[i].first;
        if (start < end && start + r->attentions[i].rows > end) before = most(before, start);
    }
    return before > first ? before : end;
}

/* K and V of all rows are computed before the attention of any row, since contextual rows see later rows. */
static void run_layer(const Shape *s, const Layer *w, const Rows *r, int64_t layer, int only_kv) {
    for (int64_t first = 0; first < r->rows; first += CHUNK) {
        normalize_chunk(s, w, r, first, least(CHUNK, r->rows - first));
        project_kv(s, w, r, layer, first, least(CHUNK, r->rows - first));
    }
    if (only_kv) return;
    for (int64_t first = 0, end; first < r->rows; first = end) {
        end = chunk_end(r, first);
        if (r->rows > CHUNK) normalize_chunk(s, w, r, first, end - first);
        run_chunk(s, w, r, layer, first, end - first);
    }
}

/* Runs the layers first ... stop - 1. only_kv: the last of them computes K and V only. */
void relaygr_layers(
    const Shape *shape, const Layer *layers, const Rows *rows, int64_t first, int64_t stop, int32_t only_kv
) {
    Before before;
    enter(&before);
    for (int64_t layer = first; layer < stop; layer++)
        run_layer(shape, layers + layer, rows, layer, only_kv && layer == stop - 1);
    leave(&before);
}
