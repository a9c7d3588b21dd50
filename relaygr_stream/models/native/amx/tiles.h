/* Prepares the tile registers: what enters and leaves the functions that use them. */
#ifndef RELAYGR_TILES_H
#define RELAYGR_TILES_H

#include <sys/syscall.h>
#include <unistd.h>

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
