// The products with fragments of small floats for CUDA. Schemas, fake kernels, references and gradients are in
// fp6/fragment_ops.py.
#include "fragments_cuda/torch_fragments.h"
#include "minifloat_cuda/launch.cuh"

namespace ptq::minifloat_cuda {
namespace {

using torch::stable::Tensor;

Element element_of(const char* op, int64_t exponent, int64_t mantissa) {
    STD_TORCH_CHECK(exponent >= 2 && exponent <= 4 && mantissa >= 1 && mantissa <= 3, op, ": no element e", exponent,
                    "m", mantissa);
    const Element e{static_cast<int>(exponent), static_cast<int>(mantissa)};
    STD_TORCH_CHECK(is_known(e), op, ": no CUDA kernels for e", exponent, "m", mantissa);
    return e;
}

const char* run_any(const Linear& p, ScalarType type, Element e, const Device& device, Stream stream) {
    return type == ScalarType::Half ? run_linear<Half>(p, e, device, stream)
                                    : run_linear<Bfloat16>(p, e, device, stream);
}

Tensor linear(const Tensor& x, const Tensor& fragments, const Tensor& scale, const std::optional<Tensor>& bias,
              int64_t n, int64_t exponent, int64_t mantissa, int64_t group_size) {
    constexpr const char* op = "minifloat_linear_fragments";
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const cuda::Properties& gpu = cuda::properties(x.get_device_index());
    const Element e = element_of(op, exponent, mantissa);
    const ScalarType type = x.scalar_type();
    const Number kind = kind_of(op, "x", type), kind_of_bias = bias_kind(op, bias, x, n);
    const std::vector<int64_t> sizes = out_sizes(op, x, n);
    const Weights w =
        weights(op, x, fragments, scale, std::nullopt, n, x.size(-1), 1 + exponent + mantissa, group_size);
    const Tensor in = torch::stable::contiguous(x);
    const int64_t tokens = tokens_of(in);
    const Stream stream = current_stream(x.get_device_index());
    const bool by_wgmma = type != ScalarType::Float && takes_wgmma<Half>(gpu, w, tokens);
    if (!by_wgmma && (type == ScalarType::Float || tokens > most_tokens || w.k == 0))
        return dense_linear(op, in, w, bias, [&](const Dequantize& d, ScalarType to) {
            return to == ScalarType::Float  ? run_dequantize<float>(d, e, stream)
                   : to == ScalarType::Half ? run_dequantize<Half>(d, e, stream)
                                            : run_dequantize<Bfloat16>(d, e, stream);
        });
    const Tensor out = empty_like_device({sizes.data(), sizes.size()}, type, in);
    if (out.numel() == 0) return out;
    std::optional<Tensor> partial;
    if (by_wgmma) {
        const Linear p = linear_of(w, in, out, kind, bias, kind_of_bias, 1, partial);
        wgmma_linear(op, p, in, 1 + e.exponent + e.mantissa, gpu.device.processors, stream,
                     [&](const Linear& arranged, const WgmmaPlan& plan) {
                         return type == ScalarType::Half ? run_wgmma_linear<Half>(arranged, e, plan, stream)
                                                         : run_wgmma_linear<Bfloat16>(arranged, e, plan, stream);
                     });
        return out;
    }
    const int splits = linear_splits(w, e, static_cast<int>(tokens), gpu.device);
    check_launch(
        op, run_any(linear_of(w, in, out, kind, bias, kind_of_bias, splits, partial), type, e, gpu.device, stream));
    return out;
}

// Tokens that are multiplied as the numbers of bfloat16 that they are: in one go, whatever their number.
const char* run_as_numbers(const char* op, const Weights& w, const Tensor& q, const Tensor& q_scale, const Tensor& out,
                           Number out_kind, const std::optional<Tensor>& bias, Number bias_kind, Element e,
                           const Properties& gpu, Stream stream) {
    const Tensor x = torch::stable::to(q, ScalarType::BFloat16);
    const bool by_wgmma = takes_wgmma<Bfloat16>(gpu, w, tokens_of(q), false);
    const int splits = by_wgmma ? 1 : linear_splits(w, e, static_cast<int>(tokens_of(q)), gpu.device);
    std::optional<Tensor> partial;
    Linear p = linear_of(w, x, out, out_kind, bias, bias_kind, splits, partial);
    p.token_scale = static_cast<const float*>(q_scale.const_data_ptr());
    if (!by_wgmma) return run_linear<Bfloat16>(p, e, gpu.device, stream);
    wgmma_linear(op, p, x, 1 + e.exponent + e.mantissa, gpu.device.processors, stream,
                 [&](const Linear& arranged, const WgmmaPlan& plan) {
                     return run_wgmma_linear<Bfloat16>(arranged, e, plan, stream);
                 });
    return nullptr;
}

Tensor quantized(const Tensor& q, const Tensor& q_scale, const Tensor& fragments, const Tensor& scale,
                 const std::optional<Tensor>& bias, int64_t n, int64_t exponent, int64_t mantissa, int64_t group_size,
                 ScalarType type) {
    constexpr const char* op = "minifloat_quantized_fragments";
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    const cuda::Properties& gpu = cuda::properties(q.get_device_index());
    const Element e = element_of(op, exponent, mantissa);
    const Number out_kind = kind_of(op, "the result", type), kind_of_bias = bias_kind(op, bias, q, n);
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::Char, op, ": q must be int8");
    const std::vector<int64_t> sizes = out_sizes(op, q, n);
    const Weights w =
        weights(op, q, fragments, scale, std::nullopt, n, q.size(-1), 1 + exponent + mantissa, group_size);
    const Tensor in = torch::stable::contiguous(q), in_scale = torch::stable::contiguous(q_scale);
    check_quantized(op, w, in, in_scale, group_size);
    const Tensor out = empty_like_device({sizes.data(), sizes.size()}, type, in);
    if (out.numel() == 0) return out;
    const Stream stream = current_stream(q.get_device_index());
    if (!has_bytes(e)) {
        check_launch(op, run_as_numbers(op, w, in, in_scale, out, out_kind, bias, kind_of_bias, e, gpu, stream));
        return out;
    }
    const Quantized p = quantized_of(w, in, in_scale, out, out_kind, bias, kind_of_bias);
    if (takes_wgmma<int8_t>(gpu, w, p.tokens)) {
        wgmma_quantized(op, p, in, 1 + e.exponent + e.mantissa, gpu.device.processors, stream,
                        [&](const Quantized& arranged, const WgmmaPlan& plan) {
                            return run_wgmma_quantized(arranged, e, plan, stream);
                        });
    } else {
        check_launch(op, run_quantized(p, e, gpu.device, stream));
    }
    return out;
}

}  // namespace
}  // namespace ptq::minifloat_cuda

STABLE_TORCH_LIBRARY_IMPL(ptq, CUDA, m) {
    m.impl("minifloat_linear_fragments", TORCH_BOX(&ptq::minifloat_cuda::linear));
    m.impl("minifloat_quantized_fragments", TORCH_BOX(&ptq::minifloat_cuda::quantized));
}
