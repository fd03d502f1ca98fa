// The grid of quantised tokens as the CUDA kernels take it.
#pragma once

#include "activations/quantize.cuh"
#include "cuda/torch_cuda.h"

namespace ptq::activations {

inline Grid8 grid8(const char* op, int64_t bits, double clip) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 8, op, ": bits must be 2 to 8, found ", bits);
    STD_TORCH_CHECK(clip > 0 && clip <= 1, op, ": clip must lie above 0 and at most at 1, found ", clip);
    const float middle = static_cast<float>(1 << (bits - 1));
    return {-middle, middle - 1, static_cast<float>(clip / ((1 << (bits - 1)) - 1))};
}

}  // namespace ptq::activations
