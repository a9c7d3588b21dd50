/* SiLU attention, and what stands around it in a layer, in bfloat16 on x86-64 with AMX: scores live in the first-level cache only, and never as a matrix.
 *
 * One block of rows at a time: K and V of a panel of columns are packed as the tile unit wants its right operand, then
 * for 32 rows: scores of 32 columns by tiles -> SiLU by vectors (while the tiles compute the next 32) -> as bfloat16
 * into the left operand of the second product, which sums in float32 over all columns. attention.py says what the
 * arguments mean; it compiles this file and calls it. Knows nothing of layers.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    TILE = 16,    /* rows of a tile, and float32 columns */
    PAIR = 32,    /* bfloat16 columns of a tile, and the rows and columns of one step */
    PANEL = 256,  /* columns packed together: 16 KiB of scores for 32 rows stay in the first-level cache */
    ROWS = 512,   /* rows that share a packed panel */
    WIDTH = 128   /* largest dqk and dv */
};

typedef uint16_t bf16;

typedef struct {
    const bf16 *q, *k, *v;
    bf16 *out;
    int64_t q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row; /* strides in elements */
    int64_t heads, rows, columns, dqk, dv;
    int64_t causal_from, causal; /* row r sees columns below max(causal_from, causal + r) */
    int64_t recent_to, recent;   /* and from min(recent_to, recent + r) on */
    float scale, weight;
    int32_t accumulate;
} Attention;

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

static _Thread_local struct {
    _Alignas(64) bf16 k[PANEL * WIDTH];  /* [column tile][dqk / 2][16 columns][2] */
    _Alignas(64) bf16 v[PANEL * WIDTH];  /* [column pair / 16][dv tile][16 pairs][16 dv][2] */
    _Alignas(64) bf16 q[ROWS * WIDTH];   /* [row][dqk], rows up to a multiple of 32 are zeros */
    _Alignas(64) bf16 scores[PAIR * PANEL];
    _Alignas(64) float products[2][PAIR * PAIR];  /* [row tile][column tile][16][16] */
    _Alignas(64) float sums[ROWS * WIDTH];
} room;

/* The compiler does not know that tile instructions read memory: stores before this line come before them. */
static inline void stores_done(void) { __asm__ volatile("" ::: "memory"); }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Ask Linux for the tile registers (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). 0: this process may use them. */
int relaygr_request_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) ? 1 : 0; }

static inline __m512 load(const bf16 *from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
}

static inline void store(bf16 *to, __m512 x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }

static void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

/* Columns behind the last are zeros: what lies there in memory may be anything, and is not read. */
static void pack_keys(const Attention *a, int64_t head, int64_t from, int64_t count) {
    const bf16 *k = a->k + head * a->k_head + from * a->k_row;
    for (int64_t tile = 0; tile * TILE < (count + PAIR - 1) / PAIR * PAIR; tile++)
        for (int64_t d = 0; d < a->dqk; d += PAIR) {
            __m512i r[16];
            for (int64_t i = 0; i < TILE; i++) {
                int64_t column = tile * TILE + i;
                r[i] = column < count ? _mm512_loadu_si512(k + column * a->k_row + d) : _mm512_setzero_si512();
            }
            transpose(r);
            bf16 *to = room.k + tile * TILE * a->dqk + d * TILE;
            for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * PAIR, r[i]);
        }
}

static void pack_values(const Attention *a, int64_t head, int64_t from, int64_t count) {
    const bf16 *v = a->v + head * a->v_head + from * a->v_row;
    __m512i spread = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    for (int64_t column = 0; column < (count + PAIR - 1) / PAIR * PAIR; column += 2)
        for (int64_t d = 0; d < a->dv; d += PAIR) {
            __m512i zero = _mm512_setzero_si512();
            __m512i even = column < count ? _mm512_loadu_si512(v + column * a->v_row + d) : zero;
            __m512i odd = column + 1 < count ? _mm512_loadu_si512(v + (column + 1) * a->v_row + d) : zero;
            even = _mm512_permutexvar_epi64(spread, even);
            odd = _mm512_permutexvar_epi64(spread, odd);
            bf16 *to = room.v + column / PAIR * PAIR * a->dv + d / TILE * TILE * PAIR + column % PAIR / 2 * PAIR;
            _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(to + TILE * PAIR, _mm512_unpackhi_epi16(even, odd));
        }
}

/* x / (1 + exp(-x)) of x = scale * score. 2^f for f in [0, 1) by a polynomial of degree 4 (relative error 4e-6), the
 * reciprocal to 2^-14: far below the 2^-9 to which bfloat16 rounds the result. */
static inline __m512 silu(__m512 score, __m512 scale, __m512 exponent) {
    __m512 t = _mm512_mul_ps(score, exponent);
    __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.3534167e-2f), f, _mm512_set1_ps(5.2011464e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4144275e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9300383e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0000026f));
    __m512 e = _mm512_scalef_ps(p, t); /* p * 2^floor(t): infinite and zero where exp is */
    __m512 r = _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), e));
    return _mm512_mul_ps(_mm512_mul_ps(score, scale), r);
}

