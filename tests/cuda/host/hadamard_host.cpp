// The kernels of csrc/hadamard and csrc/activations, run thread by thread on the CPU, for tests/test_cuda_host.py.
#include "guarded.h"
#include "hadamard/transform_launch.cuh"

using namespace ptq::hadamard;
using ptq::test::Buffer;

// element: 0 float32, 1 float64, 2 float16, 3 bfloat16. codes[f]: the factor for H or H^T. Null, or what went wrong.
// mode: 0 the fast kernel (an error where it does not do it), 1 the general one, 2 quantise, 3 quantise the general way
extern "C" const char* test_hadamard(int mode, int backwards, const void* in, void* out, float* token_scale,
                                     int element, const int64_t* sizes, const void* signs, int transpose, int factors,
                                     const int64_t* factor_order, const uint8_t* const* codes, int64_t doublings,
                                     double scale, const float* quantizer, int processors, int misalign) {
    ptq::cuda::machine.backwards = backwards;
    ptq::cuda::machine.most_shared = ptq::cuda::hopper_shared;
    const Dtype e = static_cast<Dtype>(element);
    const int64_t outer = sizes[0], blocks = sizes[1], order = sizes[2], inner = sizes[3];
    const int64_t count = outer * blocks * order * inner;
    const int width = size_of(e), compute = e == Dtype::float64 ? 8 : 4;
    const bool quantised = mode >= 2;
    const int off = misalign ? width : 0;
    Buffer x(in, count * width, off),
        y(nullptr, count * (quantised ? 1 : width), misalign ? (quantised ? 1 : width) : 0);
    Buffer s(signs, signs ? blocks * order * compute : 0), scales(nullptr, outer * 4);
    std::vector<Buffer> code_buffers;
    Task t{};
    t.in = x.data();
    t.out = y.data();
    t.dtype = t.out_dtype = e;
    t.outer = outer, t.blocks = blocks, t.order = order, t.inner = inner;
    t.signs = signs ? s.data() : nullptr;
    t.transpose = transpose;
    for (int f = 0; f < factors; f++) {
        code_buffers.emplace_back(codes[f], factor_order[f] * factor_order[f] / 4);
        t.factor_order.push_back(static_cast<int>(factor_order[f]));
        t.codes.push_back(static_cast<const uint8_t*>(code_buffers.back().data()));
    }
    t.doublings = doublings;
    t.scale = scale;
    t.aligned = !misalign;
    t.token_scale = quantised ? static_cast<float*>(scales.data()) : nullptr;
    if (quantised) t.quantizer = {quantizer[0], quantizer[1], quantizer[2]};
    const char* error = nullptr;
    if (mode == 0 || mode == 2) {
        Transform p;
        if (!plan(t, {processors, hopper_shared, hopper_shared}, p)) return "the fast kernel does not take this";
        error = run_fast(p, t, nullptr);
    } else {
        Buffer first(nullptr, general_bytes(t)), second(nullptr, general_bytes(t)), number(nullptr, general_bytes(t));
        error = run_general(t, first.data(), second.data(), nullptr, quantised ? number.data() : nullptr);
        if (!error && quantised)
            error = ptq::activations::quantize({number.data(), static_cast<int8_t*>(y.data()), t.token_scale, outer,
                                                static_cast<int>(blocks * order), 0, t.aligned, t.quantizer},
                                               4, false, nullptr);
    }
    y.give(out);
    if (quantised) scales.give(token_scale);
    return error ? error : y.damaged() || x.damaged() ? "written in front of a buffer" : nullptr;
}

// ptq::quantize_tokens
extern "C" const char* test_quantize(int backwards, const void* in, int8_t* q, float* scale, int element,
                                     int64_t tokens, int k, const float* quantizer, int misalign) {
    ptq::cuda::machine.backwards = backwards;
    ptq::cuda::machine.most_shared = ptq::cuda::hopper_shared;
    const Dtype e = static_cast<Dtype>(element);
    Buffer x(in, tokens * k * size_of(e), misalign ? size_of(e) : 0), y(nullptr, tokens * k, misalign ? 1 : 0);
    Buffer s(nullptr, tokens * 4);
    const char* error = ptq::activations::quantize({x.data(),
                                                    static_cast<int8_t*>(y.data()),
                                                    static_cast<float*>(s.data()),
                                                    tokens,
                                                    k,
                                                    0,
                                                    !misalign,
                                                    {quantizer[0], quantizer[1], quantizer[2]}},
                                                   size_of(e), e == Dtype::float16, nullptr);
    y.give(q);
    s.give(scale);
    return error ? error : y.damaged() ? "written in front of a buffer" : nullptr;
}
