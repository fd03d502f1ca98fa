// The products with E8P fragments for CUDA. Schemas, fake kernels, references and gradients are in
// quip_sharp/fragment_ops.py.
#include "cuda/torch_linear.h"
#include "e8p_cuda/launch.cuh"

namespace ptq::e8p_cuda {
namespace {

using cuda::ScalarType;
using torch::stable::Tensor;

Weights weights(const char* op, const Tensor& beside, const Tensor& fragments, const Tensor& scale, int64_t n,
                int64_t k, int64_t bits) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 4, op, ": bits must be 2 to 4, found ", bits);
    STD_TORCH_CHECK(n >= 0 && n < int64_t{1} << 20 && k >= 0 && k <= 65536, op, ": the weight is too large: ", n, " x ",
                    k, "; at most 2^20 rows of 65536 columns");
    const int64_t tiles = (n + tile_rows - 1) / tile_rows, blocks = (k + block_columns - 1) / block_columns;
    const int64_t size = block_bytes(static_cast<int>(bits));
    cuda::check_tensor(op, "fragments", fragments, beside, ScalarType::Byte);
    cuda::check_tensor(op, "scale", scale, beside, ScalarType::Int);
    STD_TORCH_CHECK(
        fragments.dim() == 3 && fragments.size(0) == tiles && fragments.size(1) == blocks && fragments.size(2) == size,
        op, ": fragments must be [", tiles, ", ", blocks, ", ", size, "] for this weight; prepack it again");
    STD_TORCH_CHECK(scale.numel() == 1, op, ": scale has ", scale.numel(), " numbers, expected one");
    STD_TORCH_CHECK(cuda::is_aligned(fragments.const_data_ptr()), op, ": fragments must begin at a multiple of 16");
    return {static_cast<const uint8_t*>(fragments.const_data_ptr()), static_cast<const float*>(scale.const_data_ptr()),
            static_cast<int>(n), static_cast<int>(k)};
}

Tensor plain(const char* op, const Weights& w, const Tensor& beside, ScalarType type, int64_t bits_, Stream stream) {
    const std::array<int64_t, 2> sizes{w.n, w.k};
    const Tensor out = cuda::empty_like_device({sizes.data(), sizes.size()}, type, beside);
    const int64_t row_bytes = w.k * static_cast<int64_t>(out.element_size());
    const Dequantize d{w, out.mutable_data_ptr(), row_bytes % (type == ScalarType::Char ? 8 : 16) == 0};
    const int bits = static_cast<int>(bits_);
    if (out.numel() == 0) return out;
    cuda::check_launch(op, type == ScalarType::Char    ? run_dequantize<int8_t>(d, bits, stream)
                           : type == ScalarType::Float ? run_dequantize<float>(d, bits, stream)
                           : type == ScalarType::Half  ? run_dequantize<Half>(d, bits, stream)
                                                       : run_dequantize<Bfloat16>(d, bits, stream));
    return out;
}

Tensor dequantize(const Tensor& fragments, const Tensor& scale, int64_t n, int64_t bits, int64_t k) {
    constexpr const char* op = "e8p_dequantize_fragments";
    const torch::stable::accelerator::DeviceGuard guard(fragments.get_device_index());
    cuda::properties(fragments.get_device_index());
    return plain(op, weights(op, fragments, fragments, scale, n, k, bits), fragments, ScalarType::Float, bits,
                 cuda::current_stream(fragments.get_device_index()));
}

Tensor linear(const Tensor& x, const Tensor& fragments, const Tensor& scale, const std::optional<Tensor>& bias,
              int64_t n, int64_t bits) {
    constexpr const char* op = "e8p_linear_fragments";
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const Device& device = cuda::properties(x.get_device_index()).device;
    const ScalarType type = x.scalar_type();
    const Number out_kind = cuda::kind_of(op, "x", type);
    const std::vector<int64_t> sizes = cuda::out_sizes(op, x, n);
    const Weights w = weights(op, x, fragments, scale, n, x.size(-1), bits);
    const Tensor in = torch::stable::contiguous(x);
    const int64_t tokens = cuda::tokens_of(in);
    const Number kind = cuda::bias_kind(op, bias, x, n);
    const Stream stream = cuda::current_stream(x.get_device_index());
    if (type == ScalarType::Float || tokens > most_half_tokens || w.k == 0)
        return cuda::torch_linear(op, in, plain(op, w, in, type, bits, stream), bias);
    const Tensor out = cuda::empty_like_device({sizes.data(), sizes.size()}, type, in);
    if (out.numel() == 0) return out;
    Linear p{};
    p.w = w, p.x = in.const_data_ptr();
    p.out = out.mutable_data_ptr(), p.out_kind = out_kind;
    p.bias = bias ? bias->const_data_ptr() : nullptr, p.bias_kind = kind;
    p.tokens = static_cast<int>(tokens);
    p.aligned = cuda::is_aligned(p.x) && w.k % 8 == 0;
    cuda::check_launch(op, type == ScalarType::Half ? run_linear<Half>(p, static_cast<int>(bits), device, stream)
                                                    : run_linear<Bfloat16>(p, static_cast<int>(bits), device, stream));
    return out;
}

