// All that a decoder layer does to decoded tokens, for weights of any format. See ptq/ops/layer_ops.py and
// held_layer.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "common/handles.h"
#include "common/tensors.h"
#include "experts/experts.h"
#include "experts/moe.h"
#include "hadamard/input.h"
#include "layer/constants.h"
#include "layer/decoder.h"
#include "steps/steps_cpu.h"

namespace ptq::layer {

// x + multiplier * y, the product rounded, too.
inline Tensor sum(const Tensor& x, const Tensor& y, double multiplier) {
    if (multiplier != 1) {
        const bool single = y.scalar_type() == ScalarType::Float;
        (single ? experts::scale<experts::Single> : experts::scale<experts::Brain>)(y, static_cast<float>(multiplier));
    }
    return steps::sum(x, y);
}

// x [b, t, heads * 2 * d]: the first and the second d numbers of each head, [b, t, heads * d].
inline std::pair<Tensor, Tensor> halves_of_heads(const Tensor& x, int64_t d) {
    const int64_t b = x.size(0), t = x.size(1), n = x.size(2), heads = n / (2 * d);
    STD_TORCH_CHECK(n == heads * 2 * d, "layer: ", n, " rows are not heads of twice ", d);
    const Tensor whole = compact(x);
    const auto half = [&](int64_t from) {
        const Tensor part = seen_as(whole, Int64s{b, t, heads, d}, Int64s{t * n, n, 2 * d, 1}, from);
        return reshaped(compact(part), Int64s{b, t, heads * d});
    };
    return {half(0), half(d)};
}

// Where the numbers of a tensor are, and what they are.
struct Storage {
    const void* data;
    int64_t count;
    ScalarType type;
    explicit Storage(const Tensor& x) : data(x.const_data_ptr()), count(x.numel()), type(x.scalar_type()) {}
    bool operator==(const Storage&) const = default;
};

// `Format` has the weights as its op takes them: their numbers of outputs, `n`, and lists, of a tensor for each, which
// `tensors` names. Weights of one input are prepared to be multiplied with it, once for as long as the tensors stay
// where they are. Biases are empty, or one for each, in float32; one of no elements is none.
//     Prepared prepare(size_t first, size_t last, int64_t k, const Tensors& biases) const;
//     Tensors Prepared::operator()(const Seen&, ScalarType) const;
template <class Format>
class Layer final : public Decoder {
  public:
    Layer(Constants constants, Format format)
        : constants_(std::move(constants)),
          format_(std::move(format)),
          norm_(constants_),
          inputs_(constants_.su, constants_.factors, constants_.counts, constants_.orders),
          outputs_(constants_.sv, constants_.back_factors, constants_.back_counts, constants_.back_orders),
          sites_(format_.n, constants_),
          delta_(constants_.delta_net()),
          space_(constants_.state_space()),
          expansion_(constants_.expansion()) {
        const Constants& c = constants_;
        const size_t count = format_.n.size(), sites = sites_.inputs();
        STD_TORCH_CHECK(inputs_.size() == sites && c.input_bits.size() == sites && c.clips.size() == sites,
                        "layer: expected ", sites, " inputs");
        STD_TORCH_CHECK(outputs_.size() == count, "layer: expected ", count, " weights");
        STD_TORCH_CHECK(c.biases.empty() || c.biases.size() == count, "layer: expected ", count, " biases");
        for (const Tensors* list : format_.tensors())
            STD_TORCH_CHECK(list->size() == count, "layer: lists of different lengths");
        STD_TORCH_CHECK(c.moe.empty() || (c.moe.size() == 1 && sites_.size() == to_gate_up),
                        "layer: expected weights of an MLP, or experts");
        if (!c.moe.empty()) {
            moe_ = experts::MoeHandles::find(c.moe.front());
            STD_TORCH_CHECK(moe_, "layer: expected what an op on experts gave, not a copy of it");
        }
        if (const auto own = constants_.head_sinks()) {
            const int64_t heads = own->dim() == 1 ? own->size(0) : 0, queries = sites_.width(to_o);
            STD_TORCH_CHECK(heads > 0 && queries % heads == 0, "layer: sinks do not fit ", queries, " rows of queries");
        }
        prepared();  // what does not fit is refused now
    }

