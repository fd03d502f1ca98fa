// ptq::moe and ptq::run_moe for the CPU. Schemas and references are in ptq/ops/moe_ops.py.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "experts/moe.h"

namespace ptq::experts {
namespace {

std::shared_ptr<const AllExperts> experts_of(const Tensor& handle) {
    const auto found = ExpertHandles::find(handle);
    STD_TORCH_CHECK(found, "moe: expected what an op on all experts gave, not a copy of it");
    return found;
}

Tensor hold_moe(const Tensors& handles, const Tensor& weight, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& correction, const std::optional<Tensor>& shared_gate, int64_t chosen,
                bool wide, bool single, bool sigmoid, bool late, int64_t groups, int64_t kept_groups, bool sorted,
                std::optional<double> normed, double least, double scale, bool rounded) {
    STD_TORCH_CHECK(handles.size() == 1 || handles.size() == 2, "moe: expected experts, and maybe another one");
    const auto experts = experts_of(handles.front()), other = handles.size() == 2 ? experts_of(handles[1]) : nullptr;
    const int64_t count = weight.dim() == 2 ? weight.size(0) : 0;
    STD_TORCH_CHECK(count && (experts->count == count || experts->count == count + 1),
                    "moe: expected a row of the router for each of ", experts->count, " experts, or for all but one");
    STD_TORCH_CHECK(!other || (other->count == 1 && experts->count == count), "moe: expected one other expert");
    STD_TORCH_CHECK(!shared_gate || ((other || experts->count > count) && shared_gate->dim() == 2 &&
                                     shared_gate->size(0) == 1 && shared_gate->size(1) == weight.size(1)),
                    "moe: expected a gate [1, k] of an expert that every token chooses");
    for (const auto* each : {&bias, &correction})
        STD_TORCH_CHECK(!*each || (*each)->numel() == count, "moe: expected a number for each of ", count, " experts");
    const bool fits = groups > 0 && count % groups == 0 && (groups == 1 || count / groups > 1) && kept_groups > 0 &&
                      kept_groups <= groups;
    STD_TORCH_CHECK(fits, "moe: ", kept_groups, " of ", groups, " groups of ", count, " experts");
    STD_TORCH_CHECK(chosen > 0 && chosen <= kept_groups * (count / groups), "moe: ", chosen, " of ", count,
                    " experts cannot be chosen");
    return MoeHandles::keep(
        std::make_unique<Moe>(Moe{experts, other,
                                  Router{weight, bias, correction, shared_gate, chosen, wide, single, sigmoid, late,
                                         groups, kept_groups, sorted, normed, least, scale, rounded}}));
}

std::tuple<Tensor, Tensor> run(const Tensor& handle, const Tensor& x) {
    const auto held = MoeHandles::find(handle);
    STD_TORCH_CHECK(held, "run_moe: expected what ptq::moe gave, not a copy of it");
    return held->run(x);
}

}  // namespace

std::pair<Tensor, Tensor> Moe::run(const Tensor& x) const {
    STD_TORCH_CHECK(x.dim() > 1 && x.numel() > 0, "run_moe: expected tokens [*, k]");
    const int64_t k = x.size(x.dim() - 1);
    const Tensor rows = reshaped(compact(x), Int64s{x.numel() / k, k});
    const auto [choice, shares] = router.choose(rows, has_shared());
    Tensor y = experts->compute(rows, choice);
    if (other) y = steps::sum(y, other->compute(rows, router.first_of_others(rows)));
    return {reshaped(y, x.sizes()), shares};
}

}  // namespace ptq::experts

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("moe", TORCH_BOX(&ptq::experts::hold_moe));
    m.impl("run_moe", TORCH_BOX(&ptq::experts::run));
}
