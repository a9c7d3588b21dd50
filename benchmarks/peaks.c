/* The ceilings of one core: multiply-adds in registers, and reading memory. floors.py compiles it for this processor. */
#include <stdint.h>

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

/* As above with pairs of bfloat16 (vdpbf16ps); 0 where the processor has no such instruction, or AMX beside it. */
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
#else
    (void)rounds;
    return 0;
#endif
}

/* Reads `bytes`, a multiple of 256, from an aligned address. */
int64_t read_all(const char *from, int64_t bytes) {
    words found[4] = {{0}};
    for (const char *at = from; at < from + bytes; at += 4 * BYTES)
        for (int i = 0; i < 4; i++) found[i] ^= *(const words *)(at + i * BYTES);
    found[0] ^= found[1] ^ found[2] ^ found[3];
    return found[0][0] ^ found[0][1] ^ found[0][2] ^ found[0][3];
}
