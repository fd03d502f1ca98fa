// A decoder layer that is kept from token to token, behind a tensor that stands for it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/input.h"
#include "kv_cache/kv_cache_cpu.h"
#include "steps/steps_cpu.h"

namespace ptq::layer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Floats = std::vector<double>;
using Ints = std::vector<int64_t>;

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

class Held {
  public:
    virtual ~Held() = default;
    // What the layer makes of the token of each row, x [b, 1, k], which goes to the cache.
    virtual Tensor decode(const Tensor& x, const Tensor& cos, const Tensor& sin, const Cache& cache, double scaling,
                          double multiplier) = 0;
};

// Bytes that nobody reads; with the last reference to them the layer goes, too.
Tensor handle(std::unique_ptr<Held> layer);

}  // namespace ptq::layer
