// Many tokens times a weight that is unpacked panel by panel, whatever its codes. No torch here.
//
// A panel holds some columns of a few row tiles of sixteen rows, as dwords [step][row tile][16]; x is brought into the
// same steps. What a step is depends on the `Mode`.
#pragma once

#include "common/cpu_level.h"
#include "common/number.h"
#include "common/units.h"
#include "gemm/tokens.h"

namespace ptq::gemm {

enum class Mode {
    floats,  // a column, as float32
    pairs,  // two columns as bfloat16, 0 and 2, then 1 and 3, of every four, as they come out of a dword of four bytes;
            // with AVX-512 BF16 only
    quads,  // four columns as bytes: integers + `byte_offset`, below 128 (AMX: signed integers); x is int8
    nibbles,  // the same, below 16, which costs less with AVX2; not for AMX
    wide,     // the same, up to 255, which costs more without VNNI; not for AMX
};
// Whether tokens meet the tiles of AMX.
inline bool on_amx(Number x) {
    return x == Number::bfloat16 && cpu_level() == CpuLevel::amx;
}
// Whether many tokens are multiplied in pairs, where a level has them.
inline bool are_pairs(Number x) {
    return x == Number::bfloat16 && (on_amx(x) || !has_slow_pairs());
}
// How many tokens of floating-point numbers are few, and do not come here; with AMX fewer.
inline int64_t few_floats(Number x, int64_t few) {
    return on_amx(x) ? 3 : few;
}
constexpr bool are_integers(Mode mode) {
    return mode == Mode::quads || mode == Mode::nibbles || mode == Mode::wide;
}
constexpr int64_t columns_of(Mode mode) {
    return are_integers(mode) ? 4 : mode == Mode::pairs ? 2 : 1;
}

constexpr int64_t column_step = 32;    // columns of the weight, its groups and panels come in multiples of it
constexpr int64_t most_group = 65536;  // columns of a group, with `quads`: the integers stay below 2^31

// Writes the steps of row tiles [tile, tile + tiles) and columns [column, end).
using Unpack = void (*)(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel);
// What a format has for AMX, where bytes are signed: its quads without `byte_offset`; null at other levels.
template <const Unpack& signed_bytes>
Unpack amx_unpack() {
    static constexpr Unpack none = nullptr;
    return at_level<none, none, none, none, none, none, signed_bytes>();
}
constexpr int64_t direct_tiles = 3;
// For up to so many tokens codes of integers are taken apart for each block of them, rather than into a panel: a block
// of the `Block` of this level (gemm/block.h), of up to `direct_tiles` row tiles. Not for AMX.
struct Direct {
    void (*multiply)(const void* block, int tiles, int64_t tokens) = nullptr;
    int64_t tokens = 0;
};

// W[n, columns]: columns beyond those of x count as zero.
struct Panels {
    const void* weight;
    Unpack unpack;
    const uint16_t* scale;  // [row tile, groups, 16], bits of bfloat16; null: `multiples`, or `factor`
    int64_t n, columns, groups, group_columns;
    const uint8_t* codes;  // bytes of a row tile, of 32 columns
    int64_t tile_bytes, step_bytes;
    int byte_offset = 0;            // of integers; but not of signed ones
    const uint8_t* zero = nullptr;  // of integers: [row tile, groups, 16]: to be subtracted instead of `byte_offset`
    float factor = 1;
    Direct direct{};
    const uint8_t* multiples = nullptr;  // [row tile, 1 + groups, 16]: exponents, and multiples of powers of two; of
                                         // integers, for `direct` alone

    int64_t tiles() const { return (n + 15) / 16; }  // of rows
};

struct Product;
using Pack = void (*)(const Product&, int64_t first, int64_t last);

// y[t, n] = token_scale * x Wᵀ + bias.
// Floats and pairs: sums in float32, in the order of the columns, group after group: the same for any number of threads
// and tokens; products are exact where x is bfloat16. Integers: to the bit what tiled_ops.py of a method says.
struct Product {
    Panels w;
    Mode mode;
    const void* x;  // [t, k]: float32 or bfloat16 (pairs: bfloat16); quads: see `from`
    Number x_type;
    int64_t t, k;
    const float* token_scale;  // [t], or null
    const float* bias;         // [n], or null
    void* out;                 // [t, n]
    Number out_type;
    Tokens from{};                   // quads: x
    const uint32_t* rows = nullptr;  // floats, pairs: x in steps, `row_steps` apart, in the place of all of these
    int64_t row_steps = 0;
    bool by_vectors = false;     // even with AMX: integers, whose `unpack` is then as without it
    Pack pack = nullptr;         // in the place of the level's own; AMX is then not used
    bool add = false;            // y, in float32, to what `out` holds
    int64_t diagonal = -1;       // row i of y is row diagonal + i of a symmetric matrix, of which what is right of the
                                 // diagonal need not be computed; -1: all is
    uint32_t* packed = nullptr;  // x as `multiply` wants it, made by `pack`: [panel, block of tokens, step, token]
    int32_t* offset = nullptr;   // integers: minus the sums of x, times `byte_offset` without a zero: see `Quads`
    int64_t tokens = 0;          // that a unit of `multiply` takes at most: whole blocks
    int64_t block_tokens = 0;    // tokens of a block
    int64_t strip_tiles = 0;     // row tiles of a strip, or panel

    bool is_direct() const { return are_integers(mode) && t <= w.direct.tokens; }
    int64_t blocks() const { return (t + block_tokens - 1) / block_tokens; }
    int64_t strips() const { return (w.tiles() + strip_tiles - 1) / strip_tiles; }
};

// Units of `pack`: blocks of tokens. Units of `multiply`: strips of row tiles, for each run of `tokens` tokens.
struct PanelKernels {
    struct Shape {
        int64_t tokens, tiles;  // of a block, of a strip
    } integers, numbers;
    Pack pack;
    void (*multiply)(const Product&, Units&);
};

extern const PanelKernels panels_portable, panels_avx2, panels_avxvnni, panels_avx512, panels_avx512vnni,
    panels_avx512bf16, panels_dotprod;
extern const PanelKernels panels_amx;  // not for floats

// All of it, in parallel; what is made by `pack`, and sizes of blocks, are set here.
void multiply_panels(Product p);

}  // namespace ptq::gemm
