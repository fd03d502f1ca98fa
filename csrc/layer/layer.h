// All that a decoder layer does to a decoded token, for weights of any format. See ptq/ops/layer_ops.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "common/input.h"
#include "common/tensors.h"
#include "experts/experts.h"
#include "kv_cache/kv_cache_cpu.h"
#include "steps/steps_cpu.h"

namespace ptq::layer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Floats = std::vector<double>;
using Ints = std::vector<int64_t>;

enum Norm { before_attention, before_mlp, of_queries, of_keys, after_attention, after_mlp, norm_count };
enum Site { to_qkv, to_o, to_gate_up, to_down, site_count };
enum Role { q, k, v, o, gate, up, down, role_count };
constexpr size_t first_role[] = {q, o, gate, down, role_count};  // of each site
// Of attention alone:
constexpr size_t attention_sites = to_gate_up, attention_roles = gate;

// Which weights multiply each input: one for each role of the site, or one for all, whose rows are theirs in turn.
class Sites {
  public:
    // The rows of the weights, and of the roles.
    Sites(const Ints& n, const Ints& rows) : rows_(rows) {
        STD_TORCH_CHECK(rows.size() == role_count || rows.size() == attention_roles, "layer: expected rows of ",
                        int{role_count}, " roles, or of ", attention_roles);
        for (size_t site = 0; first_role[site] < rows.size(); site++) {
            const auto from = rows.begin() + first_role[site], to = rows.begin() + first_role[site + 1];
            const size_t at = starts_.back(), left = n.size() - at, roles = to - from;
            const bool inside = left && std::all_of(from, to, [&](int64_t r) { return 0 <= r && r <= n[at]; });
            const bool fused = inside && n[at] == std::accumulate(from, to, int64_t{0});
            STD_TORCH_CHECK(fused || (left >= roles && std::equal(from, to, n.begin() + at)),
                            "layer: the weights of input ", site, " do not have the rows of what they are for");
            starts_.push_back(at + (fused ? 1 : roles));
        }
        STD_TORCH_CHECK(starts_.back() == n.size(), "layer: expected ", starts_.back(), " weights");
    }
    size_t size() const { return starts_.size() - 1; }
    size_t first(size_t site) const { return starts_[site]; }
    size_t last(size_t site) const { return starts_[site + 1]; }
    // [b, 1, rows] of each role
    Tensors by_role(Tensors products, size_t site) const {
        const size_t from = first_role[site], count = first_role[site + 1] - from;
        if (products.size() == count) return products;
        const Tensor whole = products.front();
        const int64_t b = whole.size(0), n = whole.size(2);
        int64_t at = 0;
        products.clear();
        for (size_t role = from; role < from + count; at += rows_[role++])
            products.push_back(seen_as(whole, Ints{b, 1, rows_[role]}, Ints{n, n, 1}, at));
        return products;
    }

  private:
    const Ints& rows_;
    std::vector<size_t> starts_{0};
};

// A gain of no elements is no norm.
struct Norms {
    const Tensors& gains;
    const Floats &eps, &offset;
    const Ints& round_first;

    Tensor operator()(const Tensor& x, Norm which) const {
        if (!gains[which].numel()) return x;
        return steps::rms_norm(x, gains[which], eps[which], offset[which], round_first[which]);
    }
    // Of each head, or of all of them as one vector.
    Tensor of_heads(const Tensor& x, Norm which) const {
        const int64_t d = gains[which].numel();
        if (!d || d == x.size(2)) return (*this)(x, which);
        STD_TORCH_CHECK(x.size(2) % d == 0, "layer: a norm of ", d, " for heads of ", x.size(2));
        return reshaped((*this)(reshaped(compact(x), Ints{x.size(0), 1, x.size(2) / d, d}), which), x.sizes());
    }
    void check() const {
        STD_TORCH_CHECK(gains.size() == norm_count && eps.size() == norm_count && offset.size() == norm_count &&
                            round_first.size() == norm_count,
                        "layer: expected ", int{norm_count}, " norms");
    }
};

