/* The embedding of behaviours and candidates, with the sums of embeddings.py in the same order and each rounded to num.
 * A behaviour so has the same vector in both.
 */
#include "parts.h"

enum { ACTIONS = 256, GAP_BUCKETS = 43 }; /* embeddings.py */

/* Tables with rows of `dim` numbers. */
typedef struct {
    const num *item, *action, *position, *gap, *candidate;
    int64_t vocab, positions, dim;
} Tables;

/* Reads a number at any address, aligned or not. */
static inline int64_t number(const int64_t *from, int64_t index) {
    int64_t found;
    memcpy(&found, from + index, sizeof found);
    return found;
}

static inline int64_t item_row(const Tables *t, int64_t item) {
    int64_t rest = item % t->vocab;
    return rest < 0 ? rest + t->vocab : rest;
}

static inline int64_t gap_bucket(int64_t gap) {
    return gap <= 0 ? 0 : least(64 - __builtin_clzll((uint64_t)gap), GAP_BUCKETS - 1);
}

static void add_row(num *x, const num *row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += TILE) store(x + d, _mm512_add_ps(load(x + d), load(row + d)));
}

/* The item table is larger than the caches, so the next item's row is prefetched. */
static void add_item_and_position(const Tables *t, const int64_t *items, int64_t i, int64_t n, int64_t position, num *x) {
    const num *row = t->item + item_row(t, number(items, i)) * t->dim;
    if (i + 1 < n) {
        const char *next = (const char *)(t->item + item_row(t, number(items, i + 1)) * t->dim);
        for (int64_t byte = 0; byte < t->dim * (int64_t)sizeof(num); byte += LINE) fetch(next + byte);
    }
    memcpy(x, row, t->dim * sizeof(num));
    add_row(x, t->position + least(position, t->positions - 1) * t->dim, t->dim);
}

/* Writes the rows of one sequence after another: behaviours, then candidates. */
void relaygr_embed(const Tables *t, const Sequence *sequences, int64_t count, num *x) {
    for (const Sequence *s = sequences; s < sequences + count; s++) {
        for (int64_t i = 0; i < s->behaviours; i++, x += t->dim) {
            add_item_and_position(t, s->items, i, s->behaviours, s->first + i, x);
            add_row(x, t->action + (number(s->actions, i) & (ACTIONS - 1)) * t->dim, t->dim);
            add_row(x, t->gap + gap_bucket(number(s->gaps, i)) * t->dim, t->dim);
        }
        for (int64_t i = 0; i < s->candidates; i++, x += t->dim) {
            add_item_and_position(t, s->candidate_items, i, s->candidates, s->first + s->behaviours, x);
            add_row(x, t->candidate, t->dim);
        }
    }
}
