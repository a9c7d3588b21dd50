/* SiLU attention by vectors, in float32 or bfloat16 (lanes.h). Scores stay in the first-level cache.
 *
 * The rows are transposed once: q as [lane of dqk][row]. The scores of a column for 16 rows are then a vector, computed
 * by broadcasting each lane of K, which so is read in place. These scores, [lane of columns][row], are broadcast in
 * turn to vectors of V. A lane of columns is LANE columns, counted from the start of the history, so V in bfloat16 is
 * packed in pairs of rows.
 *
 * Each score and each sum over columns has the same operations in the same order for any set of rows, and wherever the
 * two stretches of columns meet. So chunks and batches change no bit.
 */
#include "lane_at.h"
#include "parts.h"

enum {
    PART = VECTORS * TILE, /* most rows of one step of scores */
    ROWS = 2 * PART,       /* rows transposed together */
    COLUMNS = 6, /* of one step of scores */
    PANEL = 16 * COLUMNS, /* columns */
    SUMMED = 6 /* most rows of which VECTORS vectors of dv are summed in registers */
};

static _Thread_local struct {
    _Alignas(LINE) int32_t q[WIDTH / LANE * ROWS]; /* [lane of dqk][row], rows up to a multiple of 16 are zeros */
    _Alignas(LINE) float products[COLUMNS * PART]; /* of one step: [column][row] */
    _Alignas(LINE) int32_t scores[PANEL / LANE * PART]; /* [lane of columns][row] */
    _Alignas(LINE) float sums[ROWS * WIDTH]; /* [row][dv] */
    _Alignas(LINE) num k[COLUMNS * WIDTH]; /* columns that do not lie side by side */
    _Alignas(LINE) num v[PANEL * WIDTH]; /* a panel's V: [lane of columns][dv] */
    _Alignas(LINE) num none[WIDTH]; /* zeros: a column outside the stretches */
    Silu silu;
} room;

/* The columns that row r of the block sees: [low, high). */
static inline int64_t low_of(const Attention *a, int64_t r) { return most(0, least(a->recent_to, a->recent + r)); }

static inline int64_t high_of(const Attention *a, int64_t r) {
    return least(a->columns, most(a->causal_from, a->causal + r));
}

/* A mask of the 16 rows from r on that see the column. */
static inline uint32_t seen_by(const Attention *a, int64_t column, int64_t r) {
    int64_t from = column < a->causal_from ? 0 : most(0, column - a->causal + 1 - r);
    int64_t to = column >= a->recent_to ? TILE : most(0, column - a->recent + 1 - r);
    uint32_t below = to >= TILE ? 0xffff : (1u << to) - 1, skipped = from >= TILE ? 0xffff : (1u << from) - 1;
    return below & ~skipped;
}

/* K or V of a column, by its head's first address in each stretch; zeros where there is no column. `skipped` of the
 * numbered columns are none, so that lanes begin at even columns of the history. */
static inline const num *column_at(const Attention *a, int64_t head, int64_t column, int64_t skipped, int of_v) {
    column -= skipped;
    for (const Stretch *s = a->stretches; column >= 0 && s < a->stretches + 2; column -= s->columns, s++)
        if (column < s->columns)
            return of_v ? s->v + head * s->v_head + column * s->v_row : s->k + head * s->k_head + column * s->k_row;
    return room.none;
}

/* K of the columns of a step, and the stride from one to the next. Columns that do not lie side by side are copied;
 * the memory behind the last one is not read. */
static inline const num *step_keys(const Attention *a, int64_t head, int64_t column, int64_t skipped, int64_t *row) {
    int64_t start = skipped;
    for (const Stretch *s = a->stretches; s < a->stretches + 2; start += s->columns, s++)
        if (column >= start && column + COLUMNS <= start + s->columns) {
            *row = s->k_row;
            return s->k + head * s->k_head + (column - start) * s->k_row;
        }
    for (int64_t c = 0; c < COLUMNS; c++)
        memcpy(room.k + c * a->dqk, column_at(a, head, column + c, skipped, 0), a->dqk * sizeof(num));
    *row = a->dqk;
    return room.k;
}