/* Scores of 32 rows and 32 columns of the panel -> products. */
static inline void multiply_scores(const Attention *a, int64_t row, int64_t column, float *products) {
    const bf16 *q = room.q + row * a->dqk, *k = room.k + column * a->dqk;
    stores_done();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < a->dqk; d += PAIR) {
        _tile_loadd(4, q + d, a->dqk * 2);
        _tile_loadd(5, q + TILE * a->dqk + d, a->dqk * 2);
        _tile_loadd(6, k + d * TILE, 64);
        _tile_loadd(7, k + TILE * a->dqk + d * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, products, 128);
    _tile_stored(1, products + TILE, 128);
    _tile_stored(2, products + TILE * PAIR, 128);
    _tile_stored(3, products + TILE * PAIR + TILE, 128);
}

/* Columns of the panel that row r of the block sees: [*low, *high). */
static inline void visible(const Attention *a, int64_t r, int64_t from, int64_t *low, int64_t *high) {
    *low = most(0, least(a->recent_to, a->recent + r) - from);
    *high = least(a->columns, most(a->causal_from, a->causal + r)) - from;
}

static inline uint32_t bits_below(int64_t n) { return n <= 0 ? 0 : n >= PAIR ? ~0u : (1u << n) - 1; }

/* Products of 32 rows and columns -> scores. */
static inline void activate(const Attention *a, int64_t row, int64_t from, int64_t column, const float *products) {
    __m512 scale = _mm512_set1_ps(a->scale), exponent = _mm512_set1_ps(-1.44269504f * a->scale);
    int64_t low, high, first_low, last_low, first_high, last_high;
    visible(a, row, from, &first_low, &first_high);
    visible(a, row + PAIR - 1, from, &last_low, &last_high);
    bf16 *to = room.scores + column;
    if (last_low <= column && first_high >= column + PAIR) {
        for (int i = 0; i < PAIR; i++) {
            __m512 left = silu(_mm512_load_ps(products + i * PAIR), scale, exponent);
            __m512 right = silu(_mm512_load_ps(products + i * PAIR + TILE), scale, exponent);
            _mm512_store_si512(to + i * PANEL, (__m512i)_mm512_cvtne2ps_pbh(right, left));
        }
        return;
    }
    for (int i = 0; i < PAIR; i++) {
        visible(a, row + i, from, &low, &high);
        uint32_t seen = bits_below(high - column) & ~bits_below(low - column);
        __m512 left = silu(_mm512_load_ps(products + i * PAIR), scale, exponent);
        __m512 right = silu(_mm512_load_ps(products + i * PAIR + TILE), scale, exponent);
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(right, left);
        _mm512_store_si512(to + i * PANEL, _mm512_maskz_mov_epi16(seen, both));
    }
}

/* sums of 32 rows += their scores x V, over columns begin ... end of the panel. */
static inline void multiply_values(const Attention *a, int64_t row, int64_t begin, int64_t end) {
    stores_done();
    for (int64_t d = 0; d < a->dv; d += PAIR) {
        float *sums = room.sums + row * a->dv + d;
        int64_t stride = a->dv * 4;
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + TILE, stride);
        _tile_loadd(2, sums + TILE * a->dv, stride);
        _tile_loadd(3, sums + TILE * a->dv + TILE, stride);
        for (int64_t column = begin; column < end; column += PAIR) {
            const bf16 *v = room.v + column * a->dv + d / TILE * TILE * PAIR;
            _tile_loadd(4, room.scores + column, PANEL * 2);
            _tile_loadd(5, room.scores + TILE * PANEL + column, PANEL * 2);
            _tile_loadd(6, v, 64);
            _tile_loadd(7, v + TILE * PAIR, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums, stride);
        _tile_stored(1, sums + TILE, stride);
        _tile_stored(2, sums + TILE * a->dv, stride);
        _tile_stored(3, sums + TILE * a->dv + TILE, stride);
    }
}

/* The panel's part of 32 rows. `row` counts in the block, `first` is the block's first row. */
static void attend_rows(const Attention *a, int64_t first, int64_t row, int64_t from, int64_t count) {
    int64_t low, high, unused, begin, end;
    visible(a, first + row, from, &low, &unused);
    visible(a, first + row + PAIR - 1, from, &unused, &high);
    begin = low / PAIR * PAIR;
    end = least(count, high);
    if (begin >= end) return;
    int64_t column = begin;
    multiply_scores(a, row, column, room.products[0]);
    for (int turn = 0; column < end; column += PAIR, turn ^= 1) {
        if (column + PAIR < end) multiply_scores(a, row, column + PAIR, room.products[turn ^ 1]);
        activate(a, first + row, from, column, room.products[turn]);
    }
    multiply_values(a, row, begin, end);
}

