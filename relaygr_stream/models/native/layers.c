/* The layers of an HSTU stack, all in one call.
 *
 * First it computes LayerNorm and [v | k] of all rows, and writes [v | k] into the region or a buffer. Then rows pass
 * in chunks that stay in the second-level cache: LayerNorm -> [u | q], u activated -> attention -> gate -> product + x
 * -> x. Each of these steps is shared by the threads of a team, by columns, by rows, or by heads of the attention.
 * layers.py and arguments.py describe the arguments.
 */
#include "parts.h"
#include "team.h"

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

/* Rows of one layer that pass together, and in how many parts each step of theirs is computed. */
typedef struct {
    const Shape *s;
    const Layer *w;
    const Rows *r;
    int64_t layer, first, rows, parts;
} Chunk;

/* Several rows of LayerNorm are computed together, and 64 columns of a product. */
enum { ROW_STEP = 4, COLUMN_STEP = 64 };

static void normalize_part(const void *of, int64_t part) {
    const Chunk *c = of;
    Range rows = share_of(c->rows, ROW_STEP, part, c->parts);
    int64_t dim = c->s->dim;
    normalize(
        c->r->x + (c->first + rows.from) * dim, dim, c->r->normed + rows.from * dim, dim, rows.to - rows.from, dim,
        c->w->norm_weight, c->w->norm_bias, c->s->eps
    );
}

/* out = normed x `columns` columns of W_uvqk from `column` on. */
static void project(const Chunk *c, int64_t column, int64_t columns, num *out, int64_t out_row, int activated) {
    int64_t dim = c->s->dim;
    Product p = {
        .a = c->r->normed, .weights = c->w->uvqk + column * dim, .a_row = dim, .rows = c->rows, .depth = dim,
        .columns = columns, .bias = c->w->uvqk_bias + column, .out = out, .out_row = out_row, .activated = activated
    };
    multiply(&p);
}

/* The part's columns of V or K, of heads that are `width` wide; the first is column `start` of W_uvqk. */
static void project_heads(
    const Chunk *c, int64_t part, int64_t start, int64_t width, num *out, int64_t out_head, int64_t out_row
) {
    Range columns = share_of(c->s->heads * width, COLUMN_STEP, part, c->parts);
    for (int64_t column = columns.from, end; column < columns.to; column = end) {
        end = least(round_up(column + 1, width), columns.to);
        project(c, start + column, end - column, out + column / width * out_head + column % width, out_row, 0);
    }
}

static void project_kv_part(const void *of, int64_t part) {
    const Chunk *c = of;
    const Shape *s = c->s;
    const Rows *r = c->r;
    int64_t v_column = s->heads * s->dv, k_column = 2 * v_column + s->heads * s->dqk;
    num *v = r->v + c->layer * r->v_layer + c->first * r->v_row, *k = r->k + c->layer * r->k_layer + c->first * r->k_row;
    project_heads(c, part, v_column, s->dv, v, r->v_head, r->v_row);
    project_heads(c, part, k_column, s->dqk, k, r->k_head, r->k_row);
}

static void project_uq_part(const void *of, int64_t part) {
    const Chunk *c = of;
    int64_t width = c->s->heads * c->s->dv, q_width = c->s->heads * c->s->dqk;
    Range u = share_of(width, COLUMN_STEP, part, c->parts), q = share_of(q_width, COLUMN_STEP, part, c->parts);
    project(c, u.from, u.to - u.from, c->r->gates + u.from, 3 * width, 1);
    project(c, 2 * width + q.from, q.to - q.from, c->r->q + q.from, q_width, 0);
}

/* `heads` heads of the attention from `head` on, and of its rows in the chunk `rows` from `row` on. */
static void attend_rows(const Attention *a, int64_t head, int64_t heads, int64_t row, int64_t rows) {
    Attention part = *a;
    part.heads = heads, part.rows = rows;
    part.causal += row, part.recent += row;
    part.q += head * a->q_head + row * a->q_row;
    part.out += head * a->out_head + row * a->out_row;
    for (Stretch *each = part.stretches; each < part.stretches + 2; each++) {
        each->k += head * each->k_head;
        each->v += head * each->v_head;
    }
    attend(&part);
}

/* The part's share of an attention whose rows are in the chunk: whole heads, and at its ends some vectors of rows. */
static void attend_share(const Attention *a, int64_t part, int64_t parts) {
    int64_t vectors = (a->rows + TILE - 1) / TILE;
    Range share = share_of(a->heads * vectors, 1, part, parts);
    for (int64_t from = share.from, taken; from < share.to; from += taken) {
        int64_t row = from % vectors * TILE, heads = row ? 0 : (share.to - from) / vectors;
        taken = heads ? heads * vectors : least(vectors - from % vectors, share.to - from);
        attend_rows(a, from / vectors, most(heads, 1), row, heads ? a->rows : least(taken * TILE, a->rows - row));
    }
}

