/* bfloat16 as numbers, and the tiles that multiply them. */
#ifndef RELAYGR_NUMBERS_H
#define RELAYGR_NUMBERS_H

#include <sys/syscall.h>
#include <unistd.h>

enum {
    PAIR = 32,   /* bfloat16 columns of a tile, and the rows and columns of one step */
    CHUNK = 512, /* rows that pass the parts of a layer together: their gates, 512 x 768, are 768 KiB */
    BITS = 8     /* significant bits of a number */
};

typedef uint16_t bf16;
typedef bf16 num;

/* A compiler barrier: the compiler does not know that tile instructions read memory. */
static inline void stores_done(void) { __asm__ volatile("" ::: "memory"); }

static inline __m512 load(const bf16 *from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
}

static inline void store(bf16 *to, __m512 x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }

/* x / (1 + exp(-x)). 2^f for f in [0, 1) by a polynomial of degree 4 (relative error 4e-6), the reciprocal to 2^-14:
 * far below the 2^-9 to which bfloat16 rounds the result. */
static inline __m512 silu(__m512 x) {
    __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
    __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.3534167e-2f), f, _mm512_set1_ps(5.2011464e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4144275e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9300383e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0000026f));
    __m512 e = _mm512_scalef_ps(p, t); /* p * 2^floor(t): infinite and zero where exp is */
    return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Before; /* a tile configuration */

/* In place of _tile_loadconfig: GCC 12 assumes that it reads eight bytes, and drops the stores to the others. */
static inline void load_tiles(const Before *config) { __asm__ volatile("ldtilecfg %0" : : "m"(*config)); }

/* Configures eight full tiles. `leave` restores the former configuration, since oneDNN remembers per thread which one
 * it loaded last, and does not load it again. */
static inline void enter(Before *before) {
    Before ours = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        ours.bytes[tile] = LINE;
        ours.rows[tile] = TILE;
    }
    __asm__ volatile("sttilecfg %0" : "=m"(*before));
    load_tiles(&ours);
}

static inline void leave(const Before *before) {
    if (before->palette)
        load_tiles(before);
    else
        _tile_release();
}

/* Ask Linux for the tile registers (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
static inline int unavailable(void) { return syscall(SYS_arch_prctl, 0x1023, 18) ? 1 : 0; }

#endif
