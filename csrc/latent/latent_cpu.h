// ptq::latent_attention as a function, for ops that do several steps at once. ptq/ops/latent_ops.py says what it
// computes.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace ptq::latent {

// How the rotary embedding pairs numbers; the values are those of `RopeLayout` in ptq/ops/latent_ops.py.
enum class RopeLayout : int64_t { halves, pairs, complex, none };

// The parts of the matrix that makes keys and values of latent vectors.
struct Expansion {
    torch::stable::Tensor keys, values;  // [heads, latent, dk], [heads, dv, latent]
    RopeLayout rope_layout;
};

// Raises an error for matrices that do not fit each other, or queries and latent vectors of so many rows.
void check(const Expansion& expansion, int64_t query_rows, int64_t latent_rows);

// Writes to `latents` and `rope_keys`.
torch::stable::Tensor attention(const torch::stable::Tensor& q, const torch::stable::Tensor& latent,
                                const torch::stable::Tensor& rotary, const torch::stable::Tensor& cos,
                                const torch::stable::Tensor& sin, const torch::stable::Tensor& latents,
                                const torch::stable::Tensor& rope_keys, int64_t before, const Expansion& expansion,
                                double scaling, const std::optional<torch::stable::Tensor>& mask);

}  // namespace ptq::latent
