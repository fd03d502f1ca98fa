// What ops that do several steps at once do to the input of a product.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "activations/activations_cpu.h"
#include "hadamard/hadamard_cpu.h"

namespace ptq {

using Tensors = std::vector<torch::stable::Tensor>;

struct Input {
    int64_t bits;  // of its integers; 0: it stays as it is
    double clip;
    const Tensors& factors;
    int64_t order;                                 // of the Hadamard transform before that; 0: none
    std::optional<torch::stable::Tensor> signs{};  // before the transform
};

// x as weights see it: numbers, or integers and the scales of their tokens.
struct Seen {
    torch::stable::Tensor x;
    std::optional<torch::stable::Tensor> scale;
};

inline Seen seen(const torch::stable::Tensor& x, const Input& input) {
    if (!input.bits)
        return {input.order ? hadamard::hadamard(x, input.signs, input.factors, input.order, -1, false) : x,
                std::nullopt};
    auto [q, scale] =
        input.order ? hadamard::hadamard_quantize(x, input.signs, input.factors, input.order, input.bits, input.clip)
                    : activations::quantize_tokens(x, input.bits, input.clip);
    return {q, scale};
}

}  // namespace ptq
