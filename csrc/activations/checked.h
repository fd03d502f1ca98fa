// How tokens are quantised, of what an op is given. For CPU and CUDA.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "activations/quantize.h"

namespace ptq::activations {

// Of less a token's scale could have an inverse that is infinite. ptq/ops/activations.py has it as LEAST_CLIP.
constexpr double least_clip = 1e-5;

inline Quantizer quantizer(const char* op, int64_t bits, double clip) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 8, op, ": bits must be 2 to 8, found ", bits);
    STD_TORCH_CHECK(clip >= least_clip && clip <= 1, op, ": clip must be ", least_clip, " to 1, found ", clip);
    const float middle = static_cast<float>(1 << (bits - 1));
    return {-middle, middle - 1, static_cast<float>(clip / ((1 << (bits - 1)) - 1))};
}

}  // namespace ptq::activations
