/* The type num is bfloat16, and tiles multiply it: 32 columns of it are the width of a tile and of one step. */
#ifndef RELAYGR_NUMBERS_H
#define RELAYGR_NUMBERS_H

#include "bfloat16.h"

enum { CHUNK = 512 /* rows that pass the parts of a layer together: their gates, 512 x 768, are 768 KiB */ };

/* A compiler barrier: the compiler does not know that tile instructions read memory. */
static inline void stores_done(void) { __asm__ volatile("" ::: "memory"); }

#include "tiles.h"

#endif
