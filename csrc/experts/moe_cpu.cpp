// The choice of experts, and ptq::run_experts for the CPU. Schemas and references are in ptq/ops/expert_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "dense/dense_cpu.h"
#include "experts/moe.h"

namespace ptq::experts {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// An op of torch; its results lie where its arguments did.
template <size_t count>
void call(const char* op, const char* overload, std::array<StableIValue, count>& stack) {
    STD_TORCH_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION) == 0, op, " failed");
}

constexpr int64_t few_tokens = 16;  // as in ptq/ops/matmul.py: for more, torch's own product is the faster one

Tensor torch_linear(const Tensor& x, const Tensor& weight) {
    std::array<StableIValue, 3> stack{from(x), from(weight), from(std::optional<Tensor>())};
    call("aten::linear", "", stack);
    return to<Tensor>(stack[0]);
}

Tensor softmax(const Tensor& x) {
    std::array<StableIValue, 3> stack{from(x), from(int64_t{-1}), from(false)};
    call("aten::_softmax", "", stack);
    return to<Tensor>(stack[0]);
}

std::pair<Tensor, Tensor> topk(const Tensor& x, int64_t count) {
    std::array<StableIValue, 5> stack{from(x), from(count), from(int64_t{-1}), from(true), from(true)};
    call("aten::topk", "", stack);
    return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
}

// x / x.sum(-1), as torch adds up.
Tensor normalized(const Tensor& x) {
    const std::optional<std::vector<int64_t>> last(std::vector<int64_t>{-1});
    std::array<StableIValue, 4> sum{from(x), from(last), from(true), from(std::optional<ScalarType>())};
    call("aten::sum", "dim_IntList", sum);
    std::array<StableIValue, 2> quotient{from(x), sum[0]};
    call("aten::div", "Tensor", quotient);
    return to<Tensor>(quotient[0]);
}

Tensor run(const Tensor& handle, const Tensor& x) {
    const auto held = MoeHandles::find(handle);
    STD_TORCH_CHECK(held, "run_experts: expected what an op on experts gave, not a copy of it");
    return held->run(x);
}

}  // namespace

Tensors Choice::of(const Tensors& all) const {
    Tensors found;
    const size_t count = all.size() / 3;
    if (count)
        for (size_t role = 0; role < 3; role++)
            for (const int64_t expert : experts) found.push_back(all[role * count + expert]);
    for (const Tensor& each : found) STD_TORCH_CHECK(each.is_cpu(), "experts: a tensor is not on the CPU");
    return found;
}

Choice Router::choose(const Tensor& x) const {
    const Tensor logits = x.size(0) > few_tokens ? torch_linear(x, weight) : dense::linear(x, weight, std::nullopt);
    auto [values, index] = topk(softmax(as_float(logits)), chosen);
    if (normed) values = normalized(values);
    const ScalarType dtype = rounded ? x.scalar_type() : ScalarType::Float;
    const Tensor shares = as_float(from_float(compact(values), dtype)), places = compact(index);
    const auto* share = static_cast<const float*>(shares.const_data_ptr());
    const auto* number = static_cast<const int64_t*>(places.const_data_ptr());
    std::vector<std::tuple<int64_t, int64_t, int64_t>> rows;  // expert, token, place
    for (int64_t i = 0; i < x.size(0) * chosen; i++) rows.emplace_back(number[i], i / chosen, i);
    std::sort(rows.begin(), rows.end());
    Choice made;
    for (const auto& [expert, token, place] : rows) {
        if (made.experts.empty() || made.experts.back() != expert) {
            made.experts.push_back(expert);
            made.counts.push_back(0);
        }
        made.counts.back()++;
        made.tokens.push_back(token);
        made.shares.push_back(share[place]);
    }
    return made;
}

Tensor Moe::run(const Tensor& x) const {
    STD_TORCH_CHECK(x.dim() > 1 && x.numel() > 0, "experts: expected tokens [*, k]");
    const int64_t k = x.size(x.dim() - 1);
    const Tensor rows = reshaped(compact(x), Ints{x.numel() / k, k});
    return reshaped(compute(rows, router.choose(rows)), x.sizes());
}

}  // namespace ptq::experts

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("run_experts", TORCH_BOX(&ptq::experts::run));
}
