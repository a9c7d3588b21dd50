/* SiLU to the precision of float32. */
#ifndef RELAYGR_SILU_H
#define RELAYGR_SILU_H

/* x / (1 + exp(-x)). exp(-x) = 2^n * 2^f, n whole, f in [-1/2, 1/2]: 2^f by a polynomial of degree 6 (relative error
 * 1e-8). The bounds keep exp finite and nonzero; x is the second operand of min and max, so that NaN stays NaN. */
static inline vec silu(vec x) {
    const vec per_bit = v_all(-1.442695041f), rest = v_all(-1.925963033e-8f);
    x = v_max(v_all(-87.0f), x);
    vec y = v_min(v_all(87.0f), x);
    vec n = v_round(v_mul(y, per_bit));
    vec f = v_fma(y, rest, v_fms(y, per_bit, n));
    vec p = v_fma(v_all(1.5403530e-4f), f, v_all(1.3333558e-3f));
    p = v_fma(p, f, v_all(9.6181291e-3f));
    p = v_fma(p, f, v_all(5.5504109e-2f));
    p = v_fma(p, f, v_all(2.4022651e-1f));
    p = v_fma(p, f, v_all(6.9314718e-1f));
    p = v_fma(p, f, v_all(1.0f));
    return v_mul(x, v_reciprocal(v_add(v_all(1.0f), v_scale(p, n))));
}

/* Scores: SiLU(scale * product). */
typedef struct {
    vec scale;
} Silu;

static inline void make_silu(Silu *silu_of, float scale) { silu_of->scale = v_all(scale); }

static inline vec score_of(vec product, const Silu *silu_of) { return silu(v_mul(product, silu_of->scale)); }

#endif
