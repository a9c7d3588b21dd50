/* The tile instructions of AMX in software, in place of amx/tiles.h and of the compiler's own: slow, but with them the
 * kernels for AMX run on any processor with AVX512_BF16. Given to the compiler by -include. */
#define RELAYGR_TILES_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef int Before;

static _Thread_local char software_tiles[8][16][64];

static inline void enter(Before *before) { (void)before, memset(software_tiles, 0xff, sizeof software_tiles); }
static inline void leave(const Before *before) { (void)before; }
static inline int unavailable(void) { return 0; }

static __attribute__((noinline)) void software_load(int tile, const void *from, int64_t stride) {
    for (int row = 0; row < 16; row++) memcpy(software_tiles[tile][row], (const char *)from + row * stride, 64);
}

static __attribute__((noinline)) void software_store(int tile, void *to, int64_t stride) {
    for (int row = 0; row < 16; row++) memcpy((char *)to + row * stride, software_tiles[tile][row], 64);
}

static __attribute__((noinline)) void software_multiply(int sums, int left, int right) {
    for (int row = 0; row < 16; row++) {
        __m512 sum = _mm512_loadu_ps(software_tiles[sums][row]);
        for (int pair = 0; pair < 16; pair++) {
            int32_t both;
            memcpy(&both, software_tiles[left][row] + 4 * pair, 4);
            __m512i columns = _mm512_loadu_si512(software_tiles[right][pair]);
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)columns);
        }
        _mm512_storeu_ps(software_tiles[sums][row], sum);
    }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_zero
#define _tile_loadd(tile, from, stride) software_load(tile, from, stride)
#define _tile_stored(tile, to, stride) software_store(tile, to, stride)
#define _tile_dpbf16ps(sums, left, right) software_multiply(sums, left, right)
#define _tile_zero(tile) memset(software_tiles[tile], 0, 1024)