/* Attention of the chunk's rows, as far as they have any. */
static void attend_part(const void *of, int64_t part) {
    const Chunk *c = of;
    const Shape *s = c->s;
    for (const Attention *each = c->r->attentions; each < c->r->attentions + c->r->count; each++) {
        int64_t begin = most(each->first, c->first), end = least(each->first + each->rows, c->first + c->rows);
        if (begin >= end) continue;
        Attention a = *each;
        a.rows = end - begin;
        a.causal += begin - each->first, a.recent += begin - each->first;
        for (Stretch *columns = a.stretches; columns < a.stretches + 2; columns++) {
            columns->k += c->layer * columns->k_layer;
            columns->v += c->layer * columns->v_layer;
        }
        a.q_head = s->dqk, a.q_row = s->heads * s->dqk;
        a.out_head = s->dv, a.out_row = 3 * s->heads * s->dv;
        a.q = c->r->q + (begin - c->first) * a.q_row;
        a.out = c->r->gates + s->heads * s->dv + (begin - c->first) * a.out_row;
        attend_share(&a, part, c->parts);
    }
}

/* Rows `from` ... `to` - 1 of the chunk. */
static void attend_rows_to_self(const Chunk *c, int64_t from, int64_t to) {
    const Shape *s = c->s;
    const Rows *r = c->r;
    int64_t width = s->heads * s->dv, q_row = s->heads * s->dqk, first = c->first + from;
    Attention a = {
        .q = r->q + from * q_row, .out = r->gates + width + from * 3 * width, .q_head = s->dqk, .q_row = q_row,
        .out_head = s->dv, .out_row = 3 * width, .heads = s->heads, .rows = to - from, .dqk = s->dqk, .dv = s->dv,
        .scale = r->scale,
        .stretches = {{
            .k = r->k + first * r->k_row, .v = r->v + first * r->v_row, .k_head = r->k_head, .k_row = r->k_row,
            .v_head = r->v_head, .v_row = r->v_row, .columns = to - from
        }}
    };
    attend_to_self(&a, r->self_weights + first);
}

static void gate_part(const void *of, int64_t part) {
    const Chunk *c = of;
    const Shape *s = c->s;
    Range rows = share_of(c->rows, ROW_STEP, part, c->parts);
    int64_t width = s->heads * s->dv;
    if (c->r->self_weights) attend_rows_to_self(c, rows.from, rows.to);
    gate(
        c->r->gates + rows.from * 3 * width, 3 * width, rows.to - rows.from, width, s->norm_group, c->w->gate_weight,
        c->w->gate_bias, s->eps
    );
}

static void output_part(const void *of, int64_t part) {
    const Chunk *c = of;
    int64_t depth = 3 * c->s->heads * c->s->dv, dim = c->s->dim;
    Range columns = share_of(dim, COLUMN_STEP, part, c->parts);
    num *x = c->r->x + c->first * dim + columns.from;
    Product p = {
        .a = c->r->gates, .weights = c->w->output + columns.from * depth, .a_row = depth, .rows = c->rows,
        .depth = depth, .columns = columns.to - columns.from, .before = x, .out = x, .out_row = dim
    };
    multiply(&p);
}

static void run_step(const Chunk *c, void (*step)(const void *of, int64_t part)) {
    team_run(c->parts, c->parts, step, c);
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
static void run_layer(Chunk c, int only_kv) {
    for (c.first = 0; c.first < c.r->rows; c.first += CHUNK) {
        c.rows = least(CHUNK, c.r->rows - c.first);
        run_step(&c, normalize_part);
        run_step(&c, project_kv_part);
    }
    if (only_kv) return;
    for (c.first = 0; c.first < c.r->rows; c.first += c.rows) {
        c.rows = chunk_end(c.r, c.first) - c.first;
        if (c.r->rows > CHUNK) run_step(&c, normalize_part);
        run_step(&c, project_uq_part);
        run_step(&c, attend_part);
        run_step(&c, gate_part);
        run_step(&c, output_part);
    }
}

/* Runs the layers first ... stop - 1 in up to `threads` threads. only_kv: the last of them computes K and V only. */
void relaygr_layers(
    const Shape *shape, const Layer *layers, const Rows *rows, int64_t first, int64_t stop, int32_t only_kv,
    int64_t threads
) {
    Before before;
    enter(&before);
    int64_t parts = team_enter(threads);
    for (int64_t layer = first; layer < stop; layer++)
        run_layer((Chunk){shape, layers + layer, rows, .layer = layer, .parts = parts}, only_kv && layer == stop - 1);
    team_leave(parts);
    leave(&before);
}
