// The tiles of an E8P weight in memory, layout version 1: described in quip_sharp/tiled_ops.py. No torch here.
//
// [row tile] of 16 rows: block after block. A block has 32 columns, which is four codes of each row: for each part of
// the codes 64 bytes, byte 4 r + i: row r, code i. The parts are entries and signs of E8P; with 3 bits entries of the
// residual book, with 4 bits entries and signs again.
#pragma once

#include <cstdint>

#include "e8p/multipliers.h"
#include "tiles/layout.h"

namespace ptq::e8p_tiled {

using e8p::multiplier;
using e8p::stages;
using tiles::block_bytes;
using tiles::block_columns;
using tiles::blocks_in;
using tiles::row_tiles;
using tiles::tile_bytes;
using tiles::tile_rows;

// Weights are bytes: an integer point, of at most 11, with 3 and 4 bits 109, and this. Below 128 they can be multiplied
// faster without VNNI.
constexpr int offset_of(int bits) {
    return bits == 2 ? 12 : 128;
}
constexpr bool are_wide(int bits) {
    return bits != 2;
}
constexpr int64_t most_columns = int64_t{1} << 16;  // 255 * 128 * most_columns is below 2^31

}  // namespace ptq::e8p_tiled
