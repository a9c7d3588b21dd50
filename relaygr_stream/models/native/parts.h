/* The parts of a layer, each in a file of its own; called between `enter` and `leave` (numbers.h). */
#ifndef RELAYGR_PARTS_H
#define RELAYGR_PARTS_H

#include "common.h"

typedef struct {
    const num *q, *k, *v;
    num *out;
    int64_t q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row; /* strides in elements */
    int64_t heads, rows, columns, dqk, dv;
    int64_t causal_from, causal; /* row r sees columns below max(causal_from, causal + r) */
    int64_t recent_to, recent;   /* and from min(recent_to, recent + r) on */
    int64_t k_layer, v_layer; /* from one layer's K and V to the next's */
    int64_t first;            /* of the rows, among all that pass the layer */
    float scale, weight;
    int32_t accumulate;
} Attention;

/* attention.c: out (+)= weight * SiLU(scale * q.k) * v over the visible pairs. */
void attend(const Attention *a);
/* own.c: out += weights[row] * SiLU(scale * q.k) * v of each row with itself. */
void attend_to_self(const Attention *a, const float *weights);

/* product.c: out = a x weights, and one of these: + bias, activated or not; + before. For tiles a has
 * rows up to a multiple of 32 to read, and what is computed of them goes nowhere. */
typedef struct {
    const num *a, *weights; /* (rows, depth); packed by pack_weights */
    int64_t a_row, rows, depth, columns;
    const num *bias, *before; /* NULL: none; `before` as `out`, and may be it */
    num *out;
    int64_t out_row;
    int activated;
} Product;

void multiply(const Product *p);
/* weights (depth, columns), rows `row` elements apart, both multiples of 32 -> 32 columns after another. */
void pack_weights(const num *weights, int64_t row, int64_t depth, int64_t columns, num *packed);

/* norms.c: out = LayerNorm(x) * weight + bias, `width` elements of each row. */
void normalize(
    const num *x, int64_t x_row, num *out, int64_t out_row, int64_t rows, int64_t width, const num *weight,
    const num *bias, float eps
);
/* Rows of [u, o, u * Norm(o)], each `width` wide: the last from the others, with a mean and a variance per `group`. */
void gate(
    num *gates, int64_t row, int64_t rows, int64_t width, int64_t group, const num *weight, const num *bias,
    float eps
);

/* For embedding.c and head.c: behaviours at positions first, first + 1, …, and candidates, all behind them. */
typedef struct {
    const int64_t *items, *actions, *gaps, *candidate_items; /* at any address */
    int64_t behaviours, candidates, first;
} Sequence;

#endif
