// Rows times panels on the matrix units of x86 (AMX): three tiles of sixteen rows times two of sixteen columns at once.
// Included once, by products.h.
#pragma once

#include "common/lanes.h"
#include "common/tile_registers.h"
#include "prefill/kernels.h"

namespace ptq::prefill {
namespace {

constexpr int64_t tile_rows = 16, tile_columns = 2 * lanes;
static_assert(block == 3 * tile_rows && depth_of(Mode::tiles) == tile_steps);

template <>
struct Registers<Mode::tiles> {
    TileRegisters tiles{tile_steps};
};

// The numbers of tiles are part of the instructions: do(row tile, its sums of sixteen columns, and of the next ones).
#define PTQ_EACH_ROW_TILE(do)  \
    do (0, 0, 1);              \
    if constexpr (tiles > 1) { \
        do (1, 2, 3);          \
    }                          \
    if constexpr (tiles > 2) { \
        do (2, 4, 5);          \
    }

// Sums += x [16 * tiles, steps] times 32 columns. `row`, `step`: dwords from a row of x, or step, to the next.
template <int tiles>
PTQ_INLINE void multiply_tiles(const uint32_t* x, int64_t row, const uint32_t* from, int64_t step, int64_t steps) {
    asm volatile("" ::: "memory");  // gcc does not know that tiles are loaded from it
    for (int64_t i = 0; i < steps; i += tile_steps, from += tile_steps * step) {
#define PTQ_MULTIPLY(r, even, odd)                        \
    _tile_loadd(6, x + r * tile_rows * row + i, 4 * row); \
    _tile_loadd(7, from, 4 * step);                       \
    _tile_dpbf16ps(even, 6, 7);                           \
    _tile_loadd(7, from + lanes, 4 * step);               \
    _tile_dpbf16ps(odd, 6, 7)
        PTQ_EACH_ROW_TILE(PTQ_MULTIPLY)
#undef PTQ_MULTIPLY
    }
}

// The sums, to memory. `row`: numbers from a row to the next.
template <int tiles>
PTQ_INLINE void store_tiles(float* to, int64_t row) {
#define PTQ_STORE(r, even, odd)                            \
    _tile_stored(even, to + r * tile_rows * row, 4 * row); \
    _tile_stored(odd, to + r * tile_rows * row + lanes, 4 * row)
    PTQ_EACH_ROW_TILE(PTQ_STORE)
#undef PTQ_STORE
}

template <int tiles>
void score_tiles(const uint32_t* keys, const uint32_t* q, int64_t steps, float* score) {
#define PTQ_CLEAR(r, even, odd) \
    _tile_zero(even);           \
    _tile_zero(odd)
    PTQ_EACH_ROW_TILE(PTQ_CLEAR)
#undef PTQ_CLEAR
    multiply_tiles<tiles>(q, steps, keys, panel, steps);
    store_tiles<tiles>(score, chunk);
}

template <int tiles>
void value_tiles(const uint32_t* values, int64_t step, const uint32_t* weight, int64_t steps, float* out, int64_t row) {
    asm volatile("" ::: "memory");
#define PTQ_LOAD(r, even, odd)                             \
    _tile_loadd(even, out + r * tile_rows * row, 4 * row); \
    _tile_loadd(odd, out + r * tile_rows * row + lanes, 4 * row)
    PTQ_EACH_ROW_TILE(PTQ_LOAD)
#undef PTQ_LOAD
    multiply_tiles<tiles>(weight, chunk / numbers_of(Mode::tiles), values, step, steps);
    store_tiles<tiles>(out, row);
}
#undef PTQ_EACH_ROW_TILE

// Rows behind the last one are multiplied, too: scratch memory has room for them, and nobody reads what comes out.
template <>
void score_rows<Mode::tiles>(const uint32_t* panels, const uint32_t* q, int64_t steps, int64_t rows, int64_t keys,
                             float* score) {
    constexpr decltype(&score_tiles<1>) of[] = {score_tiles<1>, score_tiles<2>, score_tiles<3>};
    for (int64_t k = 0; k < keys; k += tile_columns)
        of[(rows - 1) / tile_rows](panels + k / panel * panel * steps + k % panel, q, steps, score + k);
}

// Up to 31 keys behind the last one have weights of 0: what is not finite in their values shows, as with torch's own.
template <>
void add_values<Mode::tiles>(const uint32_t* values, const uint32_t* weight, int64_t keys, int64_t rows,
                             const float* factor, float* out, int64_t width) {
    constexpr decltype(&value_tiles<1>) of[] = {value_tiles<1>, value_tiles<2>, value_tiles<3>};
    constexpr int64_t value_steps = chunk / numbers_of(Mode::tiles);
    const int64_t steps = (keys + 1) / 2;
    for (int64_t r = 0; r < rows; r++)
        if (factor[r] != 1)
            for (int64_t c = 0; c < width; c += lanes)
                store(out + r * width + c, load(out + r * width + c) * factor[r]);
    for (int64_t c = 0; c < width; c += tile_columns) {
        const int64_t start = c / panel * panel, step = std::min(panel, width - start);
        of[(rows - 1) / tile_rows](values + start * value_steps + c - start, step, weight, steps, out + c, width);
    }
}

}  // namespace
}  // namespace ptq::prefill
