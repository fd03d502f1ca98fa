// The products of csrc/fragments_cuda/wgmma_*.cuh, run thread by thread on the CPU, for tests/test_cuda_host_wgmma.py.
#include "guarded.h"
#include "integer_cuda/launch.cuh"
#include "minifloat_cuda/launch.cuh"

using namespace ptq::fragments;
using ptq::integer_cuda::run_wgmma_linear, ptq::integer_cuda::run_wgmma_quantized;
using ptq::minifloat_cuda::run_wgmma_linear, ptq::minifloat_cuda::run_wgmma_quantized;
using ptq::test::Buffer;

namespace {

// What both products are given, in guarded memory.
struct Problem {
    Buffer fragments, scale, zero, bias, x, token_scale, arranged, out, partial;
    Weights w;
    int tokens;
    Number out_kind, bias_kind;
    bool aligned;

    template <class X>
    const char* arrange() {
        const Arrange p{x.data(), static_cast<uint8_t*>(arranged.data()), tokens, w.k, aligned};
        return launch_arrange<X>(p, nullptr);
    }
    Linear linear(int splits) const {
        return {w,           arranged.data(), out.data(), static_cast<float*>(partial.data()),
                bias.data(), out_kind,        bias_kind,  static_cast<const float*>(token_scale.data()),
                tokens,      splits,          true};
    }
    Quantized quantized() const {
        return {w,
                static_cast<const int8_t*>(arranged.data()),
                static_cast<const float*>(token_scale.data()),
                out.data(),
                bias.data(),
                out_kind,
                bias_kind,
                tokens,
                true};
    }
};

template <class T>
const char* run(Problem& p, int bits, ptq::minifloat_cuda::Element e, const WgmmaPlan& plan) {
    if (!suits_wgmma<T>(p.w)) return "this does not suit wgmma";
    if (const char* error = p.arrange<T>()) return error;
    if constexpr (sizeof(T) == 1)
        return e.exponent ? run_wgmma_quantized(p.quantized(), e, plan, nullptr)
                          : run_wgmma_quantized(p.quantized(), bits, plan, nullptr);
    else
        return e.exponent ? run_wgmma_linear<T>(p.linear(plan.splits), e, plan, nullptr)
                          : run_wgmma_linear<T>(p.linear(plan.splits), bits, plan, nullptr);
}

}  // namespace

// x_type: 1 int8, 2 float16, 3 bfloat16; type: 0 float32, 2 float16, 3 bfloat16, of the result. exponent 0: integers of
// `bits`. Null, or what went wrong.
extern "C" const char* test_wgmma(int x_type, int backwards, int type, const void* x, const float* token_scale,
                                  const uint8_t* fragments, const uint16_t* scale, const uint8_t* zero,
                                  const float* bias, void* out, int tokens, int n, int k, int bits, int exponent,
                                  int mantissa, int groups, int tiles, int splits, int misalign) {
    machine.backwards = backwards;
    machine.most_shared = hopper_shared;
    const int64_t row_tiles = (n + 15) / 16, blocks = (k + 63) / 64, width = type == 0 ? 4 : 2;
    const int64_t x_width = x_type == 1 ? 1 : 2;
    Problem p{Buffer(fragments, row_tiles * blocks * block_bytes(bits)),
              Buffer(scale, row_tiles * groups * 32),
              Buffer(zero, zero ? row_tiles * groups * 16 : 0),
              Buffer(bias, bias ? 4 * n : 0),
              Buffer(x, tokens * k * x_width, misalign ? static_cast<int>(x_width) : 0),
              Buffer(token_scale, token_scale ? 4 * tokens : 0),
              Buffer(nullptr, x_type == 1 ? arranged_bytes<int8_t>(tokens, k) : arranged_bytes<Half>(tokens, k)),
              Buffer(nullptr, tokens * n * width),
              Buffer(nullptr, splits > 1 ? int64_t{splits} * tokens * n * 4 : 0),
              {},
              tokens,
              type == 0   ? Number::float32
              : type == 2 ? Number::float16
                          : Number::bfloat16,
              bias ? Number::float32 : Number::none,
              !misalign && k * x_width % 16 == 0};
    p.fragments.is_weight(), p.scale.is_weight(), p.zero.is_weight();
    p.w = {static_cast<const uint8_t*>(p.fragments.data()),
           static_cast<const uint16_t*>(p.scale.data()),
           zero ? static_cast<const uint8_t*>(p.zero.data()) : nullptr,
           n,
           k,
           groups,
           halves_of(k, groups)};
    const WgmmaPlan plan{tiles, splits};
    const ptq::minifloat_cuda::Element e{exponent, mantissa};
    const char* error = x_type == 1   ? run<int8_t>(p, bits, e, plan)
                        : x_type == 2 ? run<Half>(p, bits, e, plan)
                                      : run<Bfloat16>(p, bits, e, plan);
    p.out.give(out);
    const bool damaged = p.out.damaged() || p.x.damaged() || p.arranged.damaged() || p.partial.damaged();
    return error ? error : damaged ? "written outside a buffer" : nullptr;
}

extern "C" void test_wgmma_plan(int n, int k, int groups, int tokens, int processors, int most_splits, int* plan) {
    const WgmmaPlan found =
        wgmma_plan({nullptr, nullptr, nullptr, n, k, groups, 1}, tokens, processors, 2, most_splits);
    plan[0] = found.tiles, plan[1] = found.splits;
}
