/* Several threads that do the units of one task together (team.c). */
#ifndef RELAYGR_TEAM_H
#define RELAYGR_TEAM_H

#include <stdint.h>

/* Takes the team for a call that may use `threads` threads, its own included, until team_leave. Returns how many parts a
 * task is worth: 1 if the call is alone, because it asks for that or another call has the team. */
int64_t team_enter(int64_t threads);
void team_leave(int64_t parts);

/* run(of, unit) for every unit below `units`, in any order; returns when all are done. A task that is worth one part runs
 * in the calling thread. */
void team_run(int64_t parts, int64_t units, void (*run)(const void *of, int64_t unit), const void *of);

/* The part's share of 0 ... total - 1, cut at multiples of `step`. */
typedef struct {
    int64_t from, to;
} Range;

static inline Range share_of(int64_t total, int64_t step, int64_t part, int64_t parts) {
    int64_t steps = (total + step - 1) / step;
    Range range = {steps * part / parts * step, steps * (part + 1) / parts * step};
    if (range.from > total) range.from = total;
    if (range.to > total) range.to = total;
    return range;
}

#endif
