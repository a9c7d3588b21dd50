/* The embedding of behaviours and candidates, with the sums of embeddings.py in the same order and each rounded to num.
 * A behaviour so has the same vector in both.
 */
#include <stdatomic.h>

#include "parts.h"
#include "team.h"

enum { ACTIONS = 256, GAP_BUCKETS = 43 }; /* embeddings.py */

/* Tables with rows of `dim` numbers. */
typedef struct {
    const num *item, *action, *position, *gap, *candidate;
    int64_t vocab, oov_rows, positions, dim;
} Tables;

/* Reads a number at any address, aligned or not. */
static inline int64_t number(const int64_t *from, int64_t index) {
    int64_t found;
    memcpy(&found, from + index, sizeof found);
    return found;
}

static inline int unknown(const Tables *t, int64_t item) { return (uint64_t)item >= (uint64_t)t->vocab; }

/* The formula is in embeddings.py. */
static inline int64_t item_row(const Tables *t, int64_t item) {
    if (!unknown(t, item)) return item;
    if (t->oov_rows) {
        uint64_t z = (uint64_t)item;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return t->vocab + (int64_t)((z ^ (z >> 31)) % (uint64_t)t->oov_rows);
    }
    int64_t rest = item % t->vocab;
    return rest < 0 ? rest + t->vocab : rest;
}

static inline int64_t gap_bucket(int64_t gap) {
    return gap <= 0 ? 0 : least(64 - __builtin_clzll((uint64_t)gap), GAP_BUCKETS - 1);
}

static void add_row(num *x, const num *row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += TILE) store(x + d, v_add(load(x + d), load(row + d)));
}

/* The item table is larger than the caches, so the next item's row is prefetched. Returns whether the item is unknown. */
static int add_item_and_position(const Tables *t, const int64_t *items, int64_t i, int64_t n, int64_t position, num *x) {
    int64_t item = number(items, i);
    const num *row = t->item + item_row(t, item) * t->dim;
    if (i + 1 < n) {
        const char *next = (const char *)(t->item + item_row(t, number(items, i + 1)) * t->dim);
        for (int64_t byte = 0; byte < t->dim * (int64_t)sizeof(num); byte += LINE) fetch(next + byte);
    }
    memcpy(x, row, t->dim * sizeof(num));
    add_row(x, t->position + least(position, t->positions - 1) * t->dim, t->dim);
    return unknown(t, item);
}

typedef struct {
    const Tables *t;
    const Sequence *sequences;
    int64_t count, rows, parts;
    num *x;
    _Atomic int64_t *unknown_items;
} Embedding;

/* Rows `from` ... `to` - 1 of a sequence, whose first row is at x. Returns how many of their items are unknown. */
static int64_t embed_rows(const Tables *t, const Sequence *s, int64_t from, int64_t to, num *x) {
    int64_t unknown_items = 0;
    for (int64_t i = from; i < least(to, s->behaviours); i++) {
        num *row = x + i * t->dim;
        unknown_items += add_item_and_position(t, s->items, i, s->behaviours, s->first + i, row);
        add_row(row, t->action + (number(s->actions, i) & (ACTIONS - 1)) * t->dim, t->dim);
        add_row(row, t->gap + gap_bucket(number(s->gaps, i)) * t->dim, t->dim);
    }
    for (int64_t i = most(from - s->behaviours, 0); i < to - s->behaviours; i++) {
        num *row = x + (s->behaviours + i) * t->dim;
        unknown_items += add_item_and_position(t, s->candidate_items, i, s->candidates, s->first + s->behaviours, row);
        add_row(row, t->candidate, t->dim);
    }
    return unknown_items;
}

static void embed_part(const void *of, int64_t part) {
    const Embedding *e = of;
    Range rows = share_of(e->rows, 1, part, e->parts);
    int64_t before = 0, unknown_items = 0;
    for (const Sequence *s = e->sequences; s < e->sequences + e->count; s++) {
        int64_t own = s->behaviours + s->candidates, from = most(rows.from - before, 0), to = least(rows.to - before, own);
        unknown_items += embed_rows(e->t, s, from, to, e->x + before * e->t->dim);
        before += own;
    }
    atomic_fetch_add(e->unknown_items, unknown_items);
}

/* Writes the rows of one sequence after another: behaviours, then candidates, in up to `threads` threads. Returns how
 * many items are unknown. */
int64_t relaygr_embed(const Tables *t, const Sequence *sequences, int64_t count, num *x, int64_t threads) {
    _Atomic int64_t unknown_items = 0;
    Embedding e = {t, sequences, count, 0, team_enter(threads), x, &unknown_items};
    for (int64_t i = 0; i < count; i++) e.rows += sequences[i].behaviours + sequences[i].candidates;
    team_run(e.parts, e.parts, embed_part, &e);
    team_leave(e.parts);
    return unknown_items;
}
