// ptq::integer_layer for the CPU: all that a decoder layer does to a decoded token, as one op. Schema, fake kernel and
// reference are in quarot/layer_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "common/input.h"
#include "integer_tiled/tiled_cpu.h"
#include "kv_cache/kv_cache_cpu.h"
#include "steps/steps_cpu.h"

namespace ptq::integer_tiled {
namespace {

using Floats = std::vector<double>;
using Ints = std::vector<int64_t>;

// q, k, v, o, gate, up and down. `zero` and `bias` are empty, or as many (a bias of no elements is none).
struct Weights {
    const Tensors &tiles, &scale, &zero, &bias;
    const Ints& n;
    int64_t bits, group_size;
};

// Before attention, before the MLP, and maybe of queries and of keys.
struct Norms {
    const Tensors& gains;
    const Floats &eps, &offset;
    const Ints& round_first;
    Tensor operator()(const Tensor& x, size_t which) const {
        return steps::rms_norm(x, gains[which], eps[which], offset[which], round_first[which]);
    }
    // Of each head, or of all of them as one vector.
    Tensor of_heads(const Tensor& x, size_t which) const {
        const int64_t d = gains[which].size(0);
        if (d == x.size(2)) return (*this)(x, which);
        STD_TORCH_CHECK(d > 0 && x.size(2) % d == 0, "integer_layer: a norm of ", d, " for heads of ", x.size(2));
        return reshaped((*this)(reshaped(x, Ints{x.size(0), 1, x.size(2) / d, d}), which), x.sizes());
    }
};

// Keys and values: two tensors where they are plain, four where they are packed, seven with sinks.
struct Cache {
    const Tensors& parts;
    int64_t before;
    const Ints& bits;
    double clip;
    const Tensors& factors;
    int64_t order;
    std::optional<Tensor> sink(size_t part) const {
        return parts.size() == 7 ? std::optional(parts[4 + part]) : std::nullopt;
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
    const Seen in = seen(x, input);
    if (in.scale)
        return linears_quantized(in.x, *in.scale, tiles, scale, zero, bias, n, w.bits, w.group_size, x.scalar_type());
    return linears_tiled(in.x, tiles, scale, zero, bias, n, w.bits, w.group_size);
}

Tensor attention(const Tensors& qkv, const Norms& norms, const Cache& cache, const Tensor& cos, const Tensor& sin,
                 double scaling) {
    const bool normed = norms.gains.size() == 4;
    const Tensor q = normed ? norms.of_heads(qkv[0], 2) : qkv[0], k = normed ? norms.of_heads(qkv[1], 3) : qkv[1];
    const Tensors& parts = cache.parts;
    if (parts.size() == 2)
        return steps::decode_attention(q, k, qkv[2], cos, sin, parts[0], parts[1], cache.before, scaling);
    return kv_cache::decode_attention(q, k, qkv[2], cos, sin, parts[0], parts[1], parts[2], parts[3], cache.before,
                                      cache.bits[0], cache.bits[1], cache.clip, cache.factors, cache.order, scaling,
                                      cache.sink(0), cache.sink(1), cache.sink(2));
}

void check(const Weights& w, const Norms& norms, const Cache& cache) {
    STD_TORCH_CHECK(w.n.size() == 7 && w.tiles.size() == 7 && w.scale.size() == 7 &&
                        (w.zero.empty() || w.zero.size() == 7) && (w.bias.empty() || w.bias.size() == 7),
                    "integer_layer: expected seven weights");
    const size_t count = norms.gains.size();
    STD_TORCH_CHECK((count == 2 || count == 4) && norms.eps.size() == count && norms.offset.size() == count &&
                        norms.round_first.size() == count,
                    "integer_layer: expected 2 or 4 norms");
    const size_t parts = cache.parts.size();
    STD_TORCH_CHECK((parts == 2 || parts == 4 || parts == 7) && cache.bits.size() == 2,
                    "integer_layer: expected 2, 4 or 7 tensors of the cache");
}

Tensor layer(const Tensor& x, const Tensors& gains, const Floats& eps, const Floats& offset, const Ints& round_first,
             const Tensors& tiles, const Tensors& scale, const Tensors& zero, const Tensors& bias, const Ints& n,
             int64_t bits, int64_t group_size, int64_t input_bits, const Floats& clips, const Tensors& factors,
             int64_t order, int64_t down_bits, double down_clip, const Tensor& cos, const Tensor& sin,
             const Tensors& parts, int64_t before, const Ints& cache_bits, double cache_clip,
             const Tensors& cache_factors, int64_t cache_order, double scaling) {
    const Tensors none;
    const Weights w{tiles, scale, zero, bias, n, bits, group_size};
    const Norms norms{gains, eps, offset, round_first};
    const Cache cache{parts, before, cache_bits, cache_clip, cache_factors, cache_order};
    check(w, norms, cache);
    STD_TORCH_CHECK(clips.size() == 3, "integer_layer: expected 3 clips");
    const auto plain = [&](size_t which) { return Input{input_bits, clips[which], none, 0}; };
    const Input down{down_bits, down_clip, factors, order};
    STD_TORCH_CHECK(x.dim() == 3 && x.size(1) == 1, "integer_layer: expected x [b, 1, k]");
    const Tensors qkv = products(norms(x, 0), plain(0), w, 0, 3);
    const Tensor attended = attention(qkv, norms, cache, cos, sin, scaling);
    const Tensor y = steps::sum(x, products(attended, plain(1), w, 3, 4).front());
    const Tensors gated = products(norms(y, 1), plain(2), w, 4, 6);
    return steps::sum(y, products(steps::silu_mul(gated[0], gated[1]), down, w, 6, 7).front());
}

}  // namespace
}  // namespace ptq::integer_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("integer_layer", TORCH_BOX(&ptq::integer_tiled::layer));
}
