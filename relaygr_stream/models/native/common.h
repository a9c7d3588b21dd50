/* What the files of this folder share. build.py compiles them once for each kind of number, with that kind's folder. */
#ifndef RELAYGR_COMMON_H
#define RELAYGR_COMMON_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum {
    TILE = 16,  /* float32 numbers of a vector */
    LINE = 64,  /* bytes */
    WIDTH = 128 /* largest dqk and dv */
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Into the second-level cache. Not _mm_prefetch: GCC 12 takes a loop of nothing else for one without effect. */
static inline void fetch(const char *line) { __asm__ volatile("prefetcht1 (%0)" : : "r"(line)); }

/* num, and vectors of them as float32: load, store, silu; what the processor needs before and behind a call. */
#include "numbers.h"

#endif
