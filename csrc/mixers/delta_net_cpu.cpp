// ptq::delta_net_step for the CPU. Schema, fake kernel and reference are in ptq/ops/mixer_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>

#include "common/tensors.h"
#include "dense/dense_cpu.h"
#include "mixers/mixers_cpu.h"

namespace ptq::mixers {
namespace {

using torch::headeronly::ScalarType;
using Sizes = std::vector<int64_t>;

// 1 / (1 + exp(-x)), rounded to x's dtype, as float32.
Tensor sigmoid(const Tensor& x) {
    const Tensor in = as_float(x), out = fresh(in.sizes(), ScalarType::Float);
    const auto* from = static_cast<const float*>(in.const_data_ptr());
    auto* to = static_cast<float*>(out.mutable_data_ptr());
    const int64_t count = in.numel();
    for (int64_t i = 0; i < count; i++) to[i] = 1.0f / (1.0f + std::exp(-from[i]));
    return as_float(from_float(out, x.scalar_type()));
}

// The logarithm of the decay, [b, 1, heads]: -exp(a_log) * softplus(a + dt_bias).
Tensor decay_of(const Tensor& a, const DeltaNet& net) {
    const Tensor in = as_float(a), rates = as_float(net.a_log), bias = as_float(net.dt_bias);
    const Tensor out = fresh(in.sizes(), ScalarType::Float);
    const auto* from = static_cast<const float*>(in.const_data_ptr());
    const auto* rate = static_cast<const float*>(rates.const_data_ptr());
    const auto* added = static_cast<const float*>(bias.const_data_ptr());
    auto* to = static_cast<float*>(out.mutable_data_ptr());
    const int64_t count = in.numel(), heads = rates.numel();
    for (int64_t i = 0; i < count; i++) {
        const float x = from[i] + added[i % heads];
        to[i] = -std::exp(rate[i % heads]) * (x > 20 ? x : std::log1p(std::exp(x)));
    }
    return out;
}

Tensor step(const Tensor& x, const Tensor& qkv, const Tensor& z, const Tensor& conv_state, const Tensor& state,
            const Tensor& conv, const std::optional<Tensor>& conv_bias, const Tensor& a, const Tensor& b,
            const Tensor& a_log, const Tensor& dt_bias, const Tensor& gain, double eps) {
    return delta_net_step(x, qkv, z, conv_state, state, {conv, conv_bias, a, b, a_log, dt_bias, gain, eps});
}

}  // namespace

Tensor delta_net_step(const Tensor& x, const Tensor& qkv, const Tensor& z, const Tensor& conv_state,
                      const Tensor& state, const DeltaNet& net) {
    STD_TORCH_CHECK(x.dim() == 3 && x.size(1) == 1 && qkv.dim() == 3 && state.dim() == 4,
                    "delta_net_step: expected x and qkv [b, 1, *] and a state [b, heads, dk, dv]");
    const int64_t rows = x.size(0), heads = state.size(1), dk = state.size(2), dv = state.size(3);
    const int64_t channels = qkv.size(2), both = channels - heads * dv, shared = dk > 0 ? both / (2 * dk) : 0;
    STD_TORCH_CHECK(shared > 0 && both == 2 * shared * dk && heads > 0, "delta_net_step: ", channels,
                    " channels are not queries, keys and values for this state");
    check_tensor("delta_net_step", "qkv", qkv, x.scalar_type(), {rows, 1, channels});
    check_tensor("delta_net_step", "z", z, x.scalar_type(), {rows, 1, heads * dv});
    for (const Tensor* each : {&net.a_log, &net.dt_bias}) {
        const bool single = each->scalar_type() == ScalarType::Float;
        STD_TORCH_CHECK(
            each->dim() == 1 && each->size(0) == heads && (single || each->scalar_type() == ScalarType::BFloat16),
            "delta_net_step: expected a number for each of ", heads, " heads, float32 or bfloat16");
    }
    const Tensor a = dense::few_tokens_linear(x, net.a), b = dense::few_tokens_linear(x, net.b);
    STD_TORCH_CHECK(a.size(2) == heads && b.size(2) == heads, "delta_net_step: a and b must have ", heads, " rows");

    STD_TORCH_CHECK(net.conv.dim() == 3 && net.conv.size(1) == 1,
                    "delta_net_step: expected conv [channels, 1, kernel]");
    check_tensor("delta_net_step", "state", state, ScalarType::Float, {rows, heads, dk, dv});  // before any is moved
    check_tensor("delta_net_step", "gain", net.gain, x.scalar_type(), {dv});
    STD_TORCH_CHECK(state.is_contiguous(), "delta_net_step: state must be contiguous");
    const Tensor kernel = reshaped(compact(net.conv), Sizes{net.conv.size(0), net.conv.size(2)});
    const Tensor seen = reshaped(compact(qkv), Sizes{rows, channels, 1});
    const Tensor mixed = conv_step(seen, conv_state, kernel, net.conv_bias, true);
    const auto part = [&](int64_t from, int64_t count, int64_t d) {
        return seen_as(mixed, {rows, 1, count, d}, {channels, channels, d, 1}, from);
    };
    const Tensor y = gated_delta_rule(part(0, shared, dk), part(shared * dk, shared, dk), part(both, heads, dv),
                                      decay_of(a, net), sigmoid(b), state, true);
    const Tensor gate = reshaped(compact(z), y.sizes());
    return reshaped(gated_rms_norm(y, gate, net.gain, net.eps), z.sizes());
}

}  // namespace ptq::mixers

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("delta_net_step", TORCH_BOX(&ptq::mixers::step));
}