// Hadamard transforms of inputs or of products. An order of 0 is none; `signs` are empty, or one vector for each.
class Transforms {
  public:
    Transforms(const Tensors& signs, const Tensors& factors, const Ints& counts, const Ints& orders)
        : signs_(signs), orders_(orders) {
        STD_TORCH_CHECK(counts.size() == size() && (signs.empty() || signs.size() == size()), "layer: expected ",
                        size(), " transforms");
        auto next = factors.begin();
        for (const int64_t count : counts) {
            STD_TORCH_CHECK(count >= 0 && count <= factors.end() - next, "layer: too few factors of transforms");
            factors_.emplace_back(next, next + count);
            next += count;
        }
    }
    size_t size() const { return orders_.size(); }
    std::optional<Tensor> signs(size_t place) const {
        return signs_.empty() ? std::nullopt : std::optional(signs_[place]);
    }
    const Tensors& factors(size_t place) const { return factors_[place]; }
    int64_t order(size_t place) const { return orders_[place]; }

  private:
    const Tensors& signs_;
    const Ints& orders_;
    std::vector<Tensors> factors_;
};

// Keys and values: two tensors where they are plain, four where they are packed, seven with sinks.
struct Cache {
    const Tensors& parts;
    int64_t before;
    const Ints& bits;
    double clip;
    const Tensors& factors;
    int64_t order;

    Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                  double scaling) const {
        if (parts.size() == 2) return steps::decode_attention(q, k, v, cos, sin, parts[0], parts[1], before, scaling);
        return kv_cache::decode_attention(q, k, v, cos, sin, parts[0], parts[1], parts[2], parts[3], before, bits[0],
                                          bits[1], clip, factors, order, scaling, sink(0), sink(1), sink(2));
    }
    std::optional<Tensor> sink(size_t part) const {
        return parts.size() == 7 ? std::optional(parts[4 + part]) : std::nullopt;
    }
    void check() const {
        const size_t count = parts.size();
        STD_TORCH_CHECK((count == 2 || count == 4 || count == 7) && bits.size() == 2,
                        "layer: expected 2, 4 or 7 tensors of the cache");
    }
};

// x + multiplier * y, the product rounded, too.
inline Tensor sum(const Tensor& x, const Tensor& y, double multiplier) {
    if (multiplier != 1) {
        const bool single = y.scalar_type() == ScalarType::Float;
        (single ? experts::scale<experts::Single> : experts::scale<experts::Brain>)(y, static_cast<float>(multiplier));
    }
    return steps::sum(x, y);
}

// The products of a layer. `Weights` has the numbers of outputs `n`, and multiplies several weights with one input,
// where `biases` are empty or one for each (of no elements: none):
//     Tensors operator()(const Seen&, size_t first, size_t last, const Tensors& biases, ScalarType) const;
template <class Weights>
struct Linears {
    const Weights& weights;
    const Sites& sites;
    const Tensors& biases;  // empty, or one for each
    const Ints& bits;       // of the integers of each input
    const Floats& clips;
    const Transforms &inputs, &outputs;

    bool has_mlp() const { return sites.size() == site_count; }

    void check() const {
        const size_t count = weights.n.size();
        STD_TORCH_CHECK(inputs.size() == sites.size() && bits.size() == sites.size() && clips.size() == sites.size(),
                        "layer: expected ", sites.size(), " inputs");
        STD_TORCH_CHECK(outputs.size() == count, "layer: expected ", count, " weights");
        STD_TORCH_CHECK(biases.empty() || biases.size() == count, "layer: expected ", count, " biases");
    }

    // Of each role.
    Tensors operator()(const Tensor& x, Site site) const {
        const size_t first = sites.first(site), last = sites.last(site);
        const Seen in =
            seen(x, {bits[site], clips[site], inputs.factors(site), inputs.order(site), inputs.signs(site)});
        const ScalarType dtype = x.scalar_type();
        if (!outputs.order(first)) {
            const Tensors some = biases.empty() ? biases : Tensors(biases.begin() + first, biases.begin() + last);
            return sites.by_role(weights(in, first, last, some, dtype), site);
        }
        Tensors products = weights(in, first, last, {}, in.scale ? ScalarType::Float : dtype);
        for (size_t i = first; i < last; i++) {
            Tensor y = hadamard::hadamard(as_float(products[i - first]), outputs.signs(i), outputs.factors(i),
                                          outputs.order(i), -1, true);
            if (!biases.empty() && biases[i].numel()) y = added(y, biases[i]);
            products[i - first] = from_float(y, dtype);
        }
        return sites.by_role(std::move(products), site);
    }

