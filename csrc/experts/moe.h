// A router and all experts of a block, held from token to token. See ptq/ops/moe_ops.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "common/handles.h"
#include "experts/experts.h"

namespace ptq::experts {

// The experts that some tokens have chosen, those of low numbers first, and the rows that each computes.
struct Choice {
    Int64s experts, tokens, counts;
    Shares shares;

    // Of all gates, all ups and all downs, those of these experts; nothing of an empty list.
    Tensors of(const Tensors& all) const;
};

// All experts of a block.
struct AllExperts {
    using Compute = std::function<Tensor(const Tensor&, const Choice&)>;

    int64_t count;
    Compute compute;  // of tokens [t, k]
};

using ExpertHandles = Handles<AllExperts>;

// A tensor that stands for experts of so many weights.
inline Tensor hold(size_t weights, AllExperts::Compute compute) {
    STD_TORCH_CHECK(weights && weights % 3 == 0, "experts: expected three weights for each of them");
    const auto count = static_cast<int64_t>(weights / 3);
    return ExpertHandles::keep(std::make_unique<AllExperts>(AllExperts{count, std::move(compute)}));
}

// How tokens choose; the fields are the arguments of ptq::moe.
struct Router {
    Tensor weight;                                        // [experts, k]
    std::optional<Tensor> bias, correction, shared_gate;  // [experts], [experts], [1, k]
    int64_t chosen;
    bool wide, single, sigmoid, late;
    int64_t groups, kept_groups;
    bool sorted;
    std::optional<double> normed;
    double least, scale;
    bool rounded;

    // Of x [t, k]; and the shares [t, chosen], as torch would give them. `shared`: an expert behind those of the router
    // is chosen by every token, too.
    std::pair<Choice, Tensor> choose(const Tensor& x, bool shared) const;
    // By every token the first expert of others.
    Choice first_of_others(const Tensor& x) const;

  private:
    std::vector<float> shared_shares(const Tensor& x) const;
    Tensor activated(const Tensor& x) const;
    Tensor within_groups(const Tensor& wanted) const;
};

struct Moe {
    std::shared_ptr<const AllExperts> experts, other;  // `other`: one through which every token goes; or null
    Router router;

    std::pair<Tensor, Tensor> run(const Tensor& x) const;  // [*, k]; what they make of it, and the shares
    bool has_shared() const { return experts->count > router.weight.size(0); }
};

using MoeHandles = Handles<Moe>;

}  // namespace ptq::experts
