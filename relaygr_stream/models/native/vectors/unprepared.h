/* For instructions of which the processor needs no preparation. */
#ifndef RELAYGR_UNPREPARED_H
#define RELAYGR_UNPREPARED_H

typedef int Before;

static inline void enter(Before *before) { *before = 0; }

static inline void leave(const Before *before) { (void)before; }

static inline int unavailable(void) { return 0; }

#endif