static void write_rows(const Attention *a, int64_t head, int64_t first, int64_t rows) {
    __m512 weight = _mm512_set1_ps(a->weight);
    for (int64_t r = 0; r < rows; r++) {
        bf16 *out = a->out + head * a->out_head + (first + r) * a->out_row;
        for (int64_t d = 0; d < a->dv; d += TILE) {
            __m512 sum = _mm512_mul_ps(_mm512_load_ps(room.sums + r * a->dv + d), weight);
            if (a->accumulate) sum = _mm512_add_ps(sum, load(out + d));
            store(out + d, sum);
        }
    }
}

void relaygr_attend(const Attention *a) {
    TileConfig ours = {.palette = 1}, before;
    for (int tile = 0; tile < 8; tile++) {
        ours.bytes[tile] = 64;
        ours.rows[tile] = TILE;
    }
    /* oneDNN remembers, per thread, which configuration it loaded last, and does not load it again. */
    _tile_storeconfig(&before);
    _tile_loadconfig(&ours);
    for (int64_t head = 0; head < a->heads; head++)
        for (int64_t first = 0; first < a->rows; first += ROWS) {
            int64_t rows = least(ROWS, a->rows - first), padded = (rows + PAIR - 1) / PAIR * PAIR, low, high, unused;
            for (int64_t r = 0; r < rows; r++)
                memcpy(room.q + r * a->dqk, a->q + head * a->q_head + (first + r) * a->q_row, a->dqk * 2);
            memset(room.q + rows * a->dqk, 0, (padded - rows) * a->dqk * 2);
            memset(room.sums, 0, padded * a->dv * 4);
            visible(a, first, 0, &low, &unused);
            visible(a, first + rows - 1, 0, &unused, &high);
            for (int64_t from = low / PAIR * PAIR; from < high; from += PANEL) {
                int64_t count = least(PANEL, high - from);
                pack_keys(a, head, from, count);
                pack_values(a, head, from, count);
                for (int64_t row = 0; row < rows; row += PAIR) attend_rows(a, first, row, from, count);
            }
            write_rows(a, head, first, rows);
        }
    if (before.palette)
        _tile_loadconfig(&before);
    else
        _tile_release();
}

/* out += weights[row] (NULL: weight) * SiLU(scale * q.k) * v of each row with itself. `columns` and what is visible do
 * not matter. */
void relaygr_attend_to_self(const Attention *a, const float *weights) {
    for (int64_t row = 0; row < a->rows; row++) {
        __m512 weight = _mm512_set1_ps(weights ? weights[row] : a->weight);
        for (int64_t head = 0; head < a->heads; head++) {
            const bf16 *q = a->q + head * a->q_head + row * a->q_row, *k = a->k + head * a->k_head + row * a->k_row;
            const bf16 *v = a->v + head * a->v_head + row * a->v_row;
            bf16 *out = a->out + head * a->out_head + row * a->out_row;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t d = 0; d < a->dqk; d += TILE) sum = _mm512_fmadd_ps(load(q + d), load(k + d), sum);
            __m512 product = _mm512_set1_ps(_mm512_reduce_add_ps(sum));
            __m512 own = silu(product, _mm512_set1_ps(a->scale), _mm512_set1_ps(-1.44269504f * a->scale));
            own = _mm512_mul_ps(own, weight);
            for (int64_t d = 0; d < a->dv; d += TILE)
                store(out + d, _mm512_fmadd_ps(own, load(v + d), load(out + d)));
        }
    }
}

/* Rows of [u, o, u * LayerNorm(o)], each `width` wide: the first and the last from `before`, which is not activated
 * yet, and from o, which is there. Strides in elements. */
void relaygr_gate(
    const bf16 *before, int64_t before_row, bf16 *room, int64_t room_row, int64_t rows, int64_t width,
    const bf16 *norm_weight, const bf16 *norm_bias, float eps
) {
    __m512 one = _mm512_set1_ps(1.0f), exponent = _mm512_set1_ps(-1.44269504f);
    for (int64_t row = 0; row < rows; row++, before += before_row, room += room_row) {
        bf16 *o = room + width, *gated = o + width;
        __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
        for (int64_t d = 0; d < width; d += TILE) sum = _mm512_add_ps(sum, load(o + d));
        __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / width);
        for (int64_t d = 0; d < width; d += TILE) {
            __m512 off = _mm512_sub_ps(load(o + d), mean);
            squares = _mm512_fmadd_ps(off, off, squares);
        }
        float variance = _mm512_reduce_add_ps(squares) / width;
        __m512 inverse = _mm512_div_ps(one, _mm512_sqrt_ps(_mm512_set1_ps(variance + eps)));
        for (int64_t d = 0; d < width; d += TILE) {
            __m512 u = silu(load(before + d), one, exponent);
            __m512 normed = _mm512_mul_ps(_mm512_sub_ps(load(o + d), mean), inverse);
            normed = _mm512_fmadd_ps(normed, load(norm_weight + d), load(norm_bias + d));
            store(room + d, u);
            store(gated + d, _mm512_mul_ps(u, normed));
        }
    }
}
