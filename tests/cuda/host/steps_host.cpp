// The kernels of csrc/steps_cuda, and the Hadamard transform behind them, run thread by thread on the CPU, for
// tests/test_cuda_host_steps.py. type: 0 float32, 2 float16, 3 bfloat16. Null, or what went wrong.
#include "guarded.h"
#include "hadamard/transform_launch.cuh"
#include "steps_cuda/input_kernel.cuh"
#include "steps_cuda/rotary.cuh"

using namespace ptq::steps_cuda;
using ptq::hadamard::Dtype;
using ptq::test::Buffer;

namespace {

template <class Run>
const char* with_type(int type, Run run) {
    return type == 0   ? run.template operator()<float>()
           : type == 2 ? run.template operator()<Half>()
                       : run.template operator()<Bfloat16>();
}
const char* first_of(const char* error, std::initializer_list<const Buffer*> buffers) {
    for (const Buffer* b : buffers)
        if (!error && b->damaged()) error = "written in front of a buffer";
    return error;
}

}  // namespace

// The input of `tokens` tokens of `blocks` * `order` numbers, in one launch: the norm of x (+ added) where there is a
// gain, else silu(x) * up, which stands before no transform. order 0: no transform, of k = blocks numbers. flat: a gate
// without regard to tokens.
extern "C" const char* test_input(int backwards, int type, const void* x, const void* added, const void* gain,
                                  const void* up, const float* signs, void* sum, void* out, float* scale, int tokens,
                                  int blocks, int order, const float* norm, int round_first, const float* quantizer,
                                  int factors, const int64_t* factor_order, const uint8_t* const* codes,
                                  int64_t doublings, int processors, int misalign, int flat) {
    machine.backwards = backwards;
    machine.most_shared = hopper_shared;
    const int width = type == 0 ? 4 : 2, k = blocks * (order ? order : 1), off = misalign ? width : 0;
    const int64_t bytes = int64_t{tokens} * k * width;
    Buffer xs(x, bytes, off), as(added, added ? bytes : 0, off), us(up, up ? bytes : 0, off),
        gs(gain, gain ? k * width : 0, off);
    Buffer total(nullptr, added ? bytes : 0, off), ss(signs, signs ? 4 * k : 0),
        scales(nullptr, scale ? 4 * tokens : 0);
    Buffer y(nullptr, scale ? int64_t{tokens} * k : bytes, misalign ? (scale ? 1 : width) : 0);
    Input in{gain ? gs.data() : nullptr,
             added ? as.data() : nullptr,
             total.data(),
             up ? us.data() : nullptr,
             norm[0],
             norm[1],
             round_first != 0};
    const ptq::activations::Quantizer grid{quantizer[0], quantizer[1], quantizer[2]};
    float* token_scale = scale ? static_cast<float*>(scales.data()) : nullptr;
    const char* error = nullptr;
    if (flat) {
        const Gate p{xs.data(), us.data(), y.data(), int64_t{tokens} * k, !misalign};
        error = with_type(type, [&]<class T>() { return run_gate<T>(p, nullptr); });
    } else if (order == 0) {
        const Tokens p{in,  xs.data(), y.data(), token_scale, tokens, k, 0, false, false, !misalign && k % unit == 0,
                       grid};
        error = with_type(type, [&]<class T>() { return run_input<T>(p, nullptr); });
    } else {
        if (up) return "a gate is a kernel by itself";
        std::vector<Buffer> code_buffers;
        ptq::hadamard::Task t{};
        t.in = xs.data(), t.out = y.data(), t.input = in;
        t.dtype = t.out_dtype = static_cast<Dtype>(type);
        t.outer = tokens, t.blocks = blocks, t.order = order, t.inner = 1;
        t.signs = signs ? ss.data() : nullptr;
        for (int f = 0; f < factors; f++) {
            code_buffers.emplace_back(codes[f], factor_order[f] * factor_order[f] / 4);
            t.factor_order.push_back(static_cast<int>(factor_order[f]));
            t.codes.push_back(static_cast<const uint8_t*>(code_buffers.back().data()));
        }
        t.doublings = doublings, t.scale = 1 / std::sqrt(static_cast<double>(order));
        t.token_scale = token_scale, t.quantizer = grid, t.aligned = !misalign;
        ptq::hadamard::Transform p;
        if (!plan(t, {processors, hopper_shared, hopper_shared}, p)) return "the fast kernel does not take this";
        error = run_fast(p, t, nullptr);
    }
    y.give(out);
    if (added) total.give(sum);
    if (scale) scales.give(scale);
    return first_of(error, {&xs, &y, &total, &scales});
}

