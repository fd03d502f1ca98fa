// What a decoder layer has besides its weights.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>

#include "common/tensors.h"
#include "latent/latent_cpu.h"
#include "layer/cache.h"
#include "mixers/mixers_cpu.h"
#include "steps/steps_cpu.h"

namespace ptq::layer {

enum Norm { before_attention, before_mlp, of_queries, of_keys, after_attention, after_mlp, norm_count };
// The inputs of weights; `inside` is there for queries of low rank alone.
enum Site { to_mixer, inside, to_o, to_gate_up, to_down, site_count };
// With which role each site starts. Attention: q, k, v; o; gate, up; down. A delta net: what goes through the
// convolution, and the gate of its norm; o; gate, up; down. A state space: all that it has of the input; o; gate, up;
// down. Latent attention: queries and latent vectors, or what makes queries of low rank, and latent vectors, with those
// queries inside; o; gate, up; down.
using Roles = std::array<size_t, site_count + 1>;
constexpr Roles of_attention{0, 3, 3, 4, 6, 7}, of_two{0, 2, 2, 3, 5, 6}, of_low_rank{0, 2, 3, 4, 6, 7},
    of_one{0, 1, 1, 2, 4, 5};

// Columns [from, from + count) of x [b, t, n], in its memory.
inline Tensor columns(const Tensor& x, int64_t from, int64_t count) {
    const int64_t b = x.size(0), t = x.size(1), n = x.size(2);
    STD_TORCH_CHECK(from >= 0 && count >= 0 && from + count <= n, "layer: ", n, " columns do not have those from ",
                    from, " on, ", count, " of them");
    return seen_as(x, Int64s{b, t, count}, Int64s{t * n, n, 1}, from);
}

// What a layer has besides its weights, as its op takes it. What follows refers to it.
struct Constants {
    Tensors gains;
    Floats eps, offset;
    Int64s round_first;
    Tensors biases;
    Int64s input_bits;
    Floats clips;
    Tensors su, factors;
    Int64s counts, orders;
    Tensors sv, back_factors;
    Int64s back_counts, back_orders;
    bool gelu;
    Int64s rows;
    Tensors moe;        // empty, or one that stands for experts
    int64_t gated;      // 0, or the size of the heads of queries, each of which has a gate behind it
    Tensors recurrent;  // empty, or what a delta net or a state space has besides these weights
    double recurrent_eps;
    int64_t norm_groups;  // of a state space
    Tensors latent;       // empty, or the matrices of latent attention
    int64_t rope_layout;
    Tensors sinks;  // empty, or those of the heads of attention

    std::optional<Tensor> head_sinks() const {
        STD_TORCH_CHECK(sinks.empty() || (sinks.size() == 1 && &roles() == &of_attention),
                        "layer: expected sinks of attention as one tensor");
        return sinks.empty() ? std::nullopt : std::optional(sinks[0]);
    }
    const Roles& roles() const {
        const bool low_rank = !latent.empty() && gains.size() == norm_count && gains[of_queries].numel();
        if (norm_groups) return of_one;
        return low_rank ? of_low_rank : recurrent.empty() && latent.empty() ? of_attention : of_two;
    }
    std::optional<latent::Expansion> expansion() const {
        if (latent.empty()) return std::nullopt;
        STD_TORCH_CHECK(latent.size() == 2 && recurrent.empty() && !gated,
                        "layer: expected two matrices of latent attention, and no other mixer");
        const latent::Expansion made{latent[0], latent[1], latent::RopeLayout{rope_layout}};
        const bool low_rank = &roles() == &of_low_rank;
        latent::check(made, rows[low_rank ? 2 : 0], rows[1]);
        return made;
    }
    std::optional<mixers::DeltaNet> delta_net() const {
        if (recurrent.empty() || norm_groups) return std::nullopt;
        const Tensors& held = recurrent;
        STD_TORCH_CHECK(held.size() == 7, "layer: expected seven tensors of a delta net");
        return mixers::DeltaNet{held[0], bias_of(held[1]), held[2], held[3], held[4], held[5], held[6], recurrent_eps};
    }
    std::optional<mixers::StateSpace> state_space() const {
        if (!norm_groups) return std::nullopt;
        const Tensors& held = recurrent;
        STD_TORCH_CHECK(held.size() == 6 && norm_groups > 0 && latent.empty() && !gated,
                        "layer: expected six tensors of a state space, and no other mixer");
        return mixers::StateSpace{held[0], bias_of(held[1]), held[2],       held[3],
                                  held[4], held[5],          recurrent_eps, norm_groups};
    }

