// The kernels of csrc/minifloat_cuda, run thread by thread on the CPU, for tests/test_cuda_host_minifloat.py.
#include "guarded.h"
#include "minifloat_cuda/launch.cuh"

using namespace ptq::minifloat_cuda;
using ptq::test::Buffer;

// mode: 0 x times W, 1 quantised tokens times W, 2 W itself. type: 0 float32, 2 float16, 3 bfloat16, of x and the
// result (of the result alone for quantised tokens). Null, or what went wrong.
extern "C" const char* test_minifloat(int mode, int backwards, int type, const void* x, const float* token_scale,
                                      const uint8_t* fragments, const uint16_t* scale, const float* bias, void* out,
                                      int tokens, int n, int k, int exponent, int mantissa, int groups, int splits,
                                      int misalign, int shared) {
    machine.backwards = backwards;
    machine.most_shared = shared;
    // One processor: a block of threads has many rows.
    const Device device{backwards ? 1 : 132, shared, hopper_shared};
    const Element e{exponent, mantissa};
    const int64_t tiles = (n + 15) / 16, blocks = (k + 63) / 64;
    const int width = type == 0 ? 4 : 2, x_width = mode == 1 ? 1 : 2;
    Buffer f(fragments, tiles * blocks * block_bytes(1 + exponent + mantissa)), s(scale, tiles * groups * 32);
    Buffer b(bias, bias ? 4 * n : 0), scales(token_scale, token_scale ? 4 * tokens : 0);
    Buffer xs(x, mode == 2 ? 0 : int64_t{tokens} * k * x_width, misalign ? x_width : 0);
    Buffer y(nullptr, (mode == 2 ? int64_t{n} * k : int64_t{tokens} * n) * width);
    Buffer partial(nullptr, splits > 1 ? int64_t{splits} * tokens * n * 4 : 0);
    f.is_weight(), s.is_weight();
    const Weights w{static_cast<const uint8_t*>(f.data()),
                    static_cast<const uint16_t*>(s.data()),
                    nullptr,
                    n,
                    k,
                    groups,
                    halves_of(k, groups)};
    const Number kind = bias ? Number::float32 : Number::none;
    const Number out_kind = type == 0 ? Number::float32 : type == 2 ? Number::float16 : Number::bfloat16;
    const float* of_tokens = token_scale ? static_cast<const float*>(scales.data()) : nullptr;
    const bool aligned = !misalign && k * x_width % 16 == 0;
    const char* error = nullptr;
    if (mode == 0) {
        const Linear p{w,        xs.data(), y.data(), static_cast<float*>(partial.data()),
                       b.data(), out_kind,  kind,     of_tokens,
                       tokens,   splits,    aligned};
        error = type == 2 ? run_linear<Half>(p, e, device, nullptr) : run_linear<Bfloat16>(p, e, device, nullptr);
    } else if (mode == 1) {
        const Quantized p{
            w, static_cast<const int8_t*>(xs.data()), of_tokens, y.data(), b.data(), out_kind, kind, tokens, aligned};
        error = run_quantized(p, e, device, nullptr);
    } else {
        const Dequantize p{w, y.data(), k * width % 16 == 0};
        error = type == 0   ? run_dequantize<float>(p, e, nullptr)
                : type == 2 ? run_dequantize<Half>(p, e, nullptr)
                            : run_dequantize<Bfloat16>(p, e, nullptr);
    }
    y.give(out);
    return error ? error : y.damaged() || xs.damaged() || f.damaged() ? "written in front of a buffer" : nullptr;
}

extern "C" int test_splits(int tokens, int n, int k, int exponent, int mantissa, int processors) {
    const Weights w{nullptr, nullptr, nullptr, n, k, 1, 1};
    return linear_splits(w, {exponent, mantissa}, tokens, {processors, hopper_shared, hopper_shared});
}
