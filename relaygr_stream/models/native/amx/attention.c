/* SiLU attention in bfloat16 on x86-64 with AMX. Scores stay in the first-level cache, and never form a matrix.
 *
 * It computes one block of rows at a time. It packs K and V of a panel of columns in the form of the tile unit's right
 * operand. Then, for each 16 rows: tiles compute the scores of 32 columns; vectors compute SiLU between the tile
 * instructions of the next scores and of the last product; the result is, as bfloat16, the left operand of the second
 * product, which sums over all columns in float32.
 * arguments.py describes the arguments.
 */
#include "columns.h"
#include "parts.h"
#include "silu_table.h"

enum {
    ROWS = 512,  /* rows that share the packed K and V */
    PANEL = 512, /* columns packed together: with 64 wide heads K and V take 128 KiB of the second-level cache */
    /* Up to this number of rows, smaller panels are faster: their packed K and V, 16 KiB, stay in the first-level
     * cache, and few rows read a panel too seldom to pay for its way through the second level. */
    FEW_ROWS = 96,
    SMALL_PANEL = 64
};

/* The prefetching of the next panel's K and V into the second-level cache while this panel is computed. */
typedef struct {
    const char *at[2];
    int64_t lines; /* of each, FETCHES times in a step; 0 when all are on their way */
    int64_t steps; /* until then */
} Ahead;

static _Thread_local struct {
    _Alignas(64) bf16 k[PANEL * WIDTH], v[PANEL * WIDTH]; /* packed */
    _Alignas(64) bf16 q[ROWS * WIDTH];                    /* [row][dqk], rows up to a multiple of 16 are zeros */
    _Alignas(64) bf16 scores[2][PANEL * TILE];            /* of two steps, or tiles of rows: [step][row][column] */
    _Alignas(64) float products[2][2 * TILE * TILE];      /* of two steps: [column tile][16 rows][16 columns] */
    _Alignas(64) float sums[ROWS * WIDTH];
    SiluTable silu;
    Ahead ahead;
} room;

/* Prefetches a few lines of the next panel at a time, since the hardware does not prefetch behind a panel. Prefetching
 * behind the end is harmless. With many rows per panel it is off: lines in transit would block the tiles' access to the
 * second-level cache, which costs more. */
enum { FETCHES = TILE / 2 /* in a step */ };

static inline void fetch_ahead(const Ahead *ahead, int64_t part) {
    for (int64_t line = part * ahead->lines; line < (part + 1) * ahead->lines; line++) {
        fetch(ahead->at[0] + line * LINE);
        fetch(ahead->at[1] + line * LINE);
    }
}

/* The panel after this one: of this head, or the first of the next head. */
static void look_ahead(
    const Attention *a, int64_t head, int64_t from, int64_t low, int64_t high, int64_t panel, int64_t rows
) {
    room.ahead.lines = 0;
    if (panel == PANEL) return;
    if (from + panel < high)
        from += panel;
    else if (++head < a->heads)
        from = low;
    else
        return;
    int64_t bytes = least(panel, high - from) * most(a->dqk, a->dv) * 2, steps = rows / TILE * (panel / PAIR);
    const Stretch *s = a->stretches;
    room.ahead.at[0] = (const char *)(s->k + head * s->k_head + from * s->k_row);
    room.ahead.at[1] = (const char *)(s->v + head * s->v_head + from * s->v_row);
    room.ahead.lines = round_up(bytes, LINE * FETCHES * steps) / (LINE * FETCHES * steps);
    room.ahead.steps = round_up(bytes, LINE * FETCHES * room.ahead.lines) / (LINE * FETCHES * room.ahead.lines);
}

static inline void fetched_ahead(void) {
    if (!room.ahead.lines) return;
    for (int part = 0; part < 2; part++) room.ahead.at[part] += LINE * FETCHES * room.ahead.lines;
    if (!--room.ahead.steps) room.ahead.lines = 0;
}

/* The columns of the panel that row r of the block sees, of the first stretch: [*low, *high). */
static inline void visible(const Attention *a, int64_t r, int64_t from, int64_t *low, int64_t *high) {
    *low = most(0, least(a->recent_to, a->recent + r) - from);
    *high = least(a->columns, most(a->causal_from, a->causal + r)) - from;
}