    Tensor decode(const Tensor& x, const Tensor& cos, const Tensor& sin, const Cache& cache, double scaling,
                  double multiplier) override {
        STD_TORCH_CHECK(x.dim() == 3, "decode_layers: expected x [b, t, k]");
        STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16,
                        "decode_layers: x must be float32 or bfloat16");
        STD_TORCH_CHECK(cache.tensors.size() == 2 || (!delta_ && !space_ && !expansion_),
                        "decode_layers: expected two tensors of the cache of such a layer");
        const std::shared_ptr<const Prepared> now = prepared();
        const auto linears = [&](const Tensor& in, Site site) { return multiplied(*now, in, site); };
        const Tensor in = norm_(x, before_attention);
        Tensors products = linears(in, to_mixer);
        if (sites_.has(inside)) products[0] = linears(norm_(products[0], of_queries), inside).front();
        const Tensor mixed =
            delta_   ? mixers::delta_net_step(in, products[0], products[1], cache.tensors[0], cache.tensors[1], *delta_)
            : space_ ? mixers::mamba2_step(products[0], cache.tensors[0], cache.tensors[1], *space_)
            : expansion_ ? attended_latents(products, cos, sin, cache, scaling)
                         : attended(products, cos, sin, cache, scaling);
        const Tensor y = sum(x, norm_(linears(mixed, to_o).front(), after_attention), multiplier);
        if (moe_) return sum(y, norm_(moe_->run(norm_(y, before_mlp)).first, after_mlp), multiplier);
        if (sites_.size() < site_count) return y;
        const Tensors gated = linears(norm_(y, before_mlp), to_gate_up);
        const Tensor inner = (constants_.gelu ? steps::gelu_mul : steps::silu_mul)(gated[0], gated[1]);
        return sum(y, norm_(linears(inner, to_down).front(), after_mlp), multiplier);
    }

  private:
    struct Prepared {
        std::vector<typename Format::Prepared> sites;
        Tensors biases;  // in float32
    };

    Tensor attended(const Tensors& qkv, const Tensor& cos, const Tensor& sin, const Cache& cache,
                    double scaling) const {
        const auto attend = [&](const Tensor& q) {
            const Tensor queries = norm_.of_heads(q, of_queries), keys = norm_.of_heads(qkv[1], of_keys);
            return cache.attend(queries, keys, qkv[2], cos, sin, scaling, constants_.head_sinks());
        };
        if (!constants_.gated) return attend(qkv[0]);
        const auto [q, gate] = halves_of_heads(qkv[0], constants_.gated);
        return steps::sigmoid_mul(gate, attend(q));
    }

    Tensor attended_latents(const Tensors& products, const Tensor& cos, const Tensor& sin, const Cache& cache,
                            double scaling) const {
        const int64_t rank = expansion_->keys.size(1);
        const Tensor both = compact(products[1]), latent = norm_(columns(both, 0, rank), of_keys);
        const Tensor rotary = columns(both, rank, both.size(2) - rank);
        return latent::attention(products[0], latent, rotary, cos, sin, cache.tensors[0], cache.tensors[1],
                                 cache.before, *expansion_, scaling, cache.mask);
    }

    bool is_transformed(size_t site) const { return sites_.has(site) && outputs_.order(sites_.first(site)); }

    // Kept for as long as tensors stay where they are; for one token, where something has to be copied.
    std::shared_ptr<const Prepared> prepared() {
        std::vector<const Tensors*> lists = format_.tensors();
        lists.push_back(&constants_.biases);
        std::vector<Storage> storages;
        bool copied = false;
        for (const Tensors* list : lists)
            for (const Tensor& x : *list) {
                storages.emplace_back(x);
                copied |= !x.is_contiguous() || (list == lists.back() && x.scalar_type() != ScalarType::Float);
            }
        const std::lock_guard lock(mutex_);
        if (prepared_ && storages == storages_ && !copied) return prepared_;
        for (const Tensors* list : lists)
            for (const Tensor& x : *list) STD_TORCH_CHECK(x.is_cpu(), "layer: a tensor is not on the CPU");
        auto made = std::make_shared<const Prepared>(prepare());
        prepared_ = copied ? nullptr : made;
        storages_ = std::move(storages);
        return made;
    }

    Prepared prepare() const {
        Prepared made;
        for (const Tensor& bias : constants_.biases) made.biases.push_back(as_float(bias));
        for (size_t site = 0; site < sites_.size(); site++) {
            const size_t first = sites_.first(site), last = sites_.last(site);
            if (first == last) {
                made.sites.emplace_back();
                continue;
            }
            const Tensors own = is_transformed(site) ? Tensors() : experts::some(made.biases, first, last);
            made.sites.push_back(format_.prepare(first, last, sites_.width(site), own));
        }
        return made;
    }

