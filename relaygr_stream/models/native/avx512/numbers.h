/* The type num is float32. */
#ifndef RELAYGR_NUMBERS_H
#define RELAYGR_NUMBERS_H

enum {
    CHUNK = 192, /* rows that pass the parts of a layer together: their gates, 192 x 768, are 576 KiB */
    BITS = 24    /* significant bits of a number */
};

typedef float num;

static inline __m512 load(const num *from) { return _mm512_loadu_ps(from); }

static inline void store(num *to, __m512 x) { _mm512_storeu_ps(to, x); }

/* x / (1 + exp(-x)). exp(-x) = 2^n * 2^f, n whole, f in [-1/2, 1/2]: 2^f by a polynomial of degree 6 (relative error
 * 1e-8), the reciprocal by a Newton step from 2^-14. The bounds keep exp finite and nonzero; x is the second operand of
 * min and max, so that NaN stays NaN. */
static inline __m512 silu(__m512 x) {
    const __m512 per_bit = _mm512_set1_ps(-1.442695041f), rest = _mm512_set1_ps(-1.925963033e-8f);
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
    __m512 y = _mm512_min_ps(_mm512_set1_ps(87.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, per_bit), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_fmadd_ps(y, rest, _mm512_fmsub_ps(y, per_bit, n));
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.5403530e-4f), f, _mm512_set1_ps(1.3333558e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    __m512 d = _mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_scalef_ps(p, n)), r = _mm512_rcp14_ps(d);
    r = _mm512_fmadd_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(1.0f)), r);
    return _mm512_mul_ps(x, r);
}

/* The processor needs no preparation. */
typedef int Before;

static inline void enter(Before *before) { *before = 0; }

static inline void leave(const Before *before) { (void)before; }

static inline int unavailable(void) { return 0; }

#endif