static inline uint32_t bits_below(int64_t n) { return n <= 0 ? 0 : n >= PAIR ? ~0u : (1u << n) - 1; }

/* Rows from ... to - 1 of a step: products of 32 columns -> scores. Unrolled, so that no branch delays the vectors. */
static inline __attribute__((always_inline)) void activate(
    const float *products, bf16 *scores, int64_t from, int64_t to, const SiluTable *silu, const Ahead *ahead
) {
#pragma GCC unroll 16
    for (int64_t i = from; i < to; i++) {
        if (i % 2 == 0) fetch_ahead(ahead, i / 2);
        __m512 left = silu_of_scores(_mm512_load_ps(products + i * TILE), silu);
        __m512 right = silu_of_scores(_mm512_load_ps(products + (TILE + i) * TILE), silu);
        _mm512_store_si512(scores + i * PAIR, both_rounded(left, right));
    }
}

/* The scores of 16 rows from `row` on and 32 columns from `column` of the panel on; 0 for invisible pairs. */
static void hide(const Attention *a, int64_t row, int64_t from, int64_t column, bf16 *scores) {
    for (int64_t i = 0; i < TILE; i++) {
        int64_t low, high;
        visible(a, row + i, from, &low, &high);
        __mmask32 seen = bits_below(high - column) & ~bits_below(low - column);
        _mm512_store_si512(scores + i * PAIR, _mm512_maskz_loadu_epi16(seen, scores + i * PAIR));
    }
}

/* Tiles 4 and 5 (+)= 32 of the depth of q x k. */
static inline void multiply_scores(const bf16 *q, const bf16 *k, int64_t dqk, int64_t d) {
    _tile_loadd(6, q + d, dqk * 2);
    _tile_loadd(7, k + d * TILE, LINE);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(7, k + TILE * dqk + d * TILE, LINE);
    _tile_dpbf16ps(5, 6, 7);
}

static inline void store_products(float *products) {
    _tile_stored(4, products, LINE);
    _tile_stored(5, products + TILE * TILE, LINE);
}

/* The first product's next step and the second product's last step, interleaved with SiLU of the step between them. A
 * core runs tiles and vectors in parallel only if both are within its window of a few hundred instructions. Tiles 0 to
 * 3 keep the sums of the first 64 of dv. */
static inline __attribute__((always_inline)) void step(
    const float *products, bf16 *scores, const bf16 *q, const bf16 *next_k, float *next_products,
    const bf16 *last_scores, const bf16 *last_v, const int64_t dqk, const int64_t dv
) {
    const SiluTable silu = room.silu;
    const Ahead ahead = room.ahead;
    const int64_t half = TILE / 2;
    stores_done();
    _tile_zero(4);
    _tile_zero(5);
#pragma GCC unroll 4
    for (int64_t d = 0; d < WIDTH; d += PAIR) {
        if (next_k && d < dqk) multiply_scores(q, next_k, dqk, d);
        activate(products, scores, half * d / WIDTH, half * (d + PAIR) / WIDTH, &silu, &ahead);
    }
    if (last_scores) {
        _tile_loadd(6, last_scores, LINE);
        _tile_loadd(7, last_v, LINE);
        _tile_dpbf16ps(0, 6, 7);
    }
    activate(products, scores, half, half + 2, &silu, &ahead);
    if (last_scores) {
        _tile_loadd(7, last_v + TILE * PAIR, LINE);
        _tile_dpbf16ps(1, 6, 7);
    }
    activate(products, scores, half + 2, half + 4, &silu, &ahead);
    if (last_scores && dv > 2 * TILE) {
        _tile_loadd(7, last_v + 2 * TILE * PAIR, LINE);
        _tile_dpbf16ps(2, 6, 7);
    }
    activate(products, scores, half + 4, half + 6, &silu, &ahead);
    if (last_scores && dv > 2 * TILE) {
        _tile_loadd(7, last_v + 3 * TILE * PAIR, LINE);
        _tile_dpbf16ps(3, 6, 7);
    }
    activate(products, scores, half + 6, TILE, &silu, &ahead);
    if (next_k) store_products(next_products);
}