    // y [b, 1, n] + bias [n]
    static Tensor added(const Tensor& y, const Tensor& bias) {
        STD_TORCH_CHECK(bias.numel() == y.size(2), "layer: bias must have ", y.size(2), " elements");
        const Tensor addend = as_float(bias);
        const auto* from = static_cast<const float*>(addend.const_data_ptr());
        auto* to = static_cast<float*>(y.mutable_data_ptr());
        for (int64_t row = 0; row < y.size(0); row++)
            for (int64_t i = 0; i < y.size(2); i++) *to++ += from[i];
        return y;
    }
};

// Products with weights of a format that has `Weights`, as its op on experts uses them. hold(i, k, bias) gives one.
template <class Weights, class Hold>
Tensors multiplied(const Seen& in, size_t first, size_t last, const Tensors& biases, const Ints& n, ScalarType dtype,
                   const Hold& hold) {
    const int64_t rows = in.x.size(0), k = in.x.size(2);
    Weights weights;
    Tensors results;
    for (size_t i = first; i < last; i++) {
        const bool plain = biases.empty() || !biases[i - first].numel();
        weights.held.push_back(hold(i, k, plain ? std::nullopt : std::optional(biases[i - first])));
        results.push_back(fresh(Ints{rows, n[i]}, dtype));
    }
    std::vector<experts::Product> products;
    for (size_t i = 0; i < results.size(); i++) products.push_back({i, 0, rows, results[i]});
    weights.multiply({reshaped(compact(in.x), Ints{rows, k}), in.scale}, products);
    for (Tensor& y : results) y = reshaped(y, Ints{rows, 1, y.size(1)});
    return results;
}

template <class Weights>
Tensor compute(const Tensor& x, const Norms& norm, const Linears<Weights>& linears, const Tensor& cos,
               const Tensor& sin, const Cache& cache, double scaling, double multiplier, bool gelu) {
    norm.check(), linears.check(), cache.check();
    STD_TORCH_CHECK(x.dim() == 3 && x.size(1) == 1, "layer: expected x [b, 1, k]");
    const Tensors qkv = linears(norm(x, before_attention), to_qkv);
    const Tensor attended =
        cache.attend(norm.of_heads(qkv[q], of_queries), norm.of_heads(qkv[k], of_keys), qkv[v], cos, sin, scaling);
    const Tensor y = sum(x, norm(linears(attended, to_o).front(), after_attention), multiplier);
    if (!linears.has_mlp()) return y;
    const Tensors gated = linears(norm(y, before_mlp), to_gate_up);
    const Tensor inner = (gelu ? steps::gelu_mul : steps::silu_mul)(gated[0], gated[1]);
    const Tensor last = linears(inner, to_down).front();
    return sum(y, norm(last, after_mlp), multiplier);
}

// The op of a format; `Held` is made of its weights' own arguments.
template <class Held, class... Arguments>
Tensor op(const Tensor& x, const Tensors& gains, const Floats& eps, const Floats& offset, const Ints& round_first,
          const Tensors& biases, const Ints& input_bits, const Floats& clips, const Tensors& su, const Tensors& factors,
          const Ints& counts, const Ints& orders, const Tensors& sv, const Tensors& back_factors,
          const Ints& back_counts, const Ints& back_orders, const Tensor& cos, const Tensor& sin, const Tensors& parts,
          int64_t before, const Ints& cache_bits, double cache_clip, const Tensors& cache_factors, int64_t cache_order,
          double scaling, double multiplier, bool gelu, const Ints& rows, Arguments... weights) {
    const Transforms inputs(su, factors, counts, orders), outputs(sv, back_factors, back_counts, back_orders);
    const Held held{weights...};
    const Sites sites(held.n, rows);
    return compute(x, {gains, eps, offset, round_first},
                   Linears<Held>{held, sites, biases, input_bits, clips, inputs, outputs}, cos, sin,
                   {parts, before, cache_bits, cache_clip, cache_factors, cache_order}, scaling, multiplier, gelu);
}

}  // namespace ptq::layer
