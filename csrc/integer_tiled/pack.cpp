// Stored rows to tiles and back, once per weight: row by row through a buffer of codes, eight codes of a row at a time.
// Four neighbouring codes are one 32-bit word of the buffer, and one of a tile's vectors holds the fields of such
// words.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/bits.h"
#include "integer_tiled/kernels.h"
#include "tiles/layout.h"

namespace ptq::integer_tiled {

using namespace tiles;
namespace {

template <class Word>
Word load(const uint8_t* from, int64_t bytes = sizeof(Word)) {
    Word word = 0;
    std::memcpy(&word, from, std::min<int64_t>(bytes, sizeof(Word)));
    return word;
}

// Eight codes of Bits bits, packed in Bits bytes, as eight bytes.
template <int Bits>
uint64_t spread_bits(uint64_t word) {
    uint64_t codes = 0;
    for (int j = 0; j < 8; j++) codes |= (word >> Bits * j & ((1u << Bits) - 1)) << 8 * j;
    return codes;
}

template <int Bits>
uint64_t gather(uint64_t codes) {
    uint64_t word = 0;
    for (int j = 0; j < 8; j++) word |= (codes >> 8 * j & ((1u << Bits) - 1)) << Bits * j;
    return word;
}

template <int Bits>
void row_to_codes(const uint8_t* row, int64_t bytes, uint8_t* codes, int64_t width) {
    for (int64_t i = 0, at = 0; i < width; i += 8, at += Bits) {
        const int64_t left = std::clamp<int64_t>(bytes - at, 0, Bits);  // beyond the row: columns of zeros
        const uint64_t word = left ? load<uint64_t>(row + at, bytes - at >= 8 ? 8 : left) : 0;
        const uint64_t eight = spread_bits<Bits>(word);
        std::memcpy(codes + i, &eight, 8);
    }
}

template <int Bits>
void codes_to_row(const uint8_t* codes, uint8_t* row, int64_t bytes) {
    for (int64_t i = 0, at = 0; at < bytes; i += 8, at += Bits) {
        const uint64_t word = gather<Bits>(load<uint64_t>(codes + i));
        std::memcpy(row + at, &word, std::min<int64_t>(Bits, bytes - at));
    }
}

// Calls each(which of a block's vectors, shift of its field, which word of a block's codes, shift and mask of the field
// in a code) for every field of a block.
template <int Bits, class Each>
inline void over_fields(const Each& each) {
    for (int shift = 0, first = 0; shift < Bits;) {
        const int width = plane_of(Bits, shift), fields = 8 / width;
        for (int v = 0; v < width; v++)
            for (int i = 0; i < fields; i++)
                each(first + v, i * width, v * fields + i, shift, ((1u << width) - 1) * 0x01010101u);
        shift += width, first += width;
    }
}

template <int Bits>
void pack(const Pack& p, int64_t first, int64_t last) {
    const int64_t blocks = blocks_in(p.k), width = blocks * block_columns;
    std::vector<uint8_t> codes(width);
    for (int64_t tile = first; tile < last; tile++) {
        uint8_t* to = p.tiles + tile * tile_bytes(p.k, Bits);
        std::memset(to, 0, tile_bytes(p.k, Bits));
        for (int64_t r = 0; r < std::min(tile_rows, p.n - tile * tile_rows); r++) {
            row_to_codes<Bits>(p.rows + (tile * tile_rows + r) * p.row_bytes, p.row_bytes, codes.data(), width);
            for (int64_t b = 0; b < blocks; b++) {
                uint32_t vectors[Bits] = {};
                over_fields<Bits>([&](int v, int at, int word, int shift, uint32_t mask) {
                    vectors[v] |= (load<uint32_t>(&codes[b * block_columns + 4 * word]) >> shift & mask) << at;
                });
                for (int v = 0; v < Bits; v++) std::memcpy(to + b * block_bytes(Bits) + 64 * v + 4 * r, &vectors[v], 4);
            }
        }
    }
}

template <int Bits>
void unpack(const Pack& p, int64_t first, int64_t last) {
    const int64_t blocks = blocks_in(p.k), width = blocks * block_columns;
    std::vector<uint8_t> codes(width);
    for (int64_t tile = first; tile < last; tile++) {
        const uint8_t* from = p.tiles + tile * tile_bytes(p.k, Bits);
        for (int64_t r = 0; r < std::min(tile_rows, p.n - tile * tile_rows); r++) {
            for (int64_t b = 0; b < blocks; b++) {
                uint32_t words[block_columns / 4] = {};
                over_fields<Bits>([&](int v, int at, int word, int shift, uint32_t mask) {
                    words[word] |= (load<uint32_t>(from + b * block_bytes(Bits) + 64 * v + 4 * r) >> at & mask)
                                   << shift;
                });
                std::memcpy(&codes[b * block_columns], words, sizeof(words));
            }
            codes_to_row<Bits>(codes.data(), p.rows + (tile * tile_rows + r) * p.row_bytes, p.row_bytes);
        }
    }
}

}  // namespace

void pack_tiles(const Pack& p, int64_t first, int64_t last) {
    with_bits<2, 3, 4, 5, 6, 7, 8>(p.bits, [&]<int Bits>() { pack<Bits>(p, first, last); });
}

void unpack_tiles(const Pack& p, int64_t first, int64_t last) {
    with_bits<2, 3, 4, 5, 6, 7, 8>(p.bits, [&]<int Bits>() { unpack<Bits>(p, first, last); });
}

}  // namespace ptq::integer_tiled
