// Codes as they are stored to tiles, and back: once per load, so plain loops.
#include <algorithm>
#include <cstring>

#include "e8p_tiled/kernels.h"
#include "e8p_tiled/layout.h"
#include "e8p_tiled/tables.h"

namespace ptq::e8p_tiled {
namespace {

// Calls each(stored bytes of a row, its four bytes in the tile's first block, their table of bytes or null) for every
// row of a tile and every part of the codes.
template <class Each>
void over_rows(const Pack& p, int64_t tile, const uint8_t* signs, const uint8_t* residual, const Each& each) {
    for (int part = 0; part < p.bits; part++) {
        uint8_t* block = p.tiles + tile * tile_bytes(8 * p.row_codes, p.bits) + part * 64;
        const uint8_t* bytes = part % 2 ? signs : part == 2 && p.bits == 3 ? residual : nullptr;
        for (int64_t r = 0; r < std::min(tile_rows, p.n - tile * tile_rows); r++)
            each(p.codes + (part * p.n + tile * tile_rows + r) * p.row_codes, block + 4 * r, bytes);
    }
}

}  // namespace

void pack_tiles(const Pack& p, int64_t first, int64_t last) {
    const Tables& t = tables();
    const int64_t bytes = tile_bytes(8 * p.row_codes, p.bits), step = block_bytes(p.bits);
    for (int64_t tile = first; tile < last; tile++) {
        std::memset(p.tiles + tile * bytes, 0, bytes);
        over_rows(p, tile, t.tile_signs, t.tile_residual, [&](const uint8_t* row, uint8_t* to, const uint8_t* table) {
            for (int64_t c = 0; c < p.row_codes; c++) to[c / 4 * step + c % 4] = table ? table[row[c]] : row[c];
        });
    }
}

void unpack_tiles(const Pack& p, int64_t first, int64_t last) {
    const Tables& t = tables();
    const int64_t step = block_bytes(p.bits);
    for (int64_t tile = first; tile < last; tile++)
        over_rows(p, tile, t.stored_signs, t.stored_residual,
                  [&](uint8_t* row, const uint8_t* from, const uint8_t* table) {
                      for (int64_t c = 0; c < p.row_codes; c++) {
                          const uint8_t byte = from[c / 4 * step + c % 4];
                          row[c] = table ? table[byte] : byte;
                      }
                  });
}

}  // namespace ptq::e8p_tiled