/* V of the columns from ... to - 1 as lanes, and the stride from one lane of columns to the next. A lane of one column
 * is a row of V as it lies. */
static const num *panel_values(
    const Attention *a, int64_t head, int64_t from, int64_t to, int64_t skipped, int64_t *row
) {
    int64_t start = skipped;
    if (LANE == 1)
        for (const Stretch *s = a->stretches; s < a->stretches + 2; start += s->columns, s++)
            if (from >= start && to <= start + s->columns) {
                *row = s->v_row;
                return s->v + head * s->v_head + (from - start) * s->v_row;
            }
    *row = a->dv * LANE;
    for (int64_t column = from; column < to; column += LANE) {
        const num *rows[LANE];
        for (int64_t i = 0; i < LANE; i++)
            rows[i] = column + i < to ? column_at(a, head, column + i, skipped, 1) : room.none;
        join_rows(rows, a->dv, room.v + (column - from) * a->dv);
    }
    return room.v;
}

/* The K and V to prefetch into the second-level cache while a step is computed, `lines` of each. */
typedef struct {
    const char *at[2];
    int64_t lines;
} Ahead;

/* Products of COLUMNS columns and `vectors` vectors of rows. */
static inline __attribute__((always_inline)) void multiply_keys(
    const num *k, int64_t k_row, const int32_t *q, int64_t dqk, float *products, const Ahead *ahead,
    const int64_t vectors
) {
    const num *third[2] = {k, k + 3 * k_row};
    vec sums[COLUMNS][VECTORS];
#pragma GCC unroll 6
    for (int64_t c = 0; c < COLUMNS; c++)
#pragma GCC unroll 4
        for (int64_t i = 0; i < vectors; i++) sums[c][i] = v_zero();
    for (int64_t d = 0; d < dqk; d += LANE, q += ROWS) {
        for (int64_t i = d; i < d + LANE; i++) /* a burst of them would keep the loads of this step waiting */
            if (i / 2 < ahead->lines) fetch(ahead->at[i % 2] + i / 2 * LINE);
        vec rows[VECTORS];
#pragma GCC unroll 4
        for (int64_t i = 0; i < vectors; i++) rows[i] = v_read(q + i * TILE);
#pragma GCC unroll 6
        for (int64_t c = 0; c < COLUMNS; c++) {
            vec x = v_all_bits(lane_at(third[c / 3] + c % 3 * k_row + d));
#pragma GCC unroll 4
            for (int64_t i = 0; i < vectors; i++) sums[c][i] = multiply_add(x, rows[i], sums[c][i]);
        }
    }
#pragma GCC unroll 6
    for (int64_t c = 0; c < COLUMNS; c++)
#pragma GCC unroll 4
        for (int64_t i = 0; i < vectors; i++) v_write(products + c * PART + i * TILE, sums[c][i]);
}

/* Products -> scores. hide: whether some rows do not see all columns. */
static inline __attribute__((always_inline)) void activate(
    const Attention *a, const float *products, int32_t *scores, int64_t column, int64_t first, const int64_t vectors,
    const int hide
) {
    const Silu silu_of = room.silu;
    for (int64_t c = 0; c < COLUMNS; c += LANE, products += LANE * PART, scores += PART)
#pragma GCC unroll 4
        for (int64_t i = 0; i < vectors; i++) {
            vec s[LANE];
            for (int64_t of = 0; of < LANE; of++) {
                s[of] = score_of(v_read(products + of * PART + i * TILE), &silu_of);
                if (hide) s[of] = v_keep(seen_by(a, column + c + of, first + i * TILE), s[of]);
            }
            v_write(scores + i * TILE, joined(s));
        }
}

