// The same product as `Kernels::quantized`, to the bit, for many tokens: weights are unpacked once for all of them.
#pragma once

#include "integer_tiled/kernels.h"

namespace ptq::integer_tiled {

constexpr int64_t gemm_tokens = 4;           // tokens of a block: their numbers lie side by side
constexpr int64_t gemm_tiles = 3;            // row tiles of a strip, which is unpacked and multiplied at once
constexpr int64_t gemm_columns = 512;        // columns of a panel: those of a strip lie in the first-level cache
constexpr int64_t gemm_blocks = 65536 / 32;  // super-blocks of the largest group whose sums stay below 2^31

struct Gemm {
    Quantized p;      // without `sums`
    int32_t* x;       // [panel, block of tokens, column / 4, token]: q, four columns in a number; zeros for no token
    int32_t* offset;  // [block of tokens, group, token]: what zero adds to the sums: see `pack`
    int64_t tokens;   // that a unit of `multiply` takes at most, a multiple of four
};

// Units of `pack`: blocks of tokens. Units of `multiply`: strips of row tiles, for each run of `tokens` tokens.
struct GemmKernels {
    void (*pack)(const Gemm&, int64_t first, int64_t last);
    void (*multiply)(const Gemm&, int64_t first, int64_t last);
};

extern const GemmKernels gemm_portable, gemm_avx2, gemm_avx512, gemm_avx512vnni;

// All of it: packs and multiplies in parallel. For groups of at most `gemm_blocks` super-blocks; `sums` is not read.
void many_tokens(const Quantized& p);

}  // namespace ptq::integer_tiled
