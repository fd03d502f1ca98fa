// The same product as `Kernels::quantized`, to the bit, for many tokens: weights are unpacked once for all of them.
#pragma once

#include "common/units.h"
#include "gemm/tokens.h"
#include "integer_tiled/kernels.h"

namespace ptq::integer_tiled {

constexpr int64_t gemm_tokens = gemm::quad_tokens;
constexpr int64_t gemm_tiles = 3;            // row tiles of a strip, which is unpacked and multiplied at once
constexpr int64_t gemm_columns = 512;        // columns of a panel: those of a strip lie in the first-level cache
constexpr int64_t gemm_blocks = 65536 / 32;  // super-blocks of the largest group whose sums stay below 2^31

struct Gemm {
    Quantized p;        // without `q` and `sums`
    gemm::Tokens from;  // that `pack` brings into
    int32_t* x;         // what gemm::Quads says; the panels have `gemm_columns` columns at most
    int32_t* offset;    // likewise: what zero adds to the sums
    int64_t tokens;     // that a unit of `multiply` takes at most, a multiple of four
};

// Units of `pack`: blocks of tokens. Units of `multiply`: strips of row tiles, for each run of `tokens` tokens.
struct GemmKernels {
    void (*pack)(const Gemm&, int64_t first, int64_t last);
    void (*multiply)(const Gemm&, Units&);
};

extern const GemmKernels gemm_portable, gemm_avx2, gemm_avx512, gemm_avx512vnni;

// All of it: packs and multiplies in parallel. For groups of at most `gemm_blocks` super-blocks; `q` and `sums` of p
// are not read.
void many_tokens(const Quantized& p, const gemm::Tokens& from);

// The same for floating-point numbers; `spread` and `sums` of p are not read.
void many_floats(const Floats& p);

}  // namespace ptq::integer_tiled