/* sums += scores x V of `count` rows, `wide` vectors of dv. */
static inline __attribute__((always_inline)) void add_values(
    const int32_t *scores, const num *v, int64_t v_row, int64_t lanes, float *to, int64_t dv, const int64_t count,
    const int64_t wide
) {
    vec sums[SUMMED][VECTORS];
#pragma GCC unroll 6
    for (int64_t r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++) sums[r][i] = v_read(to + r * dv + i * TILE);
    for (int64_t lane = 0; lane < lanes; lane++, scores += PART, v += v_row) {
        vec values[VECTORS];
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++) values[i] = v_read(v + i * TILE * LANE);
#pragma GCC unroll 6
        for (int64_t r = 0; r < count; r++) {
            vec s = v_all_bits(scores[r]);
#pragma GCC unroll 4
            for (int64_t i = 0; i < wide; i++) sums[r][i] = multiply_add(s, values[i], sums[r][i]);
        }
    }
#pragma GCC unroll 6
    for (int64_t r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++) v_write(to + r * dv + i * TILE, sums[r][i]);
}

static inline __attribute__((always_inline)) void add_values_of(
    const int32_t *scores, const num *v, int64_t v_row, int64_t lanes, float *to, int64_t dv, int64_t count,
    const int64_t wide
) {
    if (count == SUMMED)
        add_values(scores, v, v_row, lanes, to, dv, SUMMED, wide);
    else if (count == 5)
        add_values(scores, v, v_row, lanes, to, dv, 5, wide);
    else if (count == 4)
        add_values(scores, v, v_row, lanes, to, dv, 4, wide);
    else
        for (int64_t r = 0; r < count; r++) add_values(scores + r, v, v_row, lanes, to + r * dv, dv, 1, wide);
}

/* The sums of a part's rows, as evenly as possible: 64 are nine times six and twice five, 16 six and twice five. */
static void add_all_values(
    const int32_t *scores, const num *v, int64_t v_row, int64_t lanes, float *to, int64_t dv, int64_t rows
) {
    int64_t parts = (rows + SUMMED - 1) / SUMMED;
    for (int64_t row = 0, count; row < rows; row += count, parts--) {
        count = (rows - row + parts - 1) / parts;
        for (int64_t d = 0; d < dv; d += VECTORS * TILE) {
            if (VECTORS == 1 || dv - d >= VECTORS * TILE)
                add_values_of(scores + row, v + d * LANE, v_row, lanes, to + row * dv + d, dv, count, VECTORS);
            else
                add_values_of(scores + row, v + d * LANE, v_row, lanes, to + row * dv + d, dv, count, VECTORS / 2);
        }
    }
}

/* A group of rows of one head, transposed in `room.q`. */
typedef struct {
    const Attention *a;
    int64_t head, first, rows; /* of the block */
    int64_t low, high;         /* columns that any of them sees */
    int64_t skipped;
} Group;

/* PANEL columns after `column`: of this head, or the first of the next head. */
static inline Ahead look_ahead(const Group *g, int64_t column) {
    const Attention *a = g->a;
    const Stretch *s = a->stretches;
    int64_t head = g->head, next = column + PANEL;
    if (next >= g->high) {
        next += g->low - g->high;
        if (++head == a->heads) return (Ahead){.lines = 0};
    }
    return (Ahead){
        {(const char *)(s->k + head * s->k_head + next * s->k_row), (const char *)(s->v + head * s->v_head + next * s->v_row)},
        COLUMNS * most(a->dqk, a->dv) * sizeof(num) / LINE
    };
}

static inline __attribute__((always_inline)) void score_step(
    const Group *g, int64_t row, int64_t column, int64_t all_from, int64_t all_to, int32_t *scores, const Ahead *ahead,
    const int64_t vectors
) {
    int64_t k_row;
    const num *k = step_keys(g->a, g->head, column, g->skipped, &k_row);
    multiply_keys(k, k_row, room.q + row, g->a->dqk, room.products, ahead, vectors);
    if (column < all_from || column + COLUMNS > all_to)
        activate(g->a, room.products, scores, column, g->first + row, vectors, 1);
    else
        activate(g->a, room.products, scores, column, g->first + row, vectors, 0);
}

