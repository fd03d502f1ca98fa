// The kernels of csrc/e8p_cuda, run thread by thread on the CPU, for tests/test_cuda_host_e8p.py.
#include "e8p_cuda/launch.cuh"
#include "guarded.h"

using namespace ptq::e8p_cuda;
using ptq::test::Buffer;

namespace {

Number number_of(int type) {
    return type == 0 ? Number::float32 : type == 2 ? Number::float16 : Number::bfloat16;
}

}  // namespace

// mode: 0 x times W, 1 quantised tokens times W, 2 W itself, 3 its integer points, 4 what is done to the sums of
// points, which are x. type: 0 float32, 2 float16, 3 bfloat16, of x and the result (of the result alone for quantised
// tokens). `shared`: of a block of the device. Null, or what went wrong.
extern "C" const char* test_e8p(int mode, int backwards, int type, const void* x, const float* q_scale,
                                const uint8_t* fragments, const float* scale, const float* bias, void* out, int tokens,
                                int n, int k, int bits, int processors, int shared, int misalign) {
    machine.backwards = backwards;
    machine.most_shared = shared;
    const int64_t tiles = (n + 15) / 16, blocks = (k + block_columns - 1) / block_columns;
    const int width = mode == 3 ? 1 : type == 0 ? 4 : 2, x_width = mode == 1 ? 1 : mode == 4 ? 4 : width;
    const bool weight_alone = mode == 2 || mode == 3;
    const int64_t numbers = weight_alone ? 0 : mode == 4 ? int64_t{tokens} * n : int64_t{tokens} * k;
    Buffer f(fragments, tiles * blocks * block_bytes(bits)), s(scale, 4), b(bias, bias ? 4 * n : 0);
    Buffer xs(x, numbers * x_width, misalign ? x_width : 0);
    Buffer scales(q_scale, q_scale ? 4 * tokens : 0);
    Buffer y(nullptr, (weight_alone ? int64_t{n} * k : int64_t{tokens} * n) * width);
    f.is_weight(), s.is_weight();
    const Weights w{static_cast<const uint8_t*>(f.data()), static_cast<const float*>(s.data()), n, k};
    const Number kind = bias ? Number::float32 : Number::none;
    const Device device{processors, shared, hopper_shared};
    const char* error = nullptr;
    if (mode < 2) {
        const bool aligned = !misalign && k * x_width % 16 == 0;
        const Linear p{w,
                       xs.data(),
                       static_cast<const float*>(scales.data()),
                       y.data(),
                       number_of(type),
                       b.data(),
                       kind,
                       tokens,
                       0,
                       0,
                       0,
                       0,
                       aligned};
        error = mode == 1   ? run_linear<int8_t>(p, bits, device, nullptr)
                : type == 2 ? run_linear<Half>(p, bits, device, nullptr)
                            : run_linear<Bfloat16>(p, bits, device, nullptr);
    } else if (weight_alone) {
        const Dequantize p{w, y.data(), k * width % (mode == 3 ? 8 : 16) == 0};
        error = mode == 3   ? run_dequantize<int8_t>(p, bits, nullptr)
                : type == 0 ? run_dequantize<float>(p, bits, nullptr)
                : type == 2 ? run_dequantize<Half>(p, bits, nullptr)
                            : run_dequantize<Bfloat16>(p, bits, nullptr);
    } else {
        const Scaled p{static_cast<const int32_t*>(xs.data()),
                       w.scale,
                       static_cast<const float*>(scales.data()),
                       y.data(),
                       number_of(type),
                       b.data(),
                       kind,
                       int64_t{tokens} * n,
                       n};
        error = run_scale(p, nullptr);
    }
    y.give(out);
    return error ? error : y.damaged() || xs.damaged() || f.damaged() ? "written in front of a buffer" : nullptr;
}

// How many copies of the tables (log2) and rows of tokens at once are planned for 8-bit (0) or 16-bit (1) tokens.
extern "C" int test_plan(int halves, int tokens, int n, int k, int bits, int processors, int shared, int* grid) {
    Linear p{};
    p.w.n = n, p.w.k = k, p.tokens = tokens;
    const Device device{processors, shared, shared + 1024};
    const int bytes = ptq::with_bits<2, 3, 4>(bits, [&]<int b>() {
        return halves ? with_shape<Half, b>(tokens, [&]<class S>() { return plan<Half, S>(p, device); })
                      : with_shape<int8_t, b>(tokens, [&]<class S>() { return plan<int8_t, S>(p, device); });
    });
    grid[0] = p.grid, grid[1] = p.rows, grid[2] = p.log_copies;
    return bytes;
}

// Whether a weight of any size could be launched.
extern "C" const char* test_e8p_size(int n, int k, int bits) {
    machine.idle = true;
    const Dequantize p{{nullptr, nullptr, n, k}, nullptr, false};
    const char* error = run_dequantize<Half>(p, bits, nullptr);
    machine.idle = false;
    return error;
}
