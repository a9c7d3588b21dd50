/* The embedding of behaviours and candidates, with the sums of embeddings.py in the same order and each rounded to num.
 * A behaviour so has the same vector in both.
 */
#include "parts.h"

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
    for (int64_t d = 0; d < dim; d += TILE) store(x + d, _mm512_add_ps(load(x + d), load(row + d)));
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

/* Writes the rows of one sequence after another: behaviours, then candidates. Returns how many items are unknown. */
int64_t relaygr_embed(const Tables *t, const Sequence *sequences, int64_t count, num *x) {
    int64_t unknown_items = 0;
    for (const Sequence *s = sequences; s < sequences + count; s++) {
        for (int64_t i = 0; i < s->behaviours; i++, x += t->dim) {
            unknown_items += add_item_and_position(t, s->items, i, s->behaviours, s->first + i, x);
            add_row(x, t->action + (number(s->actions, i) & (ACTIONS - 1)) * t->dim, t->dim);
            add_row(x, t->gap + gap_bucket(number(s->gaps, i)) * t->dim, t->dim);
        }
        for (int64_t i = 0; i < s->candidates; i++, x += t->dim) {
            unknown_items += add_item_and_position(t, s->candidate_items, i, s->candidates, s->first + s->behaviours, x);
            add_row(x, t->candidate, t->dim);
        }
    }
    return unknown_items;
}
