// The points of the E8 codebooks as tables, built once from their definitions (quip_sharp/e8p.py), in every form that
// the kernels look things up in. All are indexed by the bytes of a tile, where `stored` is not in the name.
#pragma once

#include <cstdint>

namespace ptq::e8p_tiled {

enum Book { e8p_book, residual_book };

// What stages add up to weights, times their multipliers: bytes; those of the first stage with the weights' offset.
struct alignas(64) Values {
    // [stage][even or odd coordinate][nibble, bits 4 and 5: E8P: signs of both coordinates; residual: bits of the
    // entry]: for E8P with p = 0
    uint8_t pairs[2][2][64];
    uint8_t nibbles[2][16];  // [stage][nibble]
};

struct alignas(64) Tables {
    // Two look-ups, for instructions that look up bytes among 64 to 256. A pair of coordinates, 2 i and 2 i + 1, takes
    // one of at most 16 values (residual book: at most 16 for each value of the entry's bit 5): its number is a nibble.
    uint8_t pairs[2][2][256];  // [book][which byte][entry]: pairs 0 and 1, pairs 2 and 3, the even one in bits 0 .. 3
    uint8_t last_signs[128];   // [the seven true signs]: in bits 4 and 5 those of coordinates 6 and 7

    // One look-up of a nibble for each coordinate, for instructions that look up dwords, and bytes among 16: nibble 2 i
    // (the lower one) is coordinate 2 i, nibble 2 i + 1 coordinate 2 i + 1. For E8P, those of entry and signs are
    // xored.
    uint32_t nibbles[2][256];    // [book][entry]
    uint32_t sign_nibbles[256];  // [signs]

    Values values[3];  // of 2, 3 and 4 bits

    // Bytes of the stored parts to those of tiles, and back.
    uint8_t tile_signs[256], stored_signs[256];
    uint8_t tile_residual[256], stored_residual[256];
};

const Tables& tables();

}  // namespace ptq::e8p_tiled
