// Many tokens: weights are unpacked once for all of them. Quantised ones give the bits of `Kernels::quantized`.
#pragma once

#include "e8p_tiled/kernels.h"

namespace ptq::e8p_tiled {

// What x and the weights are multiplied as; columns in a dword.
enum class Kind { bytes = 4, pairs = 2, floats = 1 };

struct Gemm {
    Weight w;
    Kind kind;
    const int32_t* rows;  // [t, steps]: x in the order of the level, as `arrange` or `spread` has left it
    int64_t row_steps;    // from row to row
    int64_t t;
    const int32_t* offsets;  // [t], bytes only
    const float* q_scale;    // [t], bytes only
    const float* bias;       // [n], or null
    void* out;               // [t, n]
    Number out_type;
    int32_t* x;      // [panel, block of tokens, step, token]: made by `pack`
    int64_t tokens;  // that a unit of `multiply` takes at most, a multiple of four
};

// Units of `pack`: blocks of tokens. Units of `multiply`: strips of row tiles, for each run of `tokens` tokens.
struct GemmKernels {
    void (*pack)(const Gemm&, int64_t first, int64_t last);
    void (*multiply)(const Gemm&, int64_t first, int64_t last);
};

extern const GemmKernels gemm_portable, gemm_avx2, gemm_avx512, gemm_avx512vnni, gemm_avx512bf16;

// All of it: packs and multiplies in parallel. `x` and `tokens` are set here.
void many_tokens(Gemm g);

}  // namespace ptq::e8p_tiled
