/* The ceilings of one core: multiply-adds, SiLU and conversions in registers, and reading memory.
 *
 * floors.py compiles it for this processor, once for each type of number, with the folders of its kernels, whose SiLU and
 * conversions the loops run (KERNELS); on processors without kernels there are no such loops.
 */
#include <stdint.h>

#ifdef KERNELS
#include "lanes.h"
#endif

#ifdef __AVX512F__
#include <immintrin.h>
enum { SUMS = 24, BYTES = 64 }; /* of 32 registers; two units need eight sums to be busy */
#else
enum { SUMS = 12, BYTES = 32 }; /* of 16 */
#endif

typedef float floats __attribute__((vector_size(BYTES)));
typedef int64_t words __attribute__((vector_size(BYTES)));

/* The compiler must not know the factor, nor drop the sums. */
#define UNKNOWN(x) __asm__ volatile("" : "+v"(x))

/* `rounds` times a multiply-add of float32 in each of SUMS registers; returns the floating-point operations. */
int64_t float32_operations(int64_t rounds) {
    floats sums[SUMS], factor = {0}, other = {0};
    factor += 1.0001f, other += 0.5f;
    for (int i = 0; i < SUMS; i++) sums[i] = factor * (float)i;
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; i++) sums[i] += factor * other;
        UNKNOWN(factor);
    }
    for (int i = 0; i < SUMS; i++) UNKNOWN(sums[i]);
    return rounds * SUMS * (BYTES / 4) * 2;
}

/* As above with pairs of bfloat16 (vdpbf16ps); of float32 where the processor has no such instruction, which then
 * multiplies bfloat16, too; 0 where it has AMX beside it. */
int64_t bfloat16_operations(int64_t rounds) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    __m512 sums[SUMS], factor = _mm512_set1_ps(1.0001f), other = _mm512_set1_ps(0.5f);
    for (int i = 0; i < SUMS; i++) sums[i] = _mm512_set1_ps(i);
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)other, (__m512bh)factor);
        UNKNOWN(factor);
    }
    for (int i = 0; i < SUMS; i++) UNKNOWN(sums[i]);
    return rounds * SUMS * 32 * 2;
#elif defined(__AMX_BF16__)
    (void)rounds;
    return 0;
#else
    return float32_operations(rounds);
#endif
}

#ifdef KERNELS
enum { AT_ONCE = 8 /* vectors: enough to hide latencies, few enough for the registers */ };

#ifdef __AVX512F__
#define UNKNOWN_VECTOR(x) UNKNOWN(x)
#else
#define UNKNOWN_VECTOR(x) __asm__ volatile("" : "+x"((x).low), "+x"((x).high))
#endif

/* `rounds` times AT_ONCE lanes' scores of products; returns the scores. */
int64_t scores(int64_t rounds) {
    Silu silu_of;
    make_silu(&silu_of, 0.125f);
    vec product = v_all(1.5f);
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++) {
            vec s[LANE];
            for (int of = 0; of < LANE; of++) {
                UNKNOWN_VECTOR(product);
                s[of] = score_of(product, &silu_of);
            }
            vec done = joined(s);
            UNKNOWN_VECTOR(done);
        }
    return rounds * AT_ONCE * LANE * TILE;
}

/* The same with SiLU and rounding of a layer's elements. */
int64_t activations(int64_t rounds) {
    num to[TILE];
    vec x = v_all(1.5f);
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++) {
            UNKNOWN_VECTOR(x);
            store(to, silu(x));
            __asm__ volatile("" : : "r"(to) : "memory");
        }
    return rounds * AT_ONCE * TILE;
}

/* The same with rounding alone. */
int64_t conversions(int64_t rounds) {
    num to[TILE];
    vec x = v_all(1.5f);
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++) {
            UNKNOWN_VECTOR(x);
            store(to, x);
            __asm__ volatile("" : : "r"(to) : "memory");
        }
    return rounds * AT_ONCE * TILE;
}
#endif

/* Reads `bytes`, a multiple of 256, from an aligned address. */
int64_t read_all(const char *from, int64_t bytes) {
    words found[4] = {{0}};
    for (const char *at = from; at < from + bytes; at += 4 * BYTES)
        for (int i = 0; i < 4; i++) found[i] ^= *(const words *)(at + i * BYTES);
    found[0] ^= found[1] ^ found[2] ^ found[3];
    return found[0][0] ^ found[0][1] ^ found[0][2] ^ found[0][3];
}

/* The bare work of a ranking: reads `bytes`, a multiple of 64, and does `each` multiply-adds of a whole vector, a
 * multiple of 8, with every 64 of them. */
float product_over(const char *from, int64_t bytes, int64_t each, int bfloat16) {
    floats sums[8] = {{0}}, factor = {0};
    factor += 1.0001f;
    UNKNOWN(factor);
    for (const char *at = from; at < from + bytes; at += 64) {
        floats line = *(const floats *)at;
        for (int64_t i = 0; i < each; i += 8)
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) {
#ifdef __AVX512BF16__
                if (bfloat16) {
                    sums[k] = (floats)_mm512_dpbf16_ps((__m512)sums[k], (__m512bh)line, (__m512bh)factor);
                    continue;
                }
#endif
                sums[k] += line * factor;
            }
    }
    for (int k = 1; k < 8; k++) sums[0] += sums[k];
    return sums[0][0];
}