    // Of each role.
    Tensors multiplied(const Prepared& prepared, const Tensor& x, Site site) const {
        const size_t place = sites_.input(site);
        STD_TORCH_CHECK(x.size(2) == sites_.width(site), "decode_layers: expected ", sites_.width(site),
                        " numbers for input ", place, ", found ", x.size(2));
        const Seen in = seen(x, {constants_.input_bits[place], constants_.clips[place], inputs_.factors(place),
                                 inputs_.order(place), inputs_.signs(place)});
        const ScalarType dtype = x.scalar_type();
        if (!is_transformed(site)) return sites_.by_role(prepared.sites[site](in, dtype), site);
        Tensors products = prepared.sites[site](in, in.scale ? ScalarType::Float : dtype);
        const size_t first = sites_.first(site);
        for (size_t i = 0; i < products.size(); i++) {
            const size_t weight = first + i;
            Tensor y = hadamard::hadamard(as_float(products[i]), outputs_.signs(weight), outputs_.factors(weight),
                                          outputs_.order(weight), -1, true);
            if (!prepared.biases.empty() && prepared.biases[weight].numel()) y = added(y, prepared.biases[weight]);
            products[i] = from_float(y, dtype);
        }
        return sites_.by_role(std::move(products), site);
    }

    // y [b, t, n] + bias [n]
    static Tensor added(const Tensor& y, const Tensor& bias) {
        STD_TORCH_CHECK(bias.numel() == y.size(2), "layer: bias must have ", y.size(2), " elements");
        const auto* from = static_cast<const float*>(bias.const_data_ptr());
        auto* to = static_cast<float*>(y.mutable_data_ptr());
        const int64_t rows = y.size(0) * y.size(1), n = bias.numel();
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < n; i++) *to++ += from[i];
        return y;
    }

    const Constants constants_;
    const Format format_;
    const Norms norm_;
    const Transforms inputs_, outputs_;
    const Sites sites_;
    const std::optional<mixers::DeltaNet> delta_;       // in the place of attention
    const std::optional<mixers::StateSpace> space_;     // likewise
    const std::optional<latent::Expansion> expansion_;  // of latent attention
    std::shared_ptr<const experts::Moe> moe_;           // in the place of an MLP
    std::mutex mutex_;                                  // of what follows
    std::vector<Storage> storages_;
    std::shared_ptr<const Prepared> prepared_;
};

// Weights of one input, multiplied as the experts of a format are.
template <class Weights>
struct Together {
    Weights weights;
    Int64s n;

    // hold(i, bias) gives one of weights [first, last).
    template <class Hold>
    static Together of(size_t first, size_t last, const Int64s& n, const Tensors& biases, const Hold& hold) {
        Together made;
        for (size_t i = first; i < last; i++) {
            const bool plain = biases.empty() || !biases[i - first].numel();
            made.weights.held.push_back(hold(i, plain ? std::nullopt : std::optional(biases[i - first])));
            made.n.push_back(n[i]);
        }
        return made;
    }
    Tensors operator()(const Seen& in, ScalarType dtype) const {
        const int64_t b = in.x.size(0), t = in.x.size(1), k = in.x.size(2), rows = b * t;
        Tensors results;
        for (const int64_t each : n) results.push_back(fresh(Int64s{rows, each}, dtype));
        std::vector<experts::Product> products;
        for (size_t i = 0; i < results.size(); i++) products.push_back({i, 0, rows, results[i]});
        weights.multiply({reshaped(compact(in.x), Int64s{rows, k}), in.scale}, products);
        for (Tensor& y : results) y = reshaped(y, Int64s{b, t, y.size(1)});
        return results;
    }
};

// The op of a format, which is made of its weights' own arguments.
template <class Format, class... Arguments>
Tensor op(const Tensors& gains, const Floats& eps, const Floats& offset, const Int64s& round_first,
          const Tensors& biases, const Int64s& input_bits, const Floats& clips, const Tensors& su,
          const Tensors& factors, const Int64s& counts, const Int64s& orders, const Tensors& sv,
          const Tensors& back_factors, const Int64s& back_counts, const Int64s& back_orders, bool gelu,
          const Int64s& rows, const Tensors& moe, int64_t gated, const Tensors& recurrent, double recurrent_eps,
          int64_t norm_groups, const Tensors& latent, int64_t rope_layout, const Tensors& sinks, Arguments... weights) {
    return Handles<Decoder>::keep(std::make_unique<Layer<Format>>(Constants{.gains = gains,
                                                                            .eps = eps,
                                                                            .offset = offset,
                                                                            .round_first = round_first,
                                                                            .biases = biases,
                                                                            .input_bits = input_bits,
                                                                            .clips = clips,
                                                                            .su = su,
                                                                            .factors = factors,
                                                                            .counts = counts,
                                                                            .orders = orders,
                                                                            .sv = sv,
                                                                            .back_factors = back_factors,
                                                                            .back_counts = back_counts,
                                                                            .back_orders = back_orders,
                                                                            .gelu = gelu,
                                                                            .rows = rows,
                                                                            .moe = moe,
                                                                            .gated = gated,
                                                                            .recurrent = recurrent,
                                                                            .recurrent_eps = recurrent_eps,
                                                                            .norm_groups = norm_groups,
                                                                            .latent = latent,
                                                                            .rope_layout = rope_layout,
                                                                            .sinks = sinks},
                                                                  Format{weights...}));
}

}  // namespace ptq::layer
