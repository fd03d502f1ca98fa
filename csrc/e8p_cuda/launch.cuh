// Which of the compiled shapes to launch, with how many copies of the tables and blocks of threads. No torch here.
#pragma once

#include <algorithm>

#include "common/bits.h"
#include "e8p_cuda/dequantize.cuh"
#include "e8p_cuda/linear.cuh"

namespace ptq::e8p_cuda {

using cuda::Device;

constexpr int most_half_tokens = 16;   // float16, bfloat16: for more the weight is decoded first
constexpr int most_exact_tokens = 64;  // likewise int8
constexpr int most_copies = 5;         // log2

// Calls run.operator()<Shape>() with the shape for this many tokens.
template <class X, int bits, class Run>
auto with_shape(int tokens, Run run) {
    if (tokens <= 8) return run.template operator()<Shape<bits, 1, 2, 8>>();
    if constexpr (sizeof(X) == 1)
        if (tokens > 16) return run.template operator()<Shape<bits, 4, 8, 1>>();
    return run.template operator()<Shape<bits, 2, 2, 4>>();
}

// Fills in rows, log_copies, groups and grid: as many copies of the tables as fit, of shapes for 8 tokens fewer tokens
// at once where even one does not. Returns the shared memory, or 0 where the device has too little.
template <class X, class S>
int plan(Linear& p, const Device& device) {
    const auto bytes = [&](int rows, int log, int buffers = 2) {
        return Buffers<S, sizeof(X)>::bytes(S::token_tiles == 1 ? rows : S::tokens, buffers) +
               tables_bytes(S::bits, log);
    };
    p.rows = std::min(p.tokens, S::tokens);
    p.log_copies = most_copies;
    while (p.log_copies > 3 && bytes(p.rows, p.log_copies) > device.shared_per_block) p.log_copies--;
    while (S::token_tiles == 1 && p.rows > 1 && bytes(p.rows, p.log_copies) > device.shared_per_block) p.rows--;
    while (p.log_copies > 0 && bytes(p.rows, p.log_copies) > device.shared_per_block) p.log_copies--;
    const int chunks = chunks_of<S>(p.w.k, 1);
    p.buffers = bytes(p.rows, p.log_copies, chunks) <= device.shared_per_block ? chunks : 2;
    const int shared = bytes(p.rows, p.log_copies, p.buffers);
    if (shared > device.shared_per_block) return 0;
    p.groups = (p.w.n + S::rows - 1) / S::rows;
    const int passes = (p.tokens + p.rows - 1) / p.rows;
    const int resident =
        std::clamp(device.shared_per_processor / (shared + 1024), 1, 512 / S::threads);  // by registers
    const int most = std::clamp(device.processors * resident / passes, 1, p.groups),
              each = (p.groups + most - 1) / most;
    p.grid = (p.groups + each - 1) / each;  // as many as finish together
    return shared;
}

template <class X>
const char* run_linear(const Linear& from, int bits, const Device& device, Stream stream) {
    const auto run = [&]<class S>(Linear p) -> const char* {
        const int shared = plan<X, S>(p, device);
        if (!shared) return nullptr;
        const char* error = launch<linear_kernel<X, S>>(
            {static_cast<unsigned>(p.grid), static_cast<unsigned>((p.tokens + p.rows - 1) / p.rows)}, S::threads,
            static_cast<size_t>(shared), stream, p);
        return error ? error : "";
    };
    return with_bits<2, 3, 4>(bits, [&]<int b>() -> const char* {
        const char* error = with_shape<X, b>(from.tokens, [&]<class S>() { return run.template operator()<S>(from); });
        if (!error) error = run.template operator()<Shape<b, 1, 2, 8>>(from);  // less memory: fewer tokens at once
        if (!error) return "the device has too little shared memory";
        return *error ? error : nullptr;
    });
}

template <class Out>
const char* run_dequantize(const Dequantize& p, int bits, Stream stream) {
    const int blocks = (p.w.k + block_columns - 1) / block_columns, each = dequantize_threads / codes_of_block;
    const Grid grid{static_cast<unsigned>((p.w.n + tile_rows - 1) / tile_rows),  // on x: y ends at 65535
                    static_cast<unsigned>((blocks + each - 1) / each)};
    return with_bits<2, 3, 4>(
        bits, [&]<int b>() { return launch<dequantize_kernel<Out, b>>(grid, dequantize_threads, 0, stream, p); });
}

inline const char* run_scale(const Scaled& p, Stream stream) {
    return launch<scale_kernel>({static_cast<unsigned>((p.count + scale_threads - 1) / scale_threads)}, scale_threads,
                                0, stream, p);
}

}  // namespace ptq::e8p_cuda
