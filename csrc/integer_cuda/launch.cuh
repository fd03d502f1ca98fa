// Which of the compiled shapes to launch. No torch here.
#pragma once

#include "fragments_cuda/launch.cuh"
#include "fragments_cuda/narrow.cuh"
#include "fragments_cuda/wgmma_launch.cuh"
#include "integer_cuda/code.cuh"

namespace ptq::integer_cuda {

using namespace ptq::fragments;

constexpr int most_tokens = 64;  // with which a weight is decoded as it is multiplied
constexpr int few_tokens = 32;   // up to these a product waits for its weight, however fast it multiplies

// Calls run.operator()<Shape>() with the shape for this many tokens. Four bits have all of them, other widths two: that
// keeps the time to compile short. Wide ones leave no room for 64 tokens on the smallest devices.
template <int bits, class Run>
auto with_linear_shape(int tokens, Run run) {
    using Code = Integer<bits>;
    if (tokens <= 8) return run.template operator()<Shape<Code, 1, 4, 2, 2>>();
    if constexpr (bits == 4) {
        if (tokens <= 16) return run.template operator()<Shape<Code, 2, 4, 2, 2>>();
        if (tokens <= 32) return run.template operator()<Shape<Code, 4, 1, 8, 1>>();
    }
    constexpr int most = bits < 7 ? 8 : 4;
    return run.template operator()<Shape<Code, most, 1, 8, 1>>();
}
template <int bits, class Run>
auto with_quantized_shape(int tokens, int groups, Run run) {
    using Code = Integer<bits>;
    if constexpr (bits == 4) {
        if (tokens <= 8 && groups == 1) return run.template operator()<Shape<Code, 1, 2, 1, 8>>();
    }
    if (tokens <= 8) return run.template operator()<Shape<Code, 1, 1, 4, 1>>();
    if constexpr (bits == 4) {
        if (tokens <= 16) return run.template operator()<Shape<Code, 2, 1, 4, 1>>();
    }
    return run.template operator()<Shape<Code, 8, 1, 4, 1>>();
}
template <class Run>
auto with_bits(int bits, Run run) {
    switch (bits) {
        case 2:
            return run.template operator()<2>();
        case 3:
            return run.template operator()<3>();
        case 5:
            return run.template operator()<5>();
        case 6:
            return run.template operator()<6>();
        case 7:
            return run.template operator()<7>();
        case 8:
            return run.template operator()<8>();
        default:
            return run.template operator()<4>();
    }
}

inline int linear_splits(const Weights& w, int bits, int tokens, const Device& device) {
    return with_bits(bits, [&]<int b>() {
        return with_linear_shape<b>(tokens, [&]<class S>() { return splits_of<S>(w, tokens, device); });
    });
}
// p.splits is what `linear_splits` says, or any smaller number.
template <class T>
const char* run_linear(const Linear& p, int bits, Stream stream) {
    return with_bits(bits, [&]<int b>() {
        return with_linear_shape<b>(p.tokens, [&]<class S>() { return launch_linear<T, S>(p, stream); });
    });
}
inline const char* run_quantized(const Quantized& p, int bits, Stream stream) {
    return with_bits(bits, [&]<int b>() {
        return with_quantized_shape<b>(p.tokens, p.w.groups, [&]<class S>() { return launch_quantized<S>(p, stream); });
    });
}
// Both of four bits, where `is_narrow`; `packed` has room for `packed_bytes`.
inline const char* run_narrow(const Quantized& p, void* packed, Stream stream) {
    return launch_narrow<Integer<4>>(p, static_cast<uint32_t*>(packed), stream);
}
// For tokens that were arranged, where `suits_wgmma`.
template <class T>
const char* run_wgmma_linear(const Linear& p, int bits, const WgmmaPlan& plan, Stream stream) {
    return with_bits(bits, [&]<int b>() { return launch_wgmma_linear<T, Integer<b>>(p, plan, stream); });
}
inline const char* run_wgmma_quantized(const Quantized& p, int bits, const WgmmaPlan& plan, Stream stream) {
    return with_bits(bits, [&]<int b>() { return launch_wgmma_quantized<Integer<b>>(p, plan, stream); });
}
template <class T>
const char* run_dequantize(const Dequantize& p, int bits, Stream stream) {
    return with_bits(bits, [&]<int b>() { return launch_dequantize<T, Integer<b>>(p, stream); });
}

}  // namespace ptq::integer_cuda
