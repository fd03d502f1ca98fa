// The kernels of csrc/integer_cuda, run thread by thread on the CPU, for tests/test_cuda_host.py.
#include "guarded.h"
#include "integer_cuda/launch.cuh"

using namespace ptq::integer_cuda;
using ptq::test::Buffer;

// mode: 0 x times W, 1 quantised tokens times W, 2 W itself, 3 tokens of four bits times W. type: 0 float32, 2 float16,
// 3 bfloat16, of x and the result (of the result alone for quantised tokens). Null, or what went wrong.
extern "C" const char* test_integer(int mode, int backwards, int type, const void* x, const float* q_scale,
                                    const uint8_t* fragments, const uint16_t* scale, const uint8_t* zero,
                                    const float* bias, void* out, int tokens, int n, int k, int bits, int groups,
                                    int splits, int misalign) {
    machine.backwards = backwards;
    const int64_t tiles = (n + 15) / 16, blocks = (k + 63) / 64;
    const int width = type == 0 ? 4 : 2, x_width = mode % 2 ? 1 : width;
    Buffer f(fragments, tiles * blocks * block_bytes(bits)), s(scale, tiles * groups * 32);
    Buffer z(zero, zero ? tiles * groups * 16 : 0), b(bias, bias ? 4 * n : 0);
    Buffer xs(x, mode == 2 ? 0 : int64_t{tokens} * k * x_width, misalign ? x_width : 0);
    Buffer scales(q_scale, mode % 2 ? 4 * tokens : 0), packed(nullptr, mode == 3 ? packed_bytes(tokens, k) : 0);
    Buffer y(nullptr, (mode == 2 ? int64_t{n} * k : int64_t{tokens} * n) * width);
    Buffer partial(nullptr, splits > 1 ? int64_t{splits} * tokens * n * 4 : 0);
    f.is_weight(), s.is_weight(), z.is_weight();
    const Weights w{static_cast<const uint8_t*>(f.data()),
                    static_cast<const uint16_t*>(s.data()),
                    zero ? static_cast<const uint8_t*>(z.data()) : nullptr,
                    n,
                    k,
                    groups,
                    halves_of(k, groups)};
    const Number kind = bias ? Number::float32 : Number::none;
    const Number out_kind = type == 0 ? Number::float32 : type == 2 ? Number::float16 : Number::bfloat16;
    const float* of_tokens = static_cast<const float*>(scales.data());
    const bool aligned = !misalign && k * x_width % 16 == 0;
    // One processor: a block of threads has many rows, and little room for tokens.
    const Device device = backwards ? Device{1, least_shared, least_shared} : Device{132, hopper_shared, hopper_shared};
    machine.most_shared = device.shared_per_block;
    const char* error = nullptr;
    if (mode == 0) {
        const Linear p{w,        xs.data(), y.data(), static_cast<float*>(partial.data()),
                       b.data(), out_kind,  kind,     nullptr,
                       tokens,   splits,    aligned};
        error = type == 2 ? run_linear<Half>(p, bits, device, nullptr) : run_linear<Bfloat16>(p, bits, device, nullptr);
    } else if (mode % 2) {
        const Quantized p{
            w, static_cast<const int8_t*>(xs.data()), of_tokens, y.data(), b.data(), out_kind, kind, tokens, aligned};
        error = mode == 1      ? run_quantized(p, bits, device, nullptr)
                : is_narrow(w) ? run_narrow(p, packed.data(), nullptr)
                               : "this is not narrow";
    } else {
        const Dequantize p{w, y.data(), k * width % 16 == 0};
        error = type == 0   ? run_dequantize<float>(p, bits, nullptr)
                : type == 2 ? run_dequantize<Half>(p, bits, nullptr)
                            : run_dequantize<Bfloat16>(p, bits, nullptr);
    }
    machine.most_shared = least_shared;
    y.give(out);
    return error ? error : y.damaged() || xs.damaged() || f.damaged() ? "written in front of a buffer" : nullptr;
}

extern "C" int test_splits(int tokens, int n, int k, int bits, int processors) {
    const Weights w{nullptr, nullptr, nullptr, n, k, 1, 1};
    return linear_splits(w, bits, tokens, {processors, hopper_shared, hopper_shared});
}

// Whether a weight of any size could be launched.
extern "C" const char* test_integer_size(int n, int k, int bits) {
    machine.idle = true;
    const Dequantize p{{nullptr, nullptr, nullptr, n, k, 1, halves_of(k, 1)}, nullptr, false};
    const char* error = run_dequantize<Half>(p, bits, nullptr);
    machine.idle = false;
    return error;
}
