// A decoder layer that is kept from token to token, behind a tensor that stands for it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "layer/cache.h"

namespace ptq::layer {

class Decoder {
  public:
    virtual ~Decoder() = default;
    // What the layer makes of the last tokens of each row, x [b, t, k], which go to the cache.
    virtual Tensor decode(const Tensor& x, const Tensor& cos, const Tensor& sin, const Cache& cache, double scaling,
                          double multiplier) = 0;
};

}  // namespace ptq::layer
