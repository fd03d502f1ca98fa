// ptq::quantize_tokens for CUDA. Schema, fake kernel and reference are in ptq/ops/activations.py.
#include <tuple>

#include "activations/checked.h"
#include "activations/quantize.cuh"
#include "cuda/torch_cuda.h"

namespace ptq::activations {
namespace {

using cuda::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> quantize_tokens(const Tensor& x, int64_t bits, double clip) {
    const Quantizer grid = quantizer("quantize_tokens", bits, clip);
    STD_TORCH_CHECK(x.dim() > 0, "quantize_tokens: x has no axis");
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    cuda::properties(x.get_device_index());
    const ScalarType type = x.scalar_type();
    const bool direct = type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
    const Tensor in = torch::stable::contiguous(direct ? x : torch::stable::to(x, ScalarType::Float));
    const auto sizes = in.sizes();
    const Tensor q = cuda::empty_like_device(sizes, ScalarType::Char, in);
    const Tensor scale = cuda::empty_like_device({sizes.data(), sizes.size() - 1}, ScalarType::Float, in);
    STD_TORCH_CHECK(in.size(-1) < int64_t{1} << 31 && scale.numel() < int64_t{1} << 31,
                    "quantize_tokens: x is too large: at most 2^31 - 1 tokens of 2^31 - 1 numbers");
    const Tokens tokens{in.const_data_ptr(),
                        static_cast<int8_t*>(q.mutable_data_ptr()),
                        static_cast<float*>(scale.mutable_data_ptr()),
                        scale.numel(),
                        static_cast<int>(in.size(-1)),
                        0,
                        cuda::is_aligned(in.const_data_ptr()),
                        grid};
    cuda::check_launch("quantize_tokens",
                       quantize(tokens, static_cast<int>(in.element_size()), in.scalar_type() == ScalarType::Half,
                                cuda::current_stream(x.get_device_index())));
    return {q, scale};
}

}  // namespace
}  // namespace ptq::activations

STABLE_TORCH_LIBRARY_IMPL(ptq, CUDA, m) {
    m.impl("quantize_tokens", TORCH_BOX(&ptq::activations::quantize_tokens));
}
