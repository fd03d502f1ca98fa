// ptq::conv_step, gated_delta_rule and gated_rms_norm for the CPU. Schemas, fake kernels and references are in
// ptq/ops/mixer_ops.py.
#include "mixers/mixers_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/parallel.h"
#include "common/subnormal.h"
#include "common/tensors.h"
#include "mixers/inputs.h"
#include "mixers/kernels.h"

namespace ptq::mixers {
using torch::headeronly::ScalarType;

// x [b, channels, 1]
Tensor conv_step(const Tensor& x, const Tensor& state, const Tensor& weight, const std::optional<Tensor>& bias,
                 bool silu) {
    constexpr auto op = "conv_step";
    const Number type = checked(op, x);
    STD_TORCH_CHECK(x.dim() == 3 && x.size(2) == 1 && state.dim() == 3 && weight.dim() == 2,
                    "conv_step: expected x [b, c, 1], state [b, c, room] and weight [c, width]");
    const int64_t b = x.size(0), c = x.size(1), room = state.size(2), width = weight.size(1);
    check_tensor(op, "state", state, x.scalar_type(), {b, c, room});
    check_tensor(op, "weight", weight, x.scalar_type(), {c, width});
    if (bias) check_tensor(op, "bias", *bias, x.scalar_type(), {c});
    STD_TORCH_CHECK(state.is_contiguous() && room > 0 && width > 0 && width <= room + 1, "conv_step: a state of ", room,
                    " tokens, which must be contiguous, for a width of ", width);
    const Tensor in = compact(x), w = compact(weight), out = fresh(x.sizes(), x.scalar_type());
    std::optional<Tensor> added;
    if (bias) added = compact(*bias);
    const Conv p{type,
                 in.const_data_ptr(),
                 w.const_data_ptr(),
                 added ? added->const_data_ptr() : nullptr,
                 state.mutable_data_ptr(),
                 out.mutable_data_ptr(),
                 c,
                 room,
                 width,
                 silu};
    run<FlushedSubnormals>(kernels().conv, p, b * ((c + 15) / 16), 32 * room);
    return out;
}

// q and k [b, t, shared heads, dk], v [b, t, heads, dv]
Tensor gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                        const Tensor& state, bool norm) {
    constexpr auto op = "gated_delta_rule";
    const Number type = checked(op, q);
    STD_TORCH_CHECK(q.dim() == 4 && v.dim() == 4 && q.size(2) > 0 && v.size(2) % q.size(2) == 0,
                    "gated_delta_rule: expected q and k [b, t, shared heads, dk], v [b, t, heads, dv]");
    const int64_t b = v.size(0), tokens = v.size(1), shared = q.size(2), heads = v.size(2), dk = q.size(3),
                  dv = v.size(3);
    for (const Tensor* x : {&q, &k}) check_tensor(op, "q or k", *x, q.scalar_type(), {b, tokens, shared, dk});
    check_tensor(op, "v", v, q.scalar_type(), {b, tokens, heads, dv});
    for (const Tensor* x : {&g, &beta}) check_tensor(op, "g or beta", *x, ScalarType::Float, {b, tokens, heads});
    check_tensor(op, "state", state, ScalarType::Float, {b, heads, dk, dv});
    STD_TORCH_CHECK(state.is_contiguous(), "gated_delta_rule: the state must be contiguous");
    const Tensor held[] = {compact(q), compact(k), compact(v), compact(g), compact(beta)};
    const Tensor out = fresh(v.sizes(), q.scalar_type());
    const Delta p{type,
                  held[0].const_data_ptr(),
                  held[1].const_data_ptr(),
                  held[2].const_data_ptr(),
                  static_cast<const float*>(held[3].const_data_ptr()),
                  static_cast<const float*>(held[4].const_data_ptr()),
                  static_cast<float*>(state.mutable_data_ptr()),
                  out.mutable_data_ptr(),
                  tokens,
                  heads,
                  heads / shared,
                  dk,
                  dv,
                  norm};
    run<FlushedSubnormals>(kernels().delta, p, b * heads, 2 * tokens * dk * dv);
    return out;
}

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& gain, double eps, int64_t groups,
                      bool before) {
    constexpr auto op = "gated_rms_norm";
    const Number type = checked(op, x), other = checked(op, gate);
    const std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    STD_TORCH_CHECK(x.dim() > 0 && groups > 0 && sizes.back() % groups == 0,
                    "gated_rms_norm: expected x [*, k] whose k is a multiple of groups");
    STD_TORCH_CHECK(type == other || type == Number::float32, "gated_rms_norm: gate is wider than x");
    check_tensor(op, "gate", gate, gate.scalar_type(), sizes);
    check_tensor(op, "gain", gain, gate.scalar_type(), {sizes.back()});
    const Tensor in = compact(x), g = compact(gain), out = fresh(sizes, x.scalar_type());
    const StridedRows by = rows_of(gate, 1);
    const int64_t k = sizes.back();
    const GatedNorm p{
        type, other,  in.const_data_ptr(),     by.data(), g.const_data_ptr(), out.mutable_data_ptr(), by.apart,
        k,    groups, static_cast<float>(eps), before};
    run<FlushedSubnormals>(kernels().norm, p, k ? x.numel() / k : 0, 4 * k);
    return out;
}

}  // namespace ptq::mixers

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("conv_step", TORCH_BOX(&ptq::mixers::conv_step));
    m.impl("gated_delta_rule", TORCH_BOX(&ptq::mixers::gated_delta_rule));
    m.impl("gated_rms_norm", TORCH_BOX(&ptq::mixers::gated_rms_norm));
}
