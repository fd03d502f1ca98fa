// The tiles of weights whose codes have 2 to 8 bits, integers and small floats, layout version 1, and how the codes
// come out of them. No torch here.
//
// W[n, k] is padded with zeros to whole super-blocks of 16 rows x 32 columns. A super-block takes 64 * bits bytes:
// the code's bits are cut into planes, the widest first, which holds the lowest bits:
//     8 = {8}, 7 = {4, 2, 1}, 6 = {4, 2}, 5 = {4, 1}, 4 = {4}, 3 = {2, 1}, 2 = {2}
// A plane of width p is p vectors of 64 bytes. In a vector, byte 4 r + j (row r of 16, j of 4) holds 8 / p fields, the
// lowest bits first; field i of vector v belongs to column (v (8 / p) + i) 4 + j. Columns 4 i .. 4 i + 3 of a
// super-block are its quad i: one dword for each row, which `vpdpbusd` multiplies with four activations.
//
// In memory: [row tile][super-block along k][plane][vector]. Beside it, for g groups in a row:
//     scale  uint16 [row tile][g][16]  bits of bfloat16 (other scales: docs/format.md, section 10)
//     zero   uint8  [row tile][g][16]  only if asymmetric; else zero is 2^(bits - 1)
// A group is a multiple of 32 columns, or the whole row. Each thread reads its row tiles as one contiguous stream.
//
// Kernels include it once per instruction set, so all is in an anonymous namespace; host code takes the sizes alone.
#pragma once

#include <cstdint>
#include <utility>

#include "common/sixteen.h"

namespace ptq::tiles {
namespace {

constexpr int64_t tile_rows = 16;      // rows of W in a tile
constexpr int64_t block_columns = 32;  // columns in a super-block
constexpr int quads = 8;               // quads of four columns in a super-block

// Bytes of a super-block, tiles and super-blocks of a weight, bytes of a row tile.
constexpr int64_t block_bytes(int bits) {
    return 64 * bits;
}
constexpr int64_t row_tiles(int64_t n) {
    return (n + tile_rows - 1) / tile_rows;
}
constexpr int64_t blocks_in(int64_t k) {
    return (k + block_columns - 1) / block_columns;
}
constexpr int64_t tile_bytes(int64_t k, int bits) {
    return blocks_in(k) * block_bytes(bits);
}

// Bytes of one token's `arranged`: up to three bfloat16 numbers, one float, or four bytes, and what belongs to a group
// of these, for each of the padded columns.
inline int64_t arranged_bytes(int64_t k) {
    return (k + 63) / 64 * 64 * 6;
}

// The planes of a code: their widths, where each begins in the super-block (in vectors of 64 bytes: the bits before
// it).
constexpr int plane_of(int bits, int shift) {  // width of the plane whose lowest bit is `shift`
    const int left = bits - shift;
    return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

// Bytes 4 r .. 4 r + 3 are row r.
using ptq::Dwords;

inline Dwords load_dwords(const uint8_t* from) {
    return load_vector<Dwords>(from);
}

template <int width>
inline Dwords every_byte() {  // the mask of a field
    return Dwords{} + 0x01010101u * ((1u << width) - 1);
}

// Quad i of a super-block: columns 4 i .. 4 i + 3 of all 16 rows, as bytes. From the plane that begins at `shift` on;
// whole dwords are shifted, and the mask drops what came from the neighbouring byte.
template <int bits, int i, int shift = 0>
inline Dwords quad_of(const uint8_t* block) {
    constexpr int width = plane_of(bits, shift), fields = 8 / width, by = i % fields * width - shift;
    const Dwords x = load_dwords(block + 64 * (shift + i / fields));
    const Dwords moved = by >= 0 ? x >> (by & 31) : x << (-by & 31);
    const Dwords field = width == 8 ? moved : moved & (every_byte<width>() << shift);
    if constexpr (shift + width < bits)
        return field | quad_of<bits, i, shift + width>(block);
    else
        return field;
}

// Calls f.operator()<i>(quad i) for the quads of a super-block: each is made when it is needed.
template <int bits, class F>
inline void over_quads(const uint8_t* block, const F& f) {
    [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
        (f.template operator()<i>(quad_of<bits, i>(block)), ...);
    }(std::make_integer_sequence<int, quads>{});
}

// The quads of one super-block.
template <int bits>
inline void unpack_block(const uint8_t* block, Dwords out[quads]) {
    over_quads<bits>(block, [&]<int i>(const Dwords& codes) __attribute__((always_inline)) { out[i] = codes; });
}

}  // namespace
}  // namespace ptq::tiles