/* Tiles 0 ... 3 from or to the sums of 16 rows, columns d ... d + 63 of dv, as far as there are so many. */
static inline void load_sums(const float *sums, int64_t dv, int64_t d) {
    _tile_loadd(0, sums + d, dv * 4);
    _tile_loadd(1, sums + d + TILE, dv * 4);
    if (dv - d <= 2 * TILE) return;
    _tile_loadd(2, sums + d + 2 * TILE, dv * 4);
    _tile_loadd(3, sums + d + 3 * TILE, dv * 4);
}

static inline void store_sums(float *sums, int64_t dv, int64_t d) {
    _tile_stored(0, sums + d, dv * 4);
    _tile_stored(1, sums + d + TILE, dv * 4);
    if (dv - d <= 2 * TILE) return;
    _tile_stored(2, sums + d + 2 * TILE, dv * 4);
    _tile_stored(3, sums + d + 3 * TILE, dv * 4);
}

/* Tiles 0 ... 3 += scores x V over 32 columns. */
static inline void multiply_values(const bf16 *scores, const bf16 *v, int64_t dv) {
    stores_done();
    _tile_loadd(6, scores, LINE);
    _tile_loadd(7, v, LINE);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, v + TILE * PAIR, LINE);
    _tile_dpbf16ps(1, 6, 7);
    if (dv <= 2 * TILE) return;
    _tile_loadd(7, v + 2 * TILE * PAIR, LINE);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(7, v + 3 * TILE * PAIR, LINE);
    _tile_dpbf16ps(3, 6, 7);
}

/* The rest of the second product if dv is above 64. */
static void multiply_further_values(const bf16 *scores, float *sums, int64_t begin, int64_t end, int64_t dv) {
    for (int64_t d = 4 * TILE; d < dv; d += 4 * TILE) {
        load_sums(sums, dv, d);
        for (int64_t column = begin; column < end; column += PAIR)
            multiply_values(scores + column * TILE, room.v + column * dv + d * PAIR, dv - d);
        store_sums(sums, dv, d);
    }
}

/* The place of a step: 16 rows of the block from `row` on, and the columns from `column` on. The rows see columns begin
 * ... end - 1 of the panel. */
typedef struct {
    int64_t row, begin, end, column;
    int64_t all_from, all_to; /* the columns that all of the rows see */
} Place;

typedef struct {
    const Attention *attention;
    int64_t first, rows, from, count; /* of the block, of the panel */
} Panel;

/* Finds the first step of the first rows from `row` on that see any column of the panel; returns whether one exists. */
static int begin_rows(const Panel *of, int64_t row, Place *at) {
    for (; row < of->rows; row += TILE) {
        int64_t low, high;
        visible(of->attention, of->first + row, of->from, &low, &at->all_to);
        visible(of->attention, of->first + row + TILE - 1, of->from, &at->all_from, &high);
        at->row = row;
        at->begin = at->column = low / PAIR * PAIR;
        at->end = least(of->count, high);
        if (at->begin < at->end) return 1;
    }
    return 0;
}

static inline int advance(const Panel *of, Place *at) {
    at->column += PAIR;
    return at->column < at->end || begin_rows(of, at->row + TILE, at);
}

/* All rows of the block over the panel's columns, one step after the other without a break between rows. The first
 * product is one step ahead of SiLU, the second product one step behind. */
