// The tile registers of x86's matrix units (AMX). Included once, by amx.h.
//
// Tiles 0 to 2 are sums, and so are 3 to 5; 6 is of x, 7 of a panel. What is stored of one set arrives in memory late,
// and holds up loads from addresses with the same twelve lowest bits: meanwhile the other set is multiplied.
#pragma once

#include <cstdint>

#include "common/sixteen.h"
#include "common/tile_registers.h"
#include "gemm/panels_kernels.h"

namespace ptq::gemm {
namespace {

constexpr int64_t tile_tokens = 16;
constexpr int64_t panel_tiles = 3, panel_rows = 16 * panel_tiles;
constexpr int64_t tile_numbers = tile_tokens * 16;  // of sums, [token, row]

// What follows is written out by macros: the numbers of tiles are part of the instructions.
#define PTQ_EACH_TILE(do)                    \
    if constexpr (set == 0) {                \
        do (0, 0) if constexpr (tiles > 1) { \
                do (1, 1)                    \
            }                                \
        if constexpr (tiles > 2) {           \
            do (2, 2)                        \
        }                                    \
    } else {                                 \
        do (3, 0) if constexpr (tiles > 1) { \
                do (4, 1)                    \
            }                                \
        if constexpr (tiles > 2) {           \
            do (5, 2)                        \
        }                                    \
    }

// Sums += a tile of x times some row tiles of a panel.
template <Mode mode, int tiles, int set>
PTQ_INLINE void multiply_tiles(const uint32_t* x, int64_t depth, const int32_t* panel) {
    _tile_loadd(6, x, 4 * depth);
#define PTQ_MULTIPLY(sum, r)                                    \
    _tile_loadd(7, panel + r * 16, tiles * 64);                 \
    if constexpr (mode == Mode::quads) _tile_dpbssd(sum, 6, 7); \
    if constexpr (mode == Mode::pairs) _tile_dpbf16ps(sum, 6, 7);
    PTQ_EACH_TILE(PTQ_MULTIPLY)
#undef PTQ_MULTIPLY
}

// Sums from memory and to memory, [tile, token, row], and zeros.
template <int tiles, int set>
PTQ_INLINE void load_sums(const int32_t* from) {
#define PTQ_LOAD(sum, r) _tile_loadd(sum, from + r * tile_numbers, 64);
    PTQ_EACH_TILE(PTQ_LOAD)
#undef PTQ_LOAD
}
template <int tiles, int set>
PTQ_INLINE void store_sums(int32_t* to) {
#define PTQ_STORE(sum, r) _tile_stored(sum, to + r * tile_numbers, 64);
    PTQ_EACH_TILE(PTQ_STORE)
#undef PTQ_STORE
}
template <int tiles, int set>
PTQ_INLINE void clear_sums() {
#define PTQ_CLEAR(sum, r) _tile_zero(sum);
    PTQ_EACH_TILE(PTQ_CLEAR)
#undef PTQ_CLEAR
}
#undef PTQ_EACH_TILE

}  // namespace
}  // namespace ptq::gemm
