// The products with fragments for CUDA. Schemas, fake kernels, references and gradients are in quarot/fragment_ops.py.
#include "cuda/torch_cuda.h"
#include "integer_cuda/launch.cuh"

namespace ptq::integer_cuda {
namespace {

using cuda::ScalarType;
using torch::stable::Tensor;

Weights weights(const char* op, const Tensor& beside, const Tensor& fragments, const Tensor& scale,
                const std::optional<Tensor>& zero, int64_t n, int64_t k, int64_t bits, int64_t group_size) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 8, op, ": bits must be 2 to 8, found ", bits);
    STD_TORCH_CHECK(
        n < int64_t{1} << 27 && k < int64_t{1} << 20 && (n + 15) * (k / half_columns + 1) < int64_t{1} << 31, op,
        ": the weight is too large: ", n, " x ", k);
    STD_TORCH_CHECK(group_size >= 0 && group_size % half_columns == 0 && (group_size == 0 || k % group_size == 0), op,
                    ": groups of ", group_size, " do not fit fragments of ", k, " columns; they must be multiples of ",
                    half_columns, " that divide them");
    const int64_t tiles = (n + tile_rows - 1) / tile_rows, blocks = (k + block_columns - 1) / block_columns;
    const int64_t groups = group_size && k ? k / group_size : 1;
    cuda::check_tensor(op, "fragments", fragments, beside, ScalarType::Byte);
    cuda::check_tensor(op, "scale", scale, beside, ScalarType::Short);
    STD_TORCH_CHECK(fragments.dim() == 3 && fragments.size(0) == tiles && fragments.size(1) == blocks &&
                        fragments.size(2) == block_bytes(static_cast<int>(bits)),
                    op, ": fragments must be [", tiles, ", ", blocks, ", ", block_bytes(static_cast<int>(bits)),
                    "] for this weight; prepack it again");
    const auto fits = [&](const Tensor& t) {
        return t.dim() == 3 && t.size(0) == tiles && t.size(1) == groups && t.size(2) == tile_rows &&
               cuda::is_aligned(t.const_data_ptr());
    };
    STD_TORCH_CHECK(fits(scale), op, ": scale must be [", tiles, ", ", groups, ", 16] and begin at a multiple of 16");
    if (zero) {
        cuda::check_tensor(op, "zero", *zero, beside, ScalarType::Byte);
        STD_TORCH_CHECK(fits(*zero), op, ": zero must be [", tiles, ", ", groups,
                        ", 16] and begin at a multiple of 16");
    }
    STD_TORCH_CHECK(cuda::is_aligned(fragments.const_data_ptr()), op, ": fragments must begin at a multiple of 16");
    return {static_cast<const uint8_t*>(fragments.const_data_ptr()),
            static_cast<const uint16_t*>(scale.const_data_ptr()),
            zero ? static_cast<const uint8_t*>(zero->const_data_ptr()) : nullptr,
            static_cast<int>(n),
            static_cast<int>(k),
            static_cast<int>(groups),
            halves_of(static_cast<int>(k), static_cast<int>(groups))};
}

Number kind_of(const char* op, const char* name, ScalarType type) {
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16, op, ": ",
                    name, " must be float16, bfloat16 or float32");
    return type == ScalarType::Float ? Number::float32 : type == ScalarType::Half ? Number::float16 : Number::bfloat16;
}

Number bias_kind(const char* op, const std::optional<Tensor>& bias, const Tensor& beside, int64_t n) {
    if (!bias) return Number::none;
    const ScalarType type = bias->scalar_type();
    cuda::check_tensor(op, "bias", *bias, beside, type);
    STD_TORCH_CHECK(bias->numel() == n, op, ": bias has ", bias->numel(), " numbers, expected ", n);
    return kind_of(op, "bias", type);
}

std::vector<int64_t> out_sizes(const char* op, const Tensor& x, int64_t n) {
    STD_TORCH_CHECK(x.dim() > 0, op, ": x has no axis");
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = n;
    return sizes;
}

int64_t tokens_of(const Tensor& x) {
    int64_t tokens = 1;
    for (int64_t d = 0; d + 1 < x.dim(); d++) tokens *= x.size(d);
    return tokens;
}