static inline __attribute__((always_inline)) void attend_panel(
    const Panel *of, const int64_t dqk, const int64_t dv
) {
    Place next, last = {0};
    const bf16 *last_scores = NULL;
    int turn = 0, more = begin_rows(of, 0, &next);
    if (!more) return;
    stores_done();
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t d = 0; d < dqk; d += PAIR)
        multiply_scores(room.q + next.row * dqk, room.k + next.column * dqk, dqk, d);
    store_products(room.products[turn]);
    load_sums(room.sums + next.row * dv, dv, 0);
    for (; more; turn ^= 1) {
        Place now = next;
        more = advance(of, &next);
        bf16 *of_rows = room.scores[now.row / TILE % 2];
        bf16 *scores = dv > 4 * TILE ? of_rows + now.column * TILE : room.scores[turn];
        step(
            room.products[turn], scores, room.q + next.row * dqk, more ? room.k + next.column * dqk : NULL,
            room.products[turn ^ 1], last_scores, room.v + last.column * dv, dqk, dv
        );
        if (now.all_from > now.column || now.all_to < now.column + PAIR)
            hide(of->attention, of->first + now.row, of->from, now.column, scores);
        fetched_ahead();
        if (last_scores && last.row != now.row) { /* what the tiles hold is complete but for dv above 64 */
            store_sums(room.sums + last.row * dv, dv, 0);
            load_sums(room.sums + now.row * dv, dv, 0);
        }
        last_scores = scores;
        last = now;
        if (dv > 4 * TILE && (!more || next.row != now.row)) {
            store_sums(room.sums + now.row * dv, dv, 0);
            multiply_further_values(of_rows, room.sums + now.row * dv, now.begin, now.end, dv);
            load_sums(room.sums + now.row * dv, dv, 0);
        }
    }
    multiply_values(last_scores, room.v + last.column * dv, dv);
    store_sums(room.sums + last.row * dv, dv, 0);
}

/* more: adds to what is there. */
static void write_rows(const Attention *a, int64_t head, int64_t first, int64_t rows, int more) {
    __m512 weight = _mm512_set1_ps(a->weight);
    for (int64_t r = 0; r < rows; r++) {
        bf16 *out = a->out + head * a->out_head + (first + r) * a->out_row;
        for (int64_t d = 0; d < a->dv; d += PAIR) {
            const float *from = room.sums + r * a->dv + d;
            __m512 sums[2] = {_mm512_load_ps(from), _mm512_load_ps(from + TILE)};
            in_order(sums);
            for (int part = 0; part < 2; part++, out += TILE) {
                __m512 sum = _mm512_mul_ps(sums[part], weight);
                store(out, more ? _mm512_add_ps(sum, load(out)) : sum);
            }
        }
    }
}

static void attend_head(const Attention *a, int64_t head, int64_t first, int64_t rows, int more) {
    const Stretch *s = a->stretches;
    int64_t padded = round_up(rows, TILE), panel = rows > FEW_ROWS ? PANEL : SMALL_PANEL, low, high, unused;
    for (int64_t r = 0; r < rows; r++)
        memcpy(room.q + r * a->dqk, a->q + head * a->q_head + (first + r) * a->q_row, a->dqk * 2);
    memset(room.q + rows * a->dqk, 0, (padded - rows) * a->dqk * 2);
    memset(room.sums, 0, padded * a->dv * 4);
    visible(a, first, 0, &low, &unused);
    visible(a, first + rows - 1, 0, &unused, &high);
    low = low / PAIR * PAIR;
    for (int64_t from = low; from < high; from += panel) {
        Panel part = {a, first, rows, from, least(panel, high - from)};
        pack_keys(s->k + head * s->k_head + from * s->k_row, s->k_row, part.count, a->dqk, room.k);
        pack_values(s->v + head * s->v_head + from * s->v_row, s->v_row, part.count, a->dv, room.v);
        look_ahead(a, head, from, low, high, panel, padded);
        if (a->dqk == 64 && a->dv == 64) /* the usual width, known to the compiler */
            attend_panel(&part, 64, 64);
        else
            attend_panel(&part, a->dqk, a->dv);
    }
    write_rows(a, head, first, rows, more);
}

static void attend_stretch(const Attention *a, int more) {
    for (int64_t first = 0; first < a->rows; first += ROWS)
        for (int64_t head = 0; head < a->heads; head++)
            attend_head(a, head, first, least(ROWS, a->rows - first), more);
}

/* One stretch of columns after the other. Their sums meet as bfloat16 in `out`. */
void attend(const Attention *of) {
    Attention a = *of;
    make_silu_table(&room.silu, a.scale);
    a.columns = a.stretches[0].columns;
    attend_stretch(&a, 0);
    a.stretches[0] = a.stretches[1];
    a.causal_from -= a.columns, a.causal -= a.columns;
    a.recent_to -= a.columns, a.recent -= a.columns;
    a.columns = a.stretches[0].columns;
    if (a.columns) attend_stretch(&a, 1);
}
