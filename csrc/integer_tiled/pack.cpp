// Stored rows to tiles and back, once per weight: row by row through a buffer of codes, eight codes of a row at a time.
#include <algorithm>
#include <vector>

#include "integer_tiled/kernels.h"
#include "integer_tiled/layout.h"

namespace ptq::integer_tiled {
namespace {

// Up to eight codes are `bits` bytes: one little-endian word.
void row_to_codes(const uint8_t* row, int64_t bytes, int bits, uint8_t* codes, int64_t count) {
    const uint64_t mask = (1u << bits) - 1;
    for (int64_t i = 0, at = 0; i < count; i += 8, at += bits) {
        uint64_t word = 0;
        for (int64_t j = 0; j < std::min<int64_t>(bits, bytes - at); j++) word |= uint64_t{row[at + j]} << 8 * j;
        for (int64_t j = 0; j < std::min<int64_t>(8, count - i); j++) codes[i + j] = word >> bits * j & mask;
    }
}

void codes_to_row(const uint8_t* codes, int64_t count, int bits, uint8_t* row, int64_t bytes) {
    for (int64_t i = 0, at = 0; i < count; i += 8, at += bits) {
        uint64_t word = 0;
        for (int64_t j = 0; j < std::min<int64_t>(8, count - i); j++) word |= uint64_t{codes[i + j]} << bits * j;
        for (int64_t j = 0; j < std::min<int64_t>(bits, bytes - at); j++) row[at + j] = word >> 8 * j & 255;
    }
}

// Calls each(byte of the block, its shift, column, shift of the field in the code, width) for the fields of a row.
template <class Each>
void over_fields(int bits, int64_t row, const Each& each) {
    for (int shift = 0, first = 0; shift < bits;) {
        const int width = plane_of(bits, shift), fields = 8 / width;
        for (int v = 0; v < width; v++)
            for (int i = 0; i < fields; i++)
                for (int j = 0; j < 4; j++)
                    each((first + v) * 64 + 4 * row + j, i * width, (v * fields + i) * 4 + j, shift, width);
        shift += width, first += width;
    }
}

}  // namespace

void pack_tiles(const Pack& p, int64_t first, int64_t last) {
    const int64_t blocks = blocks_in(p.k), width = blocks * block_columns;
    std::vector<uint8_t> codes(width);
    for (int64_t tile = first; tile < last; tile++) {
        uint8_t* to = p.tiles + tile * tile_bytes(p.k, p.bits);
        std::memset(to, 0, tile_bytes(p.k, p.bits));
        for (int64_t r = 0; r < std::min(tile_rows, p.n - tile * tile_rows); r++) {
            row_to_codes(p.rows + (tile * tile_rows + r) * p.row_bytes, p.row_bytes, p.bits, codes.data(), p.k);
            for (int64_t b = 0; b < blocks; b++)
                over_fields(p.bits, r, [&](int64_t byte, int at, int64_t column, int shift, int size) {
                    const int field = codes[b * block_columns + column] >> shift & ((1 << size) - 1);
                    to[b * block_bytes(p.bits) + byte] |= static_cast<uint8_t>(field << at);
                });
        }
    }
}

void unpack_tiles(const Pack& p, int64_t first, int64_t last) {
    const int64_t blocks = blocks_in(p.k), width = blocks * block_columns;
    std::vector<uint8_t> codes(width);
    for (int64_t tile = first; tile < last; tile++) {
        const uint8_t* from = p.tiles + tile * tile_bytes(p.k, p.bits);
        for (int64_t r = 0; r < std::min(tile_rows, p.n - tile * tile_rows); r++) {
            std::fill(codes.begin(), codes.end(), uint8_t{0});
            for (int64_t b = 0; b < blocks; b++)
                over_fields(p.bits, r, [&](int64_t byte, int at, int64_t column, int shift, int size) {
                    const int field = from[b * block_bytes(p.bits) + byte] >> at & ((1 << size) - 1);
                    codes[b * block_columns + column] |= static_cast<uint8_t>(field << shift);
                });
            codes_to_row(codes.data(), p.k, p.bits, p.rows + (tile * tile_rows + r) * p.row_bytes, p.row_bytes);
        }
    }
}

}  // namespace ptq::integer_tiled