// Many tokens, or float32 ones: W in the type of x, and torch's own product.
Tensor dense_linear(const Tensor& x, const Weights& w, const std::optional<Tensor>& bias, int bits, Stream stream) {
    constexpr const char* op = "integer_linear_fragments";
    const ScalarType type = x.scalar_type();
    const std::array<int64_t, 2> sizes{w.n, w.k};
    const Tensor plain = cuda::empty_like_device({sizes.data(), sizes.size()}, type, x);
    const Dequantize d{w, plain.mutable_data_ptr(), w.k * static_cast<int>(x.element_size()) % 16 == 0};
    if (w.n && w.k)
        cuda::check_launch(op, type == ScalarType::Float  ? run_dequantize<float>(d, bits, stream)
                               : type == ScalarType::Half ? run_dequantize<Half>(d, bits, stream)
                                                          : run_dequantize<Bfloat16>(d, bits, stream));
    std::optional<Tensor> same;
    if (bias) same = bias->scalar_type() == type ? *bias : torch::stable::to(*bias, type);
    std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(plain),
                                      torch::stable::detail::from(same)};
    STD_TORCH_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION) == 0, op,
                    ": torch's own product failed");
    return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor linear(const Tensor& x, const Tensor& fragments, const Tensor& scale, const std::optional<Tensor>& zero,
              const std::optional<Tensor>& bias, int64_t n, int64_t bits, int64_t group_size) {
    constexpr const char* op = "integer_linear_fragments";
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const cuda::Properties& device = cuda::properties(x.get_device_index());
    const ScalarType type = x.scalar_type();
    kind_of(op, "x", type);
    const std::vector<int64_t> sizes = out_sizes(op, x, n);
    const Weights w = weights(op, x, fragments, scale, zero, n, x.size(-1), bits, group_size);
    const Tensor in = torch::stable::contiguous(x);
    const int64_t tokens = tokens_of(in);
    const Number kind = bias_kind(op, bias, x, n);
    const Stream stream = cuda::current_stream(x.get_device_index());
    if (type == ScalarType::Float || tokens > most_tokens || w.k == 0)
        return dense_linear(in, w, bias, static_cast<int>(bits), stream);
    const Tensor out = cuda::empty_like_device({sizes.data(), sizes.size()}, type, in);
    if (out.numel() == 0) return out;
    const int splits = linear_splits(w, static_cast<int>(bits), static_cast<int>(tokens),
                                     {device.processors, device.shared_per_processor});
    std::optional<Tensor> partial;
    if (splits > 1) partial = cuda::work_buffer(int64_t{splits} * tokens * n * 4, in);
    const Linear p{w,
                   in.const_data_ptr(),
                   out.mutable_data_ptr(),
                   partial ? static_cast<float*>(partial->mutable_data_ptr()) : nullptr,
                   bias ? bias->const_data_ptr() : nullptr,
                   kind,
                   static_cast<int>(tokens),
                   splits,
                   cuda::is_aligned(in.const_data_ptr()) && w.k % 8 == 0};
    cuda::check_launch(op, type == ScalarType::Half ? run_linear<Half>(p, static_cast<int>(bits), stream)
                                                    : run_linear<Bfloat16>(p, static_cast<int>(bits), stream));
    return out;
}

Tensor quantized(const Tensor& q, const Tensor& q_scale, const Tensor& fragments, const Tensor& scale,
                 const std::optional<Tensor>& zero, const std::optional<Tensor>& bias, int64_t n, int64_t bits,
                 int64_t group_size, ScalarType type) {
    constexpr const char* op = "integer_quantized_fragments";
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    cuda::properties(q.get_device_index());
    const Number out_kind = kind_of(op, "the result", type);
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::Char, op, ": q must be int8");
    const std::vector<int64_t> sizes = out_sizes(op, q, n);
    const Weights w = weights(op, q, fragments, scale, zero, n, q.size(-1), bits, group_size);
    STD_TORCH_CHECK((group_size ? group_size : w.k) <= 65536, op,
                    ": sums of more than 65536 products do not fit int32");
    const Tensor in = torch::stable::contiguous(q), in_scale = torch::stable::contiguous(q_scale);
    const int64_t tokens = tokens_of(in);
    cuda::check_tensor(op, "q_scale", in_scale, q, ScalarType::Float);
    STD_TORCH_CHECK(in_scale.numel() == tokens, op, ": q_scale has ", in_scale.numel(), " numbers for ", tokens,
                    " tokens");
    STD_TORCH_CHECK(tokens < int64_t{1} << 21, op, ": at most 2^21 tokens at once");
    const Number kind = bias_kind(op, bias, q, n);
    const Tensor out = cuda::empty_like_device({sizes.data(), sizes.size()}, type, in);
    if (out.numel() == 0) return out;
    const Quantized p{w,
                      static_cast<const int8_t*>(in.const_data_ptr()),
                      static_cast<const float*>(in_scale.const_data_ptr()),
                      out.mutable_data_ptr(),
                      out_kind,
                      bias ? bias->const_data_ptr() : nullptr,
                      kind,
                      static_cast<int>(tokens),
                      cuda::is_aligned(in.const_data_ptr()) && w.k % 16 == 0};
    cuda::check_launch(op, run_quantized(p, static_cast<int>(bits), cuda::current_stream(q.get_device_index())));
    return out;
}

}  // namespace
}  // namespace ptq::integer_cuda

STABLE_TORCH_LIBRARY_IMPL(ptq, CUDA, m) {
    m.impl("integer_linear_fragments", TORCH_BOX(&ptq::integer_cuda::linear));
    m.impl("integer_quantized_fragments", TORCH_BOX(&ptq::integer_cuda::quantized));
}
