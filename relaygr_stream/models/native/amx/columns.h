/* Packs K and V in the form of the tile unit's right operand. */
#ifndef RELAYGR_COLUMNS_H
#define RELAYGR_COLUMNS_H

#include "common.h"

/* (16, 8), rows `row` elements apart -> [4][16 rows][2]. Loads combine the four rows in a register's lanes, which saves
 * half of a transposition's shuffles. */
static inline void transpose(const bf16 *from, int64_t row, bf16 *to) {
    __m512i r[4];
    for (int i = 0; i < 4; i++, from += row) {
        r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from));
        r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(from + 4 * row)), 1);
        r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(from + 8 * row)), 2);
        r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(from + 12 * row)), 3);
    }
    __m512i low = _mm512_unpacklo_epi32(r[0], r[1]), further_low = _mm512_unpacklo_epi32(r[2], r[3]);
    __m512i high = _mm512_unpackhi_epi32(r[0], r[1]), further_high = _mm512_unpackhi_epi32(r[2], r[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi64(low, further_low));
    _mm512_store_si512(to + PAIR, _mm512_unpackhi_epi64(low, further_low));
    _mm512_store_si512(to + 2 * PAIR, _mm512_unpacklo_epi64(high, further_high));
    _mm512_store_si512(to + 3 * PAIR, _mm512_unpackhi_epi64(high, further_high));
}

/* The last columns, fewer than 32, padded with zeros up to 32. The memory behind them is undefined and not read. */
static const bf16 *padded(const bf16 *from, int64_t row, int64_t count, int64_t width) {
    static _Thread_local _Alignas(LINE) bf16 room[PAIR * WIDTH];
    for (int64_t column = 0; column < count; column++) memcpy(room + column * width, from + column * row, width * 2);
    memset(room + count * width, 0, (PAIR - count) * width * 2);
    return room;
}

/* 32 columns: (32, dqk) -> [column tile][dqk / 2][16 columns][2]. */
static inline void pack_keys_of_step(const bf16 *k, int64_t row, int64_t dqk, bf16 *packed) {
    for (int64_t column = 0; column < PAIR; column += TILE)
        for (int64_t d = 0; d < dqk; d += 8) transpose(k + column * row + d, row, packed + column * dqk + d * TILE);
}

/* 32 columns: (32, dv) -> [dv tile][16 column pairs][16 dv][2]. Of 32 dv the first tile has every other four. */
static inline void pack_values_of_step(const bf16 *v, int64_t row, int64_t dv, bf16 *packed) {
    for (int64_t column = 0; column < PAIR; column += 2)
        for (int64_t d = 0; d < dv; d += PAIR) {
            __m512i even = _mm512_loadu_si512(v + column * row + d);
            __m512i odd = _mm512_loadu_si512(v + (column + 1) * row + d);
            bf16 *to = packed + d * PAIR + column / 2 * PAIR;
            interleave(even, odd, to, to + TILE * PAIR);
        }
}

/* (count, dqk), rows `row` elements apart -> a step after the other, up to a multiple of 32 columns. */
static void pack_keys(const bf16 *k, int64_t row, int64_t count, int64_t dqk, bf16 *packed) {
    int64_t column = 0;
    for (; column + PAIR <= count; column += PAIR) pack_keys_of_step(k + column * row, row, dqk, packed + column * dqk);
    if (column < count)
        pack_keys_of_step(padded(k + column * row, row, count - column, dqk), dqk, dqk, packed + column * dqk);
}

static void pack_values(const bf16 *v, int64_t row, int64_t count, int64_t dv, bf16 *packed) {
    int64_t column = 0;
    for (; column + PAIR <= count; column += PAIR) pack_values_of_step(v + column * row, row, dv, packed + column * dv);
    if (column < count)
        pack_values_of_step(padded(v + column * row, row, count - column, dv), dv, dv, packed + column * dv);
}

#endif
