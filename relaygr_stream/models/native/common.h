/* Shared by the files of this folder, which CMakeLists.txt compiles once for each kind of number. */
#ifndef RELAYGR_COMMON_H
#define RELAYGR_COMMON_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum {
    TILE = 16,  /* float32 numbers in a vector (vector.h) */
    LINE = 64,  /* bytes */
    WIDTH = 128 /* largest dqk and dv */
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Prefetches a line into the second-level cache. GCC 12 removes loops that contain nothing but _mm_prefetch. */
static inline void fetch(const char *line) { __asm__ volatile("prefetcht1 (%0)" : : "r"(line)); }

#include "vector.h"

/* The type num; load, store and silu of float32 vectors of it; enter and leave, which prepare the processor. */
#include "numbers.h"

#endif
