// ptq::quantize_tokens for the CPU. Schema, fake kernel and reference are in ptq/ops/activations.py. (The same after a
// Hadamard transform is in csrc/hadamard.)
#include "activations/activations_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>

#include "activations/checked.h"
#include "common/cpu_level.h"
#include "common/tensors.h"

namespace ptq::activations {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const Kernels& kernels() {
    return at_level<portable, avx2, avx2, avx512>();
}

void quantize(const Numbers& n, int64_t token, int8_t* q, float* scale) {
    const int64_t at = token * n.k;
    if (n.wide)
        kernels().float32(n.quantizer, static_cast<const float*>(n.x) + at, n.k, q, scale);
    else
        kernels().bfloat16(n.quantizer, static_cast<const uint16_t*>(n.x) + at, n.k, q, scale);
}

HeldTokens hold(const Tensor& x, int64_t bits, double clip) {
    const Quantizer z = quantizer("quantize_tokens", bits, clip);
    STD_TORCH_CHECK(x.dim() > 0, "quantize_tokens: x has no axis");
    const bool direct = x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16;
    const Tensor in = compact(direct ? x : torch::stable::to(x, ScalarType::Float));
    int64_t t = 1;
    for (int64_t i = 0; i + 1 < in.dim(); i++) t *= in.size(i);
    return {in, {z, in.const_data_ptr(), in.scalar_type() == ScalarType::Float, t, in.size(-1)}};
}

std::tuple<Tensor, Tensor> quantize_tokens(const Tensor& x, int64_t bits, double clip) {
    const auto [in, numbers] = hold(x, bits, clip);
    const auto sizes = in.sizes();
    const Tensor q = fresh(sizes, ScalarType::Char), scale = fresh(sizes.slice(0, sizes.size() - 1), ScalarType::Float);
    int8_t* to = static_cast<int8_t*>(q.mutable_data_ptr());
    float* scales = static_cast<float*>(scale.mutable_data_ptr());
    // A thread is worth waking for about 32k elements.
    const int64_t grain = std::max(int64_t{1}, (int64_t{1} << 15) / std::max(int64_t{1}, numbers.k));
    torch::stable::parallel_for(0, numbers.t, grain, [&, &numbers = numbers](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) quantize(numbers, i, to + i * numbers.k, scales + i);
    });
    return {q, scale};
}

}  // namespace ptq::activations

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("quantize_tokens", TORCH_BOX(&ptq::activations::quantize_tokens));
}
