// A router and all experts of a block, held from token to token. See ptq/ops/expert_ops.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "common/handles.h"
#include "experts/experts.h"

namespace ptq::experts {

// The experts that some tokens have chosen, those of low numbers first, and the rows that each computes.
struct Choice {
    Ints experts, tokens, counts;
    Shares shares;

    // Of all gates, all ups and all downs, those of these experts; nothing of an empty list.
    Tensors of(const Tensors& all) const;
};

// softmax(x Wᵀ) in float32; the `chosen` largest count. `normed`: they are divided by their sum; `rounded`: then
// to x's dtype.
struct Router {
    Tensor weight;  // [experts, k]
    int64_t chosen;
    bool normed, rounded;

    Choice choose(const Tensor& x) const;  // [t, k]
};

struct Moe {
    using Compute = std::function<Tensor(const Tensor&, const Choice&)>;

    Router router;
    Compute compute;

    Tensor run(const Tensor& x) const;  // [*, k]
};

using MoeHandles = Handles<Moe>;

// A tensor that stands for a router and so many weights.
inline Tensor hold(Router router, size_t weights, Moe::Compute compute) {
    const int64_t count = router.weight.dim() == 2 ? router.weight.size(0) : 0;
    STD_TORCH_CHECK(static_cast<int64_t>(weights) == 3 * count,
                    "experts: expected three weights for each row of the router");
    STD_TORCH_CHECK(router.chosen > 0 && router.chosen <= count, "experts: ", router.chosen, " of ", count,
                    " cannot be chosen");
    return MoeHandles::keep(std::make_unique<Moe>(Moe{std::move(router), std::move(compute)}));
}

}  // namespace ptq::experts
