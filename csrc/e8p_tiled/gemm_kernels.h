// The same product as `Kernels::quantized`, to the bit, for many tokens: weights are unpacked once for all of them.
#pragma once

#include "e8p_tiled/kernels.h"
#include "gemm/sizes.h"

namespace ptq::e8p_tiled {

struct Gemm {
    Quantized p;
    int32_t* x;      // [panel, block of tokens, column / 4, token]: q, four columns in a number; zeros for no token
    int64_t tokens;  // that a unit of `multiply` takes at most, a multiple of four
};

// Units of `pack`: blocks of tokens. Units of `multiply`: strips of row tiles, for each run of `tokens` tokens.
struct GemmKernels {
    void (*pack)(const Gemm&, int64_t first, int64_t last);
    void (*multiply)(const Gemm&, int64_t first, int64_t last);
};

extern const GemmKernels gemm_portable, gemm_avx2, gemm_avx512, gemm_avx512vnni;

// All of it: packs and multiplies in parallel.
void many_quantized(const Quantized& p);

}  // namespace ptq::e8p_tiled