// q and k [batch, heads, tokens, d] where tokens lie `token_stride` numbers apart and heads d: as a model gives them.
extern "C" const char* test_rotary(int backwards, int type, const void* q, const void* k, const void* cos,
                                   const void* sin, void* q_out, void* k_out, int batch, int q_heads, int k_heads,
                                   int tokens, int d, int q_stride, int k_stride, int rows, int misalign) {
    machine.backwards = backwards;
    machine.most_shared = hopper_shared;
    const int width = type == 0 ? 4 : 2, off = misalign ? width : 0;
    const int64_t all = int64_t{batch} * tokens;
    Buffer qs(q, all * q_stride * width, off), ks(k, all * k_stride * width, off);
    Buffer cs(cos, int64_t{rows} * tokens * d * width, off), ss(sin, int64_t{rows} * tokens * d * width, off);
    Buffer qo(nullptr, all * q_heads * d * width, off), ko(nullptr, all * k_heads * d * width, off);
    const Rotary p{{{qs.data(), qo.data(), int64_t{tokens} * q_stride, d, q_stride, q_heads},
                    {ks.data(), ko.data(), int64_t{tokens} * k_stride, d, k_stride, k_heads}},
                   cs.data(),
                   ss.data(),
                   batch,
                   tokens,
                   d,
                   rows == 1 ? 0 : int64_t{tokens} * d,
                   !misalign && d % (2 * rotated_at_once) == 0 && (q_stride | k_stride) % rotated_at_once == 0};
    const char* error = with_type(type, [&]<class T>() { return run_rotary<T>(p, nullptr); });
    qo.give(q_out);
    ko.give(k_out);
    return first_of(error, {&qs, &ks, &qo, &ko});
}

// float32 numbers, transformed back and rounded to `type`.
extern "C" const char* test_transform_to(int backwards, int type, const float* x, const float* signs, void* out,
                                         int tokens, int order, int factors, const int64_t* factor_order,
                                         const uint8_t* const* codes, int64_t doublings) {
    machine.backwards = backwards;
    machine.most_shared = hopper_shared;
    Buffer xs(x, int64_t{tokens} * order * 4), y(nullptr, int64_t{tokens} * order * 2), ss(signs, 4 * order);
    std::vector<Buffer> code_buffers;
    ptq::hadamard::Task t{};
    t.in = xs.data(), t.out = y.data(), t.signs = ss.data(), t.transpose = true;
    t.dtype = Dtype::float32, t.out_dtype = static_cast<Dtype>(type);
    t.outer = tokens, t.blocks = 1, t.order = order, t.inner = 1;
    for (int f = 0; f < factors; f++) {
        code_buffers.emplace_back(codes[f], factor_order[f] * factor_order[f] / 4);
        t.factor_order.push_back(static_cast<int>(factor_order[f]));
        t.codes.push_back(static_cast<const uint8_t*>(code_buffers.back().data()));
    }
    t.doublings = doublings, t.scale = 1 / std::sqrt(static_cast<double>(order)), t.aligned = true;
    ptq::hadamard::Transform p;
    if (!plan(t, {2, hopper_shared, hopper_shared}, p)) return "the fast kernel does not take this";
    const char* error = run_fast(p, t, nullptr);
    y.give(out);
    return first_of(error, {&xs, &y});
}
