/* The type num is float32. */
#ifndef RELAYGR_NUMBERS_H
#define RELAYGR_NUMBERS_H

#include "float32/silu.h"
#include "vectors/unprepared.h"

enum {
    CHUNK = 192, /* rows that pass the parts of a layer together: their gates, 192 x 768, are 576 KiB */
    BITS = 24    /* significant bits of a number */
};

typedef float num;

static inline vec load(const num *from) { return v_read(from); }

static inline void store(num *to, vec x) { v_write(to, x); }

#endif