// Sums of many tokens with points: torch's own product of bytes, which is exact.
Tensor point_sums(const char* op, const Tensor& q, const Tensor& points) {
    std::array<StableIValue, 2> stack{torch::stable::detail::from(q),
                                      torch::stable::detail::from(torch::stable::transpose(points, 0, 1))};
    STD_TORCH_CHECK(torch_call_dispatcher("aten::_int_mm", "", stack.data(), TORCH_ABI_VERSION) == 0, op,
                    ": torch's own product of int8 failed");
    return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor quantized(const Tensor& q, const Tensor& q_scale, const Tensor& fragments, const Tensor& scale,
                 const std::optional<Tensor>& bias, int64_t n, int64_t bits, ScalarType type) {
    constexpr const char* op = "e8p_quantized_fragments";
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    const Device& device = cuda::properties(q.get_device_index()).device;
    const Number out_kind = cuda::kind_of(op, "the result", type);
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::Char, op, ": q must be int8");
    const std::vector<int64_t> sizes = cuda::out_sizes(op, q, n);
    const Weights w = weights(op, q, fragments, scale, n, q.size(-1), bits);
    const Tensor in = torch::stable::contiguous(q), in_scale = torch::stable::contiguous(q_scale);
    const int64_t tokens = cuda::tokens_of(in);
    cuda::check_token_scale(op, in_scale, q, tokens);
    STD_TORCH_CHECK(tokens < int64_t{1} << 20, op, ": at most 2^20 tokens at once");
    const Number kind = cuda::bias_kind(op, bias, q, n);
    const Tensor out = cuda::empty_like_device({sizes.data(), sizes.size()}, type, in);
    if (out.numel() == 0) return out;
    const Stream stream = cuda::current_stream(q.get_device_index());
    const void* bias_at = bias ? bias->const_data_ptr() : nullptr;
    const float* scale_at = static_cast<const float*>(in_scale.const_data_ptr());
    // torch multiplies bytes from 17 tokens on, where rows and columns are multiples of 8.
    if (tokens > most_exact_tokens && w.k % 8 == 0 && w.n % 8 == 0 && w.k > 0) {
        const std::array<int64_t, 2> flat{tokens, w.k};
        const Tensor rows = torch::stable::reshape(in, {flat.data(), flat.size()});
        const Tensor sums = point_sums(op, rows, plain(op, w, in, ScalarType::Char, bits, stream));
        const Scaled p{static_cast<const int32_t*>(sums.const_data_ptr()),
                       w.scale,
                       scale_at,
                       out.mutable_data_ptr(),
                       out_kind,
                       bias_at,
                       kind,
                       out.numel(),
                       w.n};
        cuda::check_launch(op, run_scale(p, stream));
        return out;
    }
    Linear p{};
    p.w = w, p.x = in.const_data_ptr(), p.q_scale = scale_at;
    p.out = out.mutable_data_ptr(), p.out_kind = out_kind;
    p.bias = bias_at, p.bias_kind = kind;
    p.tokens = static_cast<int>(tokens);
    p.aligned = cuda::is_aligned(p.x) && w.k % 16 == 0;
    cuda::check_launch(op, run_linear<int8_t>(p, static_cast<int>(bits), device, stream));
    return out;
}

}  // namespace
}  // namespace ptq::e8p_cuda

STABLE_TORCH_LIBRARY_IMPL(ptq, CUDA, m) {
    m.impl("e8p_dequantize_fragments", TORCH_BOX(&ptq::e8p_cuda::dequantize));
    m.impl("e8p_linear_fragments", TORCH_BOX(&ptq::e8p_cuda::linear));
    m.impl("e8p_quantized_fragments", TORCH_BOX(&ptq::e8p_cuda::quantized));
}
