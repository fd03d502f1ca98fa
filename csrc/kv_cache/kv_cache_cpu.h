// ptq::kv_decode_attention as a function, for ops that do several steps at once. ptq/ops/kv_step.py says what it
// computes.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

namespace ptq::kv_cache {

// Writes to codes and scales.
torch::stable::Tensor decode_attention(
    const torch::stable::Tensor& q, const torch::stable::Tensor& k, const torch::stable::Tensor& v,
    const torch::stable::Tensor& cos, const torch::stable::Tensor& sin, const torch::stable::Tensor& k_codes,
    const torch::stable::Tensor& k_scales, const torch::stable::Tensor& v_codes, const torch::stable::Tensor& v_scales,
    int64_t before, int64_t k_bits, int64_t v_bits, const std::vector<double>& clips,
    const std::vector<torch::stable::Tensor>& factors, int64_t order, double scaling,
    const std::optional<torch::stable::Tensor>& starts, const std::optional<torch::stable::Tensor>& sink_keys,
    const std::optional<torch::stable::Tensor>& sink_values, const std::optional<torch::stable::Tensor>& mask,
    const std::optional<torch::stable::Tensor>& key_center);

}  // namespace ptq::kv_cache
