// The choice of experts, by torch's own functions where their last bits are their own. See ptq/ops/moe_ops.py.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

#include "common/bfloat16.h"
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

Tensor softmax(const Tensor& x) {
    std::array<StableIValue, 3> stack{from(x), from(int64_t{-1}), from(false)};
    call("aten::_softmax", "", stack);
    return to<Tensor>(stack[0]);
}

Tensor sigmoid(const Tensor& x) {
    std::array<StableIValue, 1> stack{from(x)};
    call("aten::sigmoid", "", stack);
    return to<Tensor>(stack[0]);
}

// The places of the largest numbers of each row.
Tensor top(const Tensor& x, int64_t count, bool sorted) {
    std::array<StableIValue, 5> stack{from(x), from(count), from(int64_t{-1}), from(true), from(sorted)};
    call("aten::topk", "", stack);
    static_cast<void>(to<Tensor>(stack[0]));
    return to<Tensor>(stack[1]);
}

Tensor gathered_from(const Tensor& x, const Tensor& index) {
    std::array<StableIValue, 4> stack{from(x), from(int64_t{1}), from(index), from(false)};
    call("aten::gather", "", stack);
    return to<Tensor>(stack[0]);
}

// x.sum(-1), as torch adds up.
Tensor sums(const Tensor& x) {
    const std::optional<std::vector<int64_t>> last(std::vector<int64_t>{-1});
    std::array<StableIValue, 4> stack{from(x), from(last), from(true), from(std::optional<ScalarType>())};
    call("aten::sum", "dim_IntList", stack);
    return to<Tensor>(stack[0]);
}

float rounded_to(float x, ScalarType type) {
    return type == ScalarType::BFloat16 ? from_bfloat16(to_bfloat16(x)) : x;
}

// f(row, column, number) for every number of x [t, n], rounded to x's dtype.
template <class F>
Tensor each(const Tensor& x, const F& f) {
    const Tensor in = as_float(x), out = fresh(in.sizes(), ScalarType::Float);
    const auto* numbers = static_cast<const float*>(in.const_data_ptr());
    auto* results = static_cast<float*>(out.mutable_data_ptr());
    const int64_t count = in.numel(), columns = in.size(1);
    for (int64_t i = 0; i < count; i++) results[i] = f(i / columns, i % columns, numbers[i]);
    return from_float(out, x.scalar_type());
}

const float* floats(const Tensor& x) {
    return static_cast<const float*>(x.const_data_ptr());
}

// x / max(x.sum(-1) + more, least)
Tensor normalized(const Tensor& x, float more, float least) {
    const Tensor total = as_float(sums(x));
    return each(x, [&](int64_t row, int64_t, float share) {
        return share / rounded_to(std::max(floats(total)[row] + more, least), x.scalar_type());
    });
}

// Rows by the experts that compute them.
Choice sorted_rows(std::vector<std::tuple<int64_t, int64_t, float>> rows) {
    std::sort(rows.begin(), rows.end());  // by expert, then by token; none chooses an expert twice
    Choice made;
    for (const auto& [expert, token, share] : rows) {
        if (made.experts.empty() || made.experts.back() != expert) {
            made.experts.push_back(expert);
            made.counts.push_back(0);
        }
        made.counts.back()++;
        made.tokens.push_back(token);
        made.shares.push_back(share);
    }
    return made;
}

}  // namespace

Tensors Choice::of(const Tensors& all) const {
    Tensors found;
    const size_t count = all.size() / 3;
    if (count)
        for (size_t role = 0; role < 3; role++)
            for (const int64_t expert : experts) found.push_back(all[role * count + expert]);
    for (const Tensor& x : found) STD_TORCH_CHECK(x.is_cpu(), "experts: a tensor is not on the CPU");
    return found;
}

Tensor Router::activated(const Tensor& x) const {
    return sigmoid ? experts::sigmoid(x) : softmax(x);
}

// -inf outside of the groups whose two largest numbers have the largest sums.
Tensor Router::within_groups(const Tensor& wanted) const {
    const int64_t t = wanted.size(0), n = wanted.size(1), size = n / groups;
    const Tensor numbers = as_float(wanted), best = fresh(Int64s{t, groups}, ScalarType::Float);
    for (int64_t group = 0; group < t * groups; group++) {
        const float* in = floats(numbers) + group * size;
        float first = std::max(in[0], in[1]), second = std::min(in[0], in[1]);
        for (int64_t i = 2; i < size; i++) {
            second = std::max(second, std::min(first, in[i]));
            first = std::max(first, in[i]);
        }
        static_cast<float*>(best.mutable_data_ptr())[group] = first + second;
    }
    const Tensor kept = compact(top(from_float(best, wanted.scalar_type()), kept_groups, false));
    const auto* first = static_cast<const int64_t*>(kept.const_data_ptr());
    return each(wanted, [&](int64_t row, int64_t column, float x) {
        const auto* own = first + row * kept_groups;
        const bool inside = std::find(own, own + kept_groups, column / size) != own + kept_groups;
        return inside ? x : -std::numeric_limits<float>::infinity();
    });
}

std::vector<float> Router::shared_shares(const Tensor& x) const {
    std::vector<float> shares(x.size(0), 1.0f);
    if (shared_gate) {
        const Tensor gate = as_float(experts::sigmoid(dense::few_tokens_linear(x, *shared_gate)));
        std::copy_n(floats(gate), shares.size(), shares.begin());
    }
    return shares;
}

Choice Router::first_of_others(const Tensor& x) const {
    std::vector<std::tuple<int64_t, int64_t, float>> rows;
    for (const float share : shared_shares(x)) rows.emplace_back(0, static_cast<int64_t>(rows.size()), share);
    return sorted_rows(std::move(rows));
}

std::pair<Choice, Tensor> Router::choose(const Tensor& x, bool shared) const {
    std::optional<Tensor> added = bias;
    if (bias && wide) added = as_float(*bias);
    const Tensor logits = dense::few_tokens_linear(wide ? as_float(x) : x, weight, added);
    Tensor scores = single ? as_float(logits) : logits;
    if (!late) scores = activated(scores);
    Tensor wanted = scores;
    if (correction) {
        const Tensor more = as_float(*correction);
        const bool brief = scores.scalar_type() == correction->scalar_type();  // as torch has it
        wanted = each(brief ? scores : as_float(scores),
                      [&](int64_t, int64_t i, float score) { return score + floats(more)[i]; });
    }
    if (groups > 1) wanted = within_groups(wanted);
    const Tensor index = compact(top(wanted, chosen, sorted));
    Tensor values = gathered_from(scores, index);
    if (late) values = activated(values);
    if (normed) values = normalized(values, static_cast<float>(*normed), static_cast<float>(least));
    if (scale != 1)
        values = each(values, [&](int64_t, int64_t, float share) { return share * static_cast<float>(scale); });
    if (rounded) values = from_float(as_float(values), x.scalar_type());
    const Tensor shares = as_float(values);

    const auto* numbers = static_cast<const int64_t*>(index.const_data_ptr());
    std::vector<std::tuple<int64_t, int64_t, float>> rows;
    for (int64_t i = 0; i < x.size(0) * chosen; i++) rows.emplace_back(numbers[i], i / chosen, floats(shares)[i]);
    if (shared) {
        const std::vector<float> own = shared_shares(x);
        for (size_t i = 0; i < own.size(); i++) rows.emplace_back(weight.size(0), static_cast<int64_t>(i), own[i]);
    }
    return {sorted_rows(std::move(rows)), values};
}

}  // namespace ptq::experts
