// The steps of mixers as functions, for ops that do several at once. ptq/ops/mixer_ops.py says what they compute.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace ptq::mixers {

using torch::stable::Tensor;

// Each moves its state on.
Tensor conv_step(const Tensor& x, const Tensor& state, const Tensor& weight, const std::optional<Tensor>& bias,
                 bool silu);
Tensor gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                        const Tensor& state, bool norm);
Tensor mamba2_scan(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c,
                   const std::optional<Tensor>& skip, const std::optional<Tensor>& dt_bias, const Tensor& state,
                   double low, double high);
Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& gain, double eps, int64_t groups = 1,
                      bool before = false);

// What a gated delta net has besides quantised weights.
struct DeltaNet {
    Tensor conv;
    std::optional<Tensor> conv_bias;
    Tensor a, b, a_log, dt_bias, gain;
    double eps;
};

// What stands between the products of one token of each row, x [b, 1, k], and the output product.
Tensor delta_net_step(const Tensor& x, const Tensor& qkv, const Tensor& z, const Tensor& conv_state,
                      const Tensor& state, const DeltaNet& net);

// What a state space has besides quantised weights.
struct StateSpace {
    Tensor conv;
    std::optional<Tensor> conv_bias;
    Tensor a_log, skip, dt_bias, gain;
    double eps;
    int64_t norm_groups;
};

// What stands between the two products of one token of each row, [b, 1, *].
Tensor mamba2_step(const Tensor& product, const Tensor& conv_state, const Tensor& state, const StateSpace& space);

}  // namespace ptq::mixers
