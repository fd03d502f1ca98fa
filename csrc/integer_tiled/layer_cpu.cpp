// ptq::integer_layers for the CPU: what decoder layers do to a decoded token, one after the other, as one op. Schema,
// fake kernel and reference are in quarot/layer_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "activations/activations_cpu.h"
#include "common/tensors.h"
#include "hadamard/hadamard_cpu.h"
#include "integer_tiled/tiled_cpu.h"
#include "kv_cache/kv_cache_cpu.h"
#include "steps/steps_cpu.h"

namespace ptq::integer_tiled {
namespace {

using torch::stable::Tensor;
using Floats = std::vector<double>;
using Ints = std::vector<int64_t>;

// Those of all layers, in their order: q, k, v, o, gate, up and down of each. `zero` and `bias` are empty, or as many
// (a bias of no elements is none).
struct Weights {
    const Tensors &tiles, &scale, &zero, &bias;
    const Ints& n;
    int64_t bits, group_size;
};
constexpr size_t per_layer = 7;

// What is done to the input of some of them.
struct Input {
    int64_t bits;  // of its integers; 0: it stays as it is
    double clip;
    const Tensors& factors;
    int64_t order;  // of the Hadamard transform before that; 0: none
};

// Of each layer: before attention, before the MLP, and maybe of queries and keys.
struct Norms {
    const Tensors& gains;
    const Floats &eps, &offset;
    const Ints& round_first;
    size_t count() const { return eps.size(); }
    Tensor operator()(const Tensor& x, size_t layer, size_t which) const {
        return steps::rms_norm(x, gains[layer * count() + which], eps[which], offset[which], round_first[which]);
    }
    // Of each head, or of all of them as one vector.
    Tensor of_heads(const Tensor& x, size_t layer, size_t which) const {
        const int64_t d = gains[layer * count() + which].size(0);
        if (d == x.size(2)) return (*this)(x, layer, which);
        STD_TORCH_CHECK(d > 0 && x.size(2) % d == 0, "integer layers: a norm of ", d, " for heads of ", x.size(2));
        return reshaped((*this)(reshaped(x, Ints{x.size(0), 1, x.size(2) / d, d}), layer, which), x.sizes());
    }
};

// Keys and values of each layer: two tensors where they are plain, four where they are packed, seven with sinks.
struct Cache {
    const Tensors& parts;
    int64_t before;
    const Ints& bits;
    double clip;
    const Tensors& factors;
    int64_t order;
    size_t count;  // tensors of a layer
    const Tensor& operator()(size_t layer, size_t part) const { return parts[layer * count + part]; }
    std::optional<Tensor> sink(size_t layer, size_t part) const {
        return count == 7 ? std::optional((*this)(layer, 4 + part)) : std::nullopt;
    }
};

// x times weights [first, last).
Tensors products(const Tensor& x, const Input& input, const Weights& w, size_t first, size_t last) {
    const auto some = [&](const auto& all) {
        using List = std::remove_cvref_t<decltype(all)>;
        return all.empty() ? List() : List(all.begin() + first, all.begin() + last);
    };
    const Tensors tiles = some(w.tiles), scale = some(w.scale), zero = some(w.zero), bias = some(w.bias);
    const Ints n = some(w.n);
    if (!input.bits) {
        const Tensor in = input.order ? hadamard::hadamard(x, std::nullopt, input.factors, input.order, -1, false) : x;
        return linears_tiled(in, tiles, scale, zero, bias, n, w.bits, w.group_size);
    }
    const auto [q, q_scale] =
        input.order ? hadamard::hadamard_quantize(x, std::nullopt, input.factors, input.order, input.bits, input.clip)
                    : activations::quantize_tokens(x, input.bits, input.clip);
    return linears_quantized(q, q_scale, tiles, scale, zero, bias, n, w.bits, w.group_size, x.scalar_type());
}

Tensor attention(const Tensors& qkv, const Norms& norms, const Cache& cache, size_t layer, const Tensor& cos,
                 const Tensor& sin, double scaling) {
    const bool normed = norms.count() == 4;
    const Tensor q = normed ? norms.of_heads(qkv[0], layer, 2) : qkv[0];
    const Tensor k = normed ? norms.of_heads(qkv[1], layer, 3) : qkv[1];
    if (cache.count == 2)
        return steps::decode_attention(q, k, qkv[2], cos, sin, cache(layer, 0), cache(layer, 1), cache.before, scaling);
    return kv_cache::decode_attention(q, k, qkv[2], cos, sin, cache(layer, 0), cache(layer, 1), cache(layer, 2),
                                      cache(layer, 3), cache.before, cache.bits[0], cache.bits[1], cache.clip,
                                      cache.factors, cache.order, scaling, cache.sink(layer, 0), cache.sink(layer, 1),
                                      cache.sink(layer, 2));
}

void check(const Weights& w, const Norms& norms, const Cache& cache, size_t of) {
    const size_t count = of * per_layer;
    STD_TORCH_CHECK(w.n.size() == count && w.tiles.size() == count && w.scale.size() == count &&
                        (w.zero.empty() || w.zero.size() == count) && (w.bias.empty() || w.bias.size() == count),
                    "integer layers: lists of different lengths");
    STD_TORCH_CHECK((norms.count() == 2 || norms.count() == 4) && norms.gains.size() == of * norms.count() &&
                        norms.offset.size() == norms.count() && norms.round_first.size() == norms.count(),
                    "integer layers: expected 2 or 4 norms of each layer");
    STD_TORCH_CHECK((cache.count == 2 || cache.count == 4 || cache.count == 7) &&
                        cache.parts.size() == of * cache.count && cache.bits.size() == 2,
                    "integer layers: expected 2, 4 or 7 tensors of the cache of each layer");
}

Tensors layers(const Tensor& x, const Tensors& gains, const Floats& eps, const Floats& offset, const Ints& round_first,
               const Tensors& tiles, const Tensors& scale, const Tensors& zero, const Tensors& bias, const Ints& n,
               int64_t bits, int64_t group_size, int64_t input_bits, double clip, const Tensors& factors, int64_t order,
               int64_t down_bits, double down_clip, const Tensor& cos, const Tensor& sin, const Tensors& parts,
               int64_t before, const Ints& cache_bits, double cache_clip, const Tensors& cache_factors,
               int64_t cache_order, double scaling) {
    const size_t count = n.size() / per_layer;
    const Tensors none;
    const Weights w{tiles, scale, zero, bias, n, bits, group_size};
    const Norms norms{gains, eps, offset, round_first};
    const Cache cache{
        parts, before, cache_bits, cache_clip, cache_factors, cache_order, count ? parts.size() / count : 2};
    const Input plain{input_bits, clip, none, 0}, down{down_bits, down_clip, factors, order};
    check(w, norms, cache, count);
    STD_TORCH_CHECK(x.dim() == 3 && x.size(1) == 1, "integer layers: expected x [b, 1, k]");
    Tensors results;
    for (size_t layer = 0; layer < count; layer++) {
        const Tensor& in = layer ? results.back() : x;
        const size_t first = layer * per_layer;
        const Tensors qkv = products(norms(in, layer, 0), plain, w, first, first + 3);
        const Tensor attended = attention(qkv, norms, cache, layer, cos, sin, scaling);
        const Tensor y = steps::sum(in, products(attended, plain, w, first + 3, first + 4).front());
        const Tensors gated = products(norms(y, layer, 1), plain, w, first + 4, first + 6);
        results.push_back(steps::sum(
            y, products(steps::silu_mul(gated[0], gated[1]), down, w, first + 6, first + per_layer).front()));
    }
    return results;
}

}  // namespace
}  // namespace ptq::integer_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("integer_layers", TORCH_BOX(&ptq::integer_tiled::layers));
}
