// The tiles of an E8P weight in memory, layout version 1: described in quip_sharp/tiled_ops.py. No torch here.
//
// [row tile] of 16 rows: the blocks of the first book, then those of the second. A block has 32 columns, which is four
// codes of each row: 64 bytes of entries (byte 4 r + i: row r, code i), then, in E8P, 64 bytes of signs.
#pragma once

#include <cstdint>

#include "integer_tiled/layout.h"

namespace ptq::e8p_tiled {

using integer_tiled::block_columns;
using integer_tiled::blocks_in;
using integer_tiled::row_tiles;
using integer_tiled::tile_rows;

enum class Book { e8p, residual };

constexpr int64_t block_bytes(Book book) {
    return book == Book::e8p ? 128 : 64;
}
constexpr int64_t tile_bytes(int64_t k, int bits) {
    return blocks_in(k) * 64 * bits;
}
// Where the second book of a row tile begins.
constexpr int64_t second_book(int64_t k) {
    return blocks_in(k) * block_bytes(Book::e8p);
}
constexpr int books(int bits) {
    return bits == 2 ? 1 : 2;
}
constexpr Book book_of(int bits, int i) {
    return bits == 3 && i == 1 ? Book::residual : Book::e8p;
}

constexpr int offset = 12;                          // weights are bytes: an integer point, -11 .. 11, and this
constexpr int64_t most_columns = int64_t{1} << 19;  // (11 + 12) * 128 * most_columns is below 2^31

}  // namespace ptq::e8p_tiled
