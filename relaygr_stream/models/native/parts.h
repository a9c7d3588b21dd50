/* The parts of a layer, each in its own file. Call them between `enter` and `leave` (numbers.h). */
#ifndef RELAYGR_PARTS_H
#define RELAYGR_PARTS_H

#include "common.h"

/* Columns that lie side by side. Strides are in elements. */
typedef struct {
    const num *k, *v;
    int64_t k_head, k_row, v_head, v_row, k_layer, v_layer; /* k_layer, v_layer: from one layer to the next */
    int64_t columns;
} Stretch;

typedef struct {
    const num *q;
    num *out;
    int64_t q_head, q_row, out_head, out_row;
    Stretch stretches[2]; /* the columns of one, then those of the other */
    int64_t heads, rows, columns, dqk, dv;
    int64_t position;            /* of the first column in the history */
    int64_t causal_from, causal; /* row r sees columns below max(causal_from, causal + r) */
    int64_t recent_to, recent;   /* and from min(recent_to, recent + r) on */
    int64_t first;               /* index of the first row among all rows of the layer */
    float scale, weight;
} Attention;

/* attention.c: out = weight * SiLU(scale * q.k) * v over the visible pairs. */
void attend(const Attention *a);
/* own.c: out += weights[row] * SiLU(scale * q.k) * v of each row with itself: column r of the first stretch. */
void attend_to_self(const Attention *a, const float *weights);

/* product.c: out = a x weights, then one of: + bias, with or without activation; + before. With tiles, a must be
 * readable up to a multiple of 32 rows; the results of the additional rows are not stored. */
typedef struct {
    const num *a, *weights; /* (rows, depth); packed by pack_weights */
    int64_t a_row, rows, depth, columns;
    const num *bias, *before; /* NULL: none; `before` has the layout of `out`, and may be `out` */
    num *out;
    int64_t out_row;
    int activated;
} Product;

void multiply(const Product *p);
/* Packs weights (depth, columns; row stride `row`; both multiples of 32) in groups of columns. */
void pack_weights(const num *weights, int64_t row, int64_t depth, int64_t columns, num *packed);

/* norms.c: out = LayerNorm(x) * weight + bias over `width` elements of each row. */
void normalize(
    const num *x, int64_t x_row, num *out, int64_t out_row, int64_t rows, int64_t width, const num *weight,
    const num *bias, float eps
);
/* In rows of [u, o, u * Norm(o)], each `width` wide, computes the last part, with a mean and a variance per `group`. */
void gate(
    num *gates, int64_t row, int64_t rows, int64_t width, int64_t group, const num *weight, const num *bias,
    float eps
);

/* For embedding.c and head.c: behaviours at positions first, first + 1, …, and candidates, all at the next position. */
typedef struct {
    const int64_t *items, *actions, *gaps, *candidate_items; /* at any address */
    int64_t behaviours, candidates, first;
} Sequence;

#endif