  private:
    static std::optional<Tensor> bias_of(const Tensor& x) { return x.numel() ? std::optional(x) : std::nullopt; }
};

// Which weights multiply each input: one for each role of the site, or one for all, whose rows are theirs in turn. A
// site without roles has no input.
class Sites {
  public:
    // The rows of the weights.
    Sites(const Int64s& n, const Constants& constants)
        : p_(constants), rows_(constants.rows), roles_(constants.roles()) {
        const Int64s& rows = rows_;
        STD_TORCH_CHECK(rows.size() == roles_[site_count] || rows.size() == roles_[to_gate_up],
                        "layer: expected rows of ", roles_[site_count], " roles, or of ", roles_[to_gate_up]);
        for (size_t site = 0; site < site_count && roles_[site] < rows.size(); site++) {
            const auto from = rows.begin() + roles_[site], to = rows.begin() + roles_[site + 1];
            const size_t at = starts_.back(), left = n.size() - at, roles = to - from;
            const bool inside = left && std::all_of(from, to, [&](int64_t r) { return 0 <= r && r <= n[at]; });
            const bool fused = roles && inside && n[at] == std::accumulate(from, to, int64_t{0});
            STD_TORCH_CHECK(fused || (left >= roles && std::equal(from, to, n.begin() + at)),
                            "layer: the weights of input ", inputs_.back(),
                            " do not have the rows of what they are for");
            starts_.push_back(at + (fused ? 1 : roles));
            inputs_.push_back(inputs_.back() + (roles > 0));
        }
        STD_TORCH_CHECK(starts_.back() == n.size(), "layer: expected ", starts_.back(), " weights");
    }
    size_t size() const { return starts_.size() - 1; }
    // Of an input.
    int64_t width(size_t site) const {
        if (site == inside) return rows_[0];
        if (site != to_o) return rows_[roles_[site == to_down ? to_gate_up : to_o]];
        if (!p_.latent.empty()) return p_.latent[1].size(0) * p_.latent[1].size(1);
        if (p_.norm_groups) return p_.recurrent.back().numel();
        return p_.recurrent.empty() ? rows_[0] / (p_.gated ? 2 : 1) : rows_[1];
    }
    size_t first(size_t site) const { return starts_[site]; }
    size_t last(size_t site) const { return starts_[site + 1]; }
    bool has(size_t site) const { return first(site) < last(site); }
    // In the lists of what is done to inputs.
    size_t input(size_t site) const { return inputs_[site]; }
    size_t inputs() const { return inputs_.back(); }
    // [b, t, rows] of each role
    Tensors by_role(Tensors products, size_t site) const {
        const size_t from = roles_[site], count = roles_[site + 1] - from;
        if (products.size() == count) return products;
        Tensors parts;
        int64_t at = 0;
        for (size_t role = from; role < from + count; at += rows_[role++])
            parts.push_back(columns(products.front(), at, rows_[role]));
        return parts;
    }

  private:
    const Constants& p_;
    const Int64s& rows_;
    const Roles& roles_;  // as they were when the layer was made
    std::vector<size_t> starts_{0}, inputs_{0};
};

// A gain of no elements is no norm.
struct Norms {
    const Constants& p;

    explicit Norms(const Constants& constants) : p(constants) {
        STD_TORCH_CHECK(p.gains.size() == norm_count && p.eps.size() == norm_count && p.offset.size() == norm_count &&
                            p.round_first.size() == norm_count,
                        "layer: expected ", int{norm_count}, " norms");
    }
    Tensor operator()(const Tensor& x, Norm which) const {
        if (!p.gains[which].numel()) return x;
        return steps::rms_norm(x, p.gains[which], p.eps[which], p.offset[which], p.round_first[which]);
    }
    // Of each head, or of all of them as one vector.
    Tensor of_heads(const Tensor& x, Norm which) const {
        const int64_t d = p.gains[which].numel();
        if (!d || d == x.size(2)) return (*this)(x, which);
        STD_TORCH_CHECK(x.size(2) % d == 0, "layer: a norm of ", d, " for heads of ", x.size(2));
        return reshaped((*this)(reshaped(compact(x), Int64s{x.size(0), x.size(1), x.size(2) / d, d}), which),
                        x.sizes());
    }
};

// Hadamard transforms of inputs or of products. An order of 0 is none; `signs` are empty, or one vector for each.
class Transforms {
  public:
    Transforms(const Tensors& signs, const Tensors& factors, const Int64s& counts, const Int64s& orders)
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
    const Int64s& orders_;
    std::vector<Tensors> factors_;
};

}  // namespace ptq::layer
