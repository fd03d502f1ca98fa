// The tile registers of x86's matrix units (AMX). Included per level, by what runs at `amx` alone.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ptq {
namespace {

constexpr int64_t tile_steps = 16;  // dwords of a row of a tile, and rows of it, at most

// The tiles of this thread, as long as it lives: 0 to 5 are sums, 6 has rows of `depth` dwords, 7 as many rows; all but
// 7 have `rows` of them. Then as they were found, for torch uses them, too.
class TileRegisters {
  public:
    explicit TileRegisters(int64_t depth, int64_t rows = 16) {
        _tile_storeconfig(&found);
        Config wanted{1, 0, {}, {}, {}};
        for (int i = 0; i < 8; i++) wanted.bytes[i] = 64, wanted.rows[i] = static_cast<uint8_t>(rows);
        wanted.bytes[6] = static_cast<uint16_t>(4 * depth), wanted.rows[7] = static_cast<uint8_t>(depth);
        load(wanted);
    }
    ~TileRegisters() { found.palette ? load(found) : _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;

  private:
    struct alignas(64) Config {
        uint8_t palette, row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    static void load(const Config& config) {
        asm volatile("" ::"r"(&config) : "memory");  // the compiler knows of its first bytes alone
        _tile_loadconfig(&config);
    }
    Config found;
};

}  // namespace
}  // namespace ptq