/* A part of the group's rows, from `row` on, over the panel's columns that any of them sees. v: of columns from `from`
 * on, a multiple of LANE. */
static void attend_panel(const Group *g, int64_t row, int64_t rows, int64_t from, int64_t to, const num *v, int64_t v_row) {
    const Attention *a = g->a;
    int64_t vectors = (rows + TILE - 1) / TILE, start = g->first + row, last = start + rows - 1;
    int64_t begin = most(from, low_of(a, start) / LANE * LANE), end = least(to, high_of(a, last));
    if (begin >= end) return;
    int64_t all_from = low_of(a, last), all_to = high_of(a, start);
    for (int64_t column = begin; column < end; column += COLUMNS) {
        int32_t *scores = room.scores + (column - begin) / LANE * PART;
        const Ahead ahead = row ? (Ahead){.lines = 0} : look_ahead(g, column);
        if (VECTORS == 1 || vectors == 1)
            score_step(g, row, column, all_from, all_to, scores, &ahead, 1);
        else if (vectors == 2)
            score_step(g, row, column, all_from, all_to, scores, &ahead, 2);
        else if (vectors == 3)
            score_step(g, row, column, all_from, all_to, scores, &ahead, 3);
        else
            score_step(g, row, column, all_from, all_to, scores, &ahead, 4);
    }
    int64_t lanes = (end - begin + LANE - 1) / LANE;
    add_all_values(room.scores, v + (begin - from) / LANE * v_row, v_row, lanes, room.sums + row * a->dv, a->dv, rows);
}

static void transpose_rows(const num *q, int64_t q_row, int64_t rows, int64_t dqk) {
    int64_t padded = round_up(rows, TILE);
    for (int64_t d = 0; d < dqk; d += LANE)
        for (int64_t r = 0; r < padded; r++) room.q[d / LANE * ROWS + r] = r < rows ? lane_at(q + r * q_row + d) : 0;
}

static void write_rows(const Group *g) {
    const Attention *a = g->a;
    const vec weight = v_all(a->weight);
    for (int64_t r = 0; r < g->rows; r++) {
        num *out = a->out + g->head * a->out_head + (g->first + r) * a->out_row;
        for (int64_t d = 0; d < a->dv; d += 2 * TILE) {
            const float *from = room.sums + r * a->dv + d;
            vec sums[2] = {v_read(from), v_read(from + TILE)};
            in_order(sums);
            store(out + d, v_mul(sums[0], weight));
            store(out + d + TILE, v_mul(sums[1], weight));
        }
    }
}

static void attend_group(const Group *g) {
    const Attention *a = g->a;
    transpose_rows(a->q + g->head * a->q_head + g->first * a->q_row, a->q_row, g->rows, a->dqk);
    memset(room.sums, 0, g->rows * a->dv * sizeof(float));
    for (int64_t from = g->low; from < g->high; from += PANEL) {
        int64_t to = least(from + PANEL, g->high), v_row;
        const num *v = panel_values(a, g->head, from, to, g->skipped, &v_row);
        for (int64_t row = 0; row < g->rows; row += PART)
            attend_panel(g, row, least(PART, g->rows - row), from, to, v, v_row);
    }
    write_rows(g);
}

void attend(const Attention *of) {
    Attention a = *of;
    int64_t skipped = a.position % LANE;
    a.columns += skipped;
    a.causal_from += skipped, a.causal += skipped;
    a.recent_to += skipped, a.recent += skipped;
    make_silu(&room.silu, a.scale);
    for (int64_t first = 0; first < a.rows; first += ROWS) {
        int64_t rows = least(ROWS, a.rows - first);
        int64_t low = low_of(&a, first) / LANE * LANE, high = high_of(&a, first + rows - 1);
        for (int64_t head = 0; head < a.heads; head++) {
            Group g = {&a, head, first, rows, low, high, skipped};
            attend_group(&g);
        }
    }
}
