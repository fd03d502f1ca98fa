// What the chosen experts of a block make of few tokens, for weights of any format. See ptq/ops/expert_ops.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "common/tensors.h"
#include "hadamard/input.h"
#include "steps/steps_cpu.h"

namespace ptq::experts {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Int64s = std::vector<int64_t>;
using Shares = std::vector<double>;

// A token for every row, the rows of one expert together; the share of each row.
struct ExpertRows {
    const Int64s &tokens, &counts;
    const Shares& shares;
};

inline int64_t width_of(ScalarType type) {
    return type == ScalarType::Char ? 1 : type == ScalarType::BFloat16 ? 2 : 4;
}

// Rows of x [t, ...], one after another.
inline Tensor gathered(const Tensor& x, const Int64s& rows) {
    Int64s sizes(x.sizes().begin(), x.sizes().end());
    const int64_t bytes = sizes[0] ? x.numel() / sizes[0] * width_of(x.scalar_type()) : 0;
    sizes[0] = static_cast<int64_t>(rows.size());
    const Tensor in = compact(x), out = fresh(sizes, x.scalar_type());
    const auto* from = static_cast<const char*>(in.const_data_ptr());
    auto* to = static_cast<char*>(out.mutable_data_ptr());
    for (size_t i = 0; i < rows.size(); i++) std::memcpy(to + i * bytes, from + rows[i] * bytes, bytes);
    return out;
}

// Some rows of an input, times one of several weights: the same rows of `out` [rows, n].
struct Product {
    size_t weight;
    int64_t from, rows;
    const Tensor& out;
    void* to() const {
        return static_cast<char*>(out.mutable_data_ptr()) + from * out.size(1) * width_of(out.scalar_type());
    }
};

// Whether some of the products have few rows (`is_many` of their format).
template <class Problem>
bool any_few(const std::vector<Problem>& problems) {
    return std::any_of(problems.begin(), problems.end(), [](const Problem& p) { return !is_many(p); });
}

struct Brain {
    uint16_t bits;
    static Brain of(float x) { return {to_bfloat16(x)}; }
    operator float() const { return from_bfloat16(bits); }
};
struct Single {
    float x;
    static Single of(float x) { return {x}; }
    operator float() const { return x; }
};

// y *= by, rounded.
template <class Element>
void scale(const Tensor& y, float by) {
    auto* at = static_cast<Element*>(y.mutable_data_ptr());
    const int64_t count = y.numel();
    for (int64_t i = 0; i < count; i++) at[i] = Element::of(at[i] * by);
}

// total[tokens[i]] += share[i] * y[i], row after row: product and sum are rounded each.
template <class Element>
void add_rows(const Tensor& y, const Shares& shares, const Int64s& tokens, const Tensor& total) {
    const int64_t k = y.size(1);
    const auto* from = static_cast<const Element*>(y.const_data_ptr());
    auto* to = static_cast<Element*>(total.mutable_data_ptr());
    std::fill(to, to + total.numel(), Element::of(0));
    for (size_t i = 0; i < tokens.size(); i++) {
        const auto share = static_cast<float>(shares[i]);
        for (int64_t j = 0; j < k; j++) {
            Element& sum = to[tokens[i] * k + j];
            sum = Element::of(sum + Element::of(from[i * k + j] * share));
        }
    }
}

// What comes between the products.
struct Inside {
    const Tensors& biases;  // of all weights: empty, or one for each
    const Shares& clamped;  // alpha and limit of ptq::clamped_swiglu; empty: silu(gate) * up

    std::optional<Tensor> bias(size_t weight) const {
        return biases.empty() ? std::nullopt : std::optional(biases[weight]);
    }
    Tensor gated(const Tensor& gate, const Tensor& up) const {
        return clamped.empty() ? steps::silu_mul(gate, up) : steps::clamped_swiglu(gate, up, clamped[0], clamped[1]);
    }
};

inline void check(const Tensor& x, const ExpertRows& r, size_t weights, const Inside& inside) {
    const auto& [tokens, counts, shares] = r;
    const bool floats = x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16;
    STD_TORCH_CHECK(x.dim() == 2 && floats, "experts: expected x [t, k], float32 or bfloat16");
    auto left = static_cast<int64_t>(tokens.size());
    bool fits = left > 0 && shares.size() == tokens.size() && weights == 3 * counts.size();
    for (const int64_t count : counts) {  // no sum of them, which may overflow
        fits = fits && count > 0 && count <= left;
        left -= fits ? count : 0;
    }
    STD_TORCH_CHECK(fits && left == 0, "experts: tokens, counts, shares and weights do not fit together");
    STD_TORCH_CHECK(inside.biases.empty() || inside.biases.size() == weights, "experts: expected ", weights, " biases");
    STD_TORCH_CHECK(inside.clamped.empty() || inside.clamped.size() == 2, "experts: expected alpha and limit");
    for (const int64_t token : tokens)
        STD_TORCH_CHECK(token >= 0 && token < x.size(0), "experts: there is no token ", token);
}

// The part of a list that belongs to weights [first, last); nothing of an empty one.
inline Tensors some(const Tensors& all, size_t first, size_t last) {
    return all.empty() ? all : Tensors(all.begin() + first, all.begin() + last);
}

// The weighted sum of y [rows, k] for every token of x.
inline Tensor weighed(const Tensor& y, const ExpertRows& rows, const Tensor& x) {
    const Tensor total = fresh(x.sizes(), x.scalar_type());
    const auto sum = x.scalar_type() == ScalarType::Float ? add_rows<Single> : add_rows<Brain>;
    sum(y, rows.shares, rows.tokens, total);
    return total;
}

// `gate_up`: the weights of all gates, then of all ups; `last`: those of all downs. Each has
// multiply(const Seen&, const std::vector<Product>&), and adds its own bias.
template <class Weights>
Tensor compute(const Tensor& x, const ExpertRows& rows, int64_t width, const Weights& gate_up, const Weights& last,
               const Input& plain, const Inside& inside, const Input& down) {
    const auto count = static_cast<int64_t>(rows.tokens.size());
    const ScalarType dtype = x.scalar_type();
    Seen in = seen(x, plain);
    in.x = gathered(in.x, rows.tokens);
    if (in.scale) in.scale = gathered(*in.scale, rows.tokens);

    const Tensor gate = fresh(Int64s{count, width}, dtype), up = fresh(Int64s{count, width}, dtype);
    std::vector<Product> products;
    const auto add = [&](size_t first, const Tensor& out) {
        int64_t from = 0;
        for (const int64_t size : rows.counts) {
            products.push_back({first++, from, size, out});
            from += size;
        }
    };
    add(0, gate);
    add(rows.counts.size(), up);
    gate_up.multiply(in, products);

    const Tensor y = fresh(Int64s{count, x.size(1)}, dtype);
    products.clear();
    add(0, y);
    last.multiply(seen(inside.gated(gate, up), down), products);
    return weighed(y, rows, x);
}

}  // namespace ptq::experts
