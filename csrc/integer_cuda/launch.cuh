// Which of the compiled shapes to launch. No torch here.
#pragma once

#include "common/bits.h"
#include "fragments_cuda/launch.cuh"
#include "fragments_cuda/narrow.cuh"
#include "fragments_cuda/wgmma_launch.cuh"
#include "integer_cuda/code.cuh"

namespace ptq::integer_cuda {

using namespace ptq::fragments;

constexpr int most_tokens = 64;  // with which a weight is decoded as it is multiplied
constexpr int few_tokens = 32;   // up to these a product waits for its weight, however fast it multiplies

// Calls run.operator()<Shape>() with the shape for this many tokens: as measured on an H200. Up to 8, many warps share
// the columns of two row tiles, or of one where codes are wide; twice as many where there are fewer rows than the
// device has processors for. Four bits have all shapes, other widths fewer: that keeps the time to compile short. Wide
// ones leave no room for 64 tokens on the smallest devices.
template <class Code, int element, class Run>
auto with_few_shape(const Weights& w, int tokens, const Device& device, Run run) {
    if constexpr (Code::bits == 4) {
        using Tall = Shape<Code, 1, 2, 1, 16>;
        if (groups_of_rows<Tall>(w) <= device.processors && has_room<Tall, element>(tokens, device))
            return run.template operator()<Tall>();
    }
    if constexpr (Code::bits <= 4)
        return run.template operator()<Shape<Code, 1, 2, 1, 8>>();
    else
        return run.template operator()<Shape<Code, 1, 1, 1, 10>>();
}
template <class Code, class Run>
auto with_linear_shape(const Weights& w, int tokens, const Device& device, Run run) {
    constexpr int bits = Code::bits;
    if (tokens <= 8) return with_few_shape<Code, 2>(w, tokens, device, run);
    if constexpr (bits == 4) {
        using Some = Shape<Code, 2, 2, 2, Code::has_zeros ? 6 : 8>;  // as many warps as registers do for
        if (tokens <= 16 && has_room<Some, 2>(tokens, device)) return run.template operator()<Some>();
        if (tokens <= 32) return run.template operator()<Shape<Code, 4, 1, 4, 2>>();
    }
    constexpr int most = bits < 7 ? 8 : 4;
    return run.template operator()<Shape<Code, most, 1, 8, 1>>();
}
template <class Code, class Run>
auto with_quantized_shape(const Weights& w, int tokens, const Device& device, Run run) {
    if (tokens <= 8) return with_few_shape<Code, 1>(w, tokens, device, run);
    if constexpr (Code::bits == 4) {
        using Some = Shape<Code, 2, 2, 2, Code::has_zeros ? 6 : 8>;
        if (tokens <= 16 && has_room<Some, 1>(tokens, device)) return run.template operator()<Some>();
    }
    return run.template operator()<Shape<Code, 8, 1, 4, 1>>();
}
template <class Run>
auto with_code(int bits, Run run) {
    return with_bits<2, 3, 4, 5, 6, 7, 8>(bits, [&]<int b>() { return run.template operator()<Integer<b>>(); });
}
// Four bits without zeros are the ones that are used most: they have kernels of their own.
template <class Run>
auto with_code(int bits, const Weights& w, Run run) {
    return bits == 4 && !w.zero ? run.template operator()<Integer<4, false>>() : with_code(bits, run);
}

inline int linear_splits(const Weights& w, int bits, int tokens, const Device& device) {
    return with_code(bits, w, [&]<class Code>() {
        return with_linear_shape<Code>(w, tokens, device, [&]<class S>() { return splits_of<S>(w, tokens, device); });
    });
}
// p.splits is what `linear_splits` says, or any smaller number.
template <class T>
const char* run_linear(const Linear& p, int bits, const Device& device, Stream stream) {
    return with_code(bits, p.w, [&]<class Code>() {
        return with_linear_shape<Code>(p.w, p.tokens, device,
                                       [&]<class S>() { return launch_linear<T, S>(p, device, stream); });
    });
}
inline const char* run_quantized(const Quantized& p, int bits, const Device& device, Stream stream) {
    return with_code(bits, p.w, [&]<class Code>() {
        return with_quantized_shape<Code>(p.w, p.tokens, device,
                                          [&]<class S>() { return launch_quantized<S>(p, device, stream); });
    });
}
// Both of four bits, where `is_narrow`; `packed` has room for `packed_bytes`.
inline const char* run_narrow(const Quantized& p, void* packed, Stream stream) {
    return launch_narrow<Integer<4>>(p, static_cast<uint32_t*>(packed), stream);
}
// For tokens that were arranged, where `suits_wgmma`.
template <class T>
const char* run_wgmma_linear(const Linear& p, int bits, const WgmmaPlan& plan, Stream stream) {
    return with_code(bits, [&]<class Code>() { return launch_wgmma_linear<T, Code>(p, plan, stream); });
}
inline const char* run_wgmma_quantized(const Quantized& p, int bits, const WgmmaPlan& plan, Stream stream) {
    return with_code(bits, [&]<class Code>() { return launch_wgmma_quantized<Code>(p, plan, stream); });
}
template <class T>
const char* run_dequantize(const Dequantize& p, int bits, Stream stream) {
    return with_code(bits, [&]<class Code>() { return launch_dequantize<T, Code>(p, stream); });
}

}  // namespace ptq::integer_cuda
