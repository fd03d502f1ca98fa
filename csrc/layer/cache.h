// The cache of a decoder layer, plain or packed.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "hadamard/input.h"
#include "kv_cache/kv_cache_cpu.h"
#include "steps/steps_cpu.h"

namespace ptq::layer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Floats = std::vector<double>;
using Int64s = std::vector<int64_t>;

// Keys and values: two tensors where they are plain, four where they are packed, three more with sinks; last, the
// centres of keys, if there are any.
struct Cache {
    const Tensors& tensors;
    int64_t before;
    const Int64s& bits;
    const Floats& clips;
    const Tensors& factors;
    int64_t order;
    const std::optional<Tensor>& mask;

    // `sinks` of the heads, only where the cache is plain.
    Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                  double scaling, const std::optional<Tensor>& sinks) const {
        const Tensors& t = tensors;
        if (t.size() == 2) return steps::decode_attention(q, k, v, cos, sin, t[0], t[1], before, scaling, mask, sinks);
        STD_TORCH_CHECK(!sinks, "decode_layers: a packed cache does not go with sinks of heads");
        return kv_cache::decode_attention(q, k, v, cos, sin, t[0], t[1], t[2], t[3], before, bits[0], bits[1], clips,
                                          factors, order, scaling, sink(0), sink(1), sink(2), mask, center());
    }
    std::optional<Tensor> sink(size_t part) const {
        return tensors.size() >= 7 ? std::optional(tensors[4 + part]) : std::nullopt;
    }
    std::optional<Tensor> center() const {
        const size_t count = tensors.size();
        return count == 5 || count == 8 ? std::optional(tensors.back()) : std::nullopt;
    }
    void check() const {
        const size_t count = tensors.size();
        STD_TORCH_CHECK(count == 2 || count == 4 || count == 5 || count == 7 || count == 8,
                        "decode_layers: expected 2, 4, 5, 7 or 8 tensors of the cache");
        STD_TORCH_CHECK(bits.size() == 2 && clips.size() == 2, "decode_layers: expected bits and clips of two sides");
    }
};

}  // namespace ptq::layer
