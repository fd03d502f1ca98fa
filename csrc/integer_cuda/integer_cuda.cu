// The products with fragments of integers for CUDA. Schemas, fake kernels, references and gradients are in
// quarot/fragment_ops.py.
#include "fragments_cuda/torch_fragments.h"
#include "integer_cuda/launch.cuh"

namespace ptq::integer_cuda {
namespace {

using torch::stable::Tensor;

int width_of(const char* op, int64_t bits) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 8, op, ": bits must be 2 to 8, found ", bits);
    return static_cast<int>(bits);
}

Tensor linear(const Tensor& x, const Tensor& fragments, const Tensor& scale, const std::optional<Tensor>& zero,
              const std::optional<Tensor>& bias, int64_t n, int64_t bits_, int64_t group_size) {
    constexpr const char* op = "integer_linear_fragments";
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const cuda::Properties& gpu = cuda::properties(x.get_device_index());
    const int bits = width_of(op, bits_);
    const ScalarType type = x.scalar_type();
    const Number kind = kind_of(op, "x", type), kind_of_bias = bias_kind(op, bias, x, n);
    const std::vector<int64_t> sizes = out_sizes(op, x, n);
    const Weights w = weights(op, x, fragments, scale, zero, n, x.size(-1), bits, group_size);
    const Tensor in = torch::stable::contiguous(x);
    const int64_t tokens = tokens_of(in);
    const Stream stream = current_stream(x.get_device_index());
    const bool by_wgmma = type != ScalarType::Float && takes_wgmma<Half>(gpu, w, tokens);
    if (!by_wgmma && (type == ScalarType::Float || tokens > most_tokens || w.k == 0))
        return dense_linear(op, in, w, bias, [&](const Dequantize& d, ScalarType to) {
            return to == ScalarType::Float  ? run_dequantize<float>(d, bits, stream)
                   : to == ScalarType::Half ? run_dequantize<Half>(d, bits, stream)
                                            : run_dequantize<Bfloat16>(d, bits, stream);
        });
    const Tensor out = empty_like_device({sizes.data(), sizes.size()}, type, in);
    if (out.numel() == 0) return out;
    std::optional<Tensor> partial;
    if (by_wgmma) {
        const Linear p = linear_of(w, in, out, kind, bias, kind_of_bias, 1, partial);
        wgmma_linear(op, p, in, bits, gpu.device.processors, stream,
                     [&](const Linear& arranged, const WgmmaPlan& plan) {
                         return type == ScalarType::Half ? run_wgmma_linear<Half>(arranged, bits, plan, stream)
                                                         : run_wgmma_linear<Bfloat16>(arranged, bits, plan, stream);
                     });
        return out;
    }
    const int splits = linear_splits(w, bits, static_cast<int>(tokens), gpu.device);
    const Linear p = linear_of(w, in, out, kind, bias, kind_of_bias, splits, partial);
    check_launch(op, type == ScalarType::Half ? run_linear<Half>(p, bits, gpu.device, stream)
                                              : run_linear<Bfloat16>(p, bits, gpu.device, stream));
    return out;
}

Tensor quantized(const Tensor& q, const Tensor& q_scale, const Tensor& fragments, const Tensor& scale,
                 const std::optional<Tensor>& zero, const std::optional<Tensor>& bias, int64_t n, int64_t bits_,
                 int64_t group_size, int64_t input_bits, ScalarType type) {
    constexpr const char* op = "integer_quantized_fragments";
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    const cuda::Properties& gpu = cuda::properties(q.get_device_index());
    const int bits = width_of(op, bits_);
    const Number out_kind = kind_of(op, "the result", type), kind_of_bias = bias_kind(op, bias, q, n);
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::Char, op, ": q must be int8");
    const std::vector<int64_t> sizes = out_sizes(op, q, n);
    const Weights w = weights(op, q, fragments, scale, zero, n, q.size(-1), bits, group_size);
    const Tensor in = torch::stable::contiguous(q), in_scale = torch::stable::contiguous(q_scale);
    check_quantized(op, w, in, in_scale, group_size);
    const Tensor out = empty_like_device({sizes.data(), sizes.size()}, type, in);
    if (out.numel() == 0) return out;
    const Quantized p = quantized_of(w, in, in_scale, out, out_kind, bias, kind_of_bias);
    const Stream stream = current_stream(q.get_device_index());
    if (bits == 4 && input_bits <= 4 && gpu.multiplies_nibbles && p.tokens > few_tokens && is_narrow(w)) {
        const Tensor packed = work_buffer(packed_bytes(p.tokens, w.k), in);
        check_launch(op, run_narrow(p, packed.mutable_data_ptr(), stream));
    } else if (takes_wgmma<int8_t>(gpu, w, p.tokens) && !(bits == 8 && zero)) {
        wgmma_quantized(op, p, in, bits, gpu.device.processors, stream,
                        [&](const Quantized& arranged, const WgmmaPlan& plan) {
                            return run_wgmma_quantized(arranged, bits, plan, stream);
                        });
    } else {
        check_launch(op, run_quantized(p, bits, gpu.device, stream));
    }
    return out;
}

}  // namespace
}  // namespace ptq::integer_cuda

STABLE_TORCH_LIBRARY_IMPL(ptq, CUDA, m) {
    m.impl("integer_linear_fragments", TORCH_BOX(&ptq::integer_cuda::linear));
    m.impl("integer_quantized_fragments", TORCH_BOX(&ptq::integer_cuda::quantized));
}
