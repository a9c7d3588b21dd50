/* SiLU of scores in seven instructions instead of fifteen, by a parabola per segment. SiLU is half of attention's time.
 *
 * silu(x) for x in segment i = round(x / STEP), -15 <= i <= 15, is c0 + c1 x + c2 x^2 through its values at the
 * Chebyshev nodes of the segment. Relative error at most 3.1e-3, root mean square 6.4e-4: below bfloat16's own rounding
 * (3.9e-3, 1.1e-3) of the result. The middle segment goes through zero, so small scores keep their relative precision.
 * The last is x (relative error 4e-5 from 10.15 on), the first 0 (4e-4 absolute below -10.15). The scale of the scores
 * is part of the coefficients.
 */
#ifndef RELAYGR_SILU_TABLE_H
#define RELAYGR_SILU_TABLE_H

#include <math.h>

#include "common.h"

enum { SEGMENTS = 15 /* to each side of the middle one: 31, as two registers have 32 places */ };

#define STEP 0.7

typedef struct {
    __m512 low[3], high[3]; /* coefficients of segments 0 ... 15, and of those from -16 on */
    __m512 limit, per_step;
} SiluTable;

static double silu_at(double x) { return x / (1 + exp(-x)); }

static void silu_parabola(int segment, double c[3]) {
    c[0] = c[2] = 0;
    c[1] = segment > 0;
    if (segment <= -SEGMENTS || segment >= SEGMENTS) return;
    double middle = segment * STEP, off = STEP / 2 * 0.86602540378443865, centre = silu_at(middle);
    double left = silu_at(middle - off), right = silu_at(middle + off);
    double slope = (right - left) / (2 * off), bend = (right - 2 * centre + left) / (2 * off * off);
    c[0] = centre - slope * middle + bend * middle * middle;
    c[1] = slope - 2 * bend * middle;
    c[2] = bend;
}

/* For scores that are not multiplied by `scale` yet. */
static void make_silu_table(SiluTable *table, float scale) {
    _Alignas(64) float places[3][2 * TILE];
    for (int place = 0; place < 2 * TILE; place++) {
        double c[3];
        silu_parabola(place < TILE ? place : place - 2 * TILE, c);
        places[0][place] = c[0];
        places[1][place] = c[1] * scale;
        places[2][place] = c[2] * scale * scale;
    }
    for (int i = 0; i < 3; i++) {
        table->low[i] = _mm512_load_ps(places[i]);
        table->high[i] = _mm512_load_ps(places[i] + TILE);
    }
    table->limit = _mm512_set1_ps((SEGMENTS + 0.2) * STEP / scale);
    table->per_step = _mm512_set1_ps(scale / STEP);
}

static inline __m512 silu_of_scores(__m512 score, const SiluTable *t) {
    /* The lowest five bits of 1.5 * 2^23 + i are those of i, and a permutation uses no other bits. */
    __m512 near = _mm512_range_ps(score, t->limit, 2); /* the smaller magnitude, with the score's sign */
    __m512i i = (__m512i)_mm512_fmadd_ps(near, t->per_step, _mm512_set1_ps(0x1.8p23f));
    __m512 c2 = _mm512_permutex2var_ps(t->low[2], i, t->high[2]);
    __m512 c1 = _mm512_permutex2var_ps(t->low[1], i, t->high[1]);
    __m512 c0 = _mm512_permutex2var_ps(t->low[0], i, t->high[0]);
    return _mm512_fmadd_ps(_mm512_fmadd_ps(c2, score, c1), score, c0);
}

#endif
