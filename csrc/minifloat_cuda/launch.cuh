// Which of the compiled shapes to launch. No torch here.
#pragma once

#include "fragments_cuda/wgmma_launch.cuh"
#include "minifloat_cuda/code.cuh"

namespace ptq::minifloat_cuda {

using namespace ptq::fragments;

// Tokens with which a weight is decoded as it is multiplied: for more it is cheaper to decode it once into memory, for
// torch's own product. Every 64 of them (32 at seven bits) decode it anew, beside the tensor cores, which then take
// longer.
constexpr int most_tokens = 256;

// Calls run.operator()<Shape>() with the shape for this many tokens: as measured on an H200. Six bits have all of them,
// other widths two: that keeps the time to compile short.
template <class Code, class Run>
auto with_linear_shape(int tokens, const Device& device, Run run) {
    if (tokens <= 8) return run.template operator()<Shape<Code, 1, 1, 1, 10>>();
    if constexpr (Code::bits == 6)
        if (tokens <= 16 && has_room<Shape<Code, 2, 2, 2, 6>, 2>(tokens, device))
            return run.template operator()<Shape<Code, 2, 2, 2, 6>>();
    constexpr int most = Code::bits < 7 ? 8 : 4;
    return run.template operator()<Shape<Code, most, 1, 8, 1>>();
}
template <class Code, class Run>
auto with_quantized_shape(int tokens, Run run) {
    if (tokens <= 8) return run.template operator()<Shape<Code, 1, 1, 1, Code::bits == 6 ? 10 : 8>>();
    if constexpr (Code::bits == 6)
        if (tokens <= 16) return run.template operator()<Shape<Code, 2, 2, 2, 6>>();
    return run.template operator()<Shape<Code, 8, 1, 4, 1>>();
}

struct Element {
    int exponent, mantissa;
};
template <class Run>
auto with_code(Element e, Run run) {
    switch (10 * e.exponent + e.mantissa) {
        case 21:
            return run.template operator()<Minifloat<2, 1>>();
        case 22:
            return run.template operator()<Minifloat<2, 2>>();
        case 31:
            return run.template operator()<Minifloat<3, 1>>();
        case 32:
            return run.template operator()<Minifloat<3, 2>>();
        case 42:
            return run.template operator()<Minifloat<4, 2>>();
        case 33:
            return run.template operator()<Minifloat<3, 3>>();
        default:
            return run.template operator()<Minifloat<2, 3>>();
    }
}
inline bool is_known(Element e) {
    return with_code(e, [&]<class Code>() { return Code::exponent == e.exponent && Code::mantissa == e.mantissa; });
}
inline bool has_bytes(Element e) {
    return with_code(e, [&]<class Code>() { return Code::has_bytes; });
}

inline int linear_splits(const Weights& w, Element e, int tokens, const Device& device) {
    return with_code(e, [&]<class Code>() {
        return with_linear_shape<Code>(tokens, device, [&]<class S>() { return splits_of<S>(w, tokens, device); });
    });
}
// p.splits is what `linear_splits` says, or any smaller number.
template <class T>
const char* run_linear(const Linear& p, Element e, const Device& device, Stream stream) {
    return with_code(e, [&]<class Code>() {
        return with_linear_shape<Code>(p.tokens, device,
                                       [&]<class S>() { return launch_linear<T, S>(p, device, stream); });
    });
}
// Where `has_bytes`.
inline const char* run_quantized(const Quantized& p, Element e, const Device& device, Stream stream) {
    return with_code(e, [&]<class Code>() -> const char* {
        if constexpr (Code::has_bytes)
            return with_quantized_shape<Code>(p.tokens,
                                              [&]<class S>() { return launch_quantized<S>(p, device, stream); });
        else
            return "this element has no bytes";
    });
}
// For tokens that were arranged, where `suits_wgmma`.
template <class T>
const char* run_wgmma_linear(const Linear& p, Element e, const WgmmaPlan& plan, Stream stream) {
    return with_code(e, [&]<class Code>() { return launch_wgmma_linear<T, Code>(p, plan, stream); });
}
inline const char* run_wgmma_quantized(const Quantized& p, Element e, const WgmmaPlan& plan, Stream stream) {
    return with_code(e, [&]<class Code>() -> const char* {
        if constexpr (Code::has_bytes)
            return launch_wgmma_quantized<Code>(p, plan, stream);
        else
            return "this element has no bytes";
    });
}
template <class T>
const char* run_dequantize(const Dequantize& p, Element e, Stream stream) {
    return with_code(e, [&]<class Code>() { return launch_dequantize<T, Code>(p, stream); });
}

}  // namespace ptq::minifloat_cuda
