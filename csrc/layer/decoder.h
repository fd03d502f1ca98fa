// A decoder layer that is kept from token to token, behind a tensor that stands for it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <memory>

#include "layer/cache.h"

namespace ptq::layer {

class Decoder {
  public:
    virtual ~Decoder() = default;
    // What the layer makes of the token of each row, x [b, 1, k], which goes to the cache.
    virtual Tensor decode(const Tensor& x, const Tensor& cos, const Tensor& sin, const Cache& cache, double scaling,
                          double multiplier) = 0;
};

// A byte that nobody reads: where it is says which layer it stands for. That goes when the byte does.
Tensor handle(std::unique_ptr<Decoder> layer);

}  // namespace ptq::layer
