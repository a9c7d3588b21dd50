/* What a lane of 32 bits holds in the vectors' products: one float32 number. */
#ifndef RELAYGR_LANES_H
#define RELAYGR_LANES_H

#include "common.h"

enum { LANE = 1 /* numbers */ };

static inline vec multiply_add(vec x, vec y, vec sum) { return v_fma(x, y, sum); }

/* The scores of LANE columns as lanes. */
static inline vec joined(const vec scores[LANE]) { return scores[0]; }

/* LANE rows of V, side by side in lanes. */
static inline void join_rows(const num *const rows[LANE], int64_t width, num *to) {
    memcpy(to, rows[0], width * sizeof(num));
}

/* Undoes the order that join_rows gives to 32 numbers of a row. */
static inline void in_order(vec sums[2]) { (void)sums; }

#endif
