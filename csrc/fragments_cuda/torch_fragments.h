// Fragments as torch has them: checked, as the kernels take them, and decoded for torch's own product.
#pragma once

#include "cuda/torch_linear.h"
#include "fragments_cuda/wgmma_launch.cuh"

namespace ptq::fragments {

using torch::stable::Tensor;

inline Weights weights(const char* op, const Tensor& beside, const Tensor& fragments, const Tensor& scale,
                       const std::optional<Tensor>& zero, int64_t n, int64_t k, int64_t bits, int64_t group_size) {
    STD_TORCH_CHECK(
        n < int64_t{1} << 27 && k < int64_t{1} << 20 && (n + 15) * (k / half_columns + 1) < int64_t{1} << 31, op,
        ": the weight is too large: ", n, " x ", k);
    STD_TORCH_CHECK(group_size >= 0 && group_size % half_columns == 0 && (group_size == 0 || k % group_size == 0), op,
                    ": groups of ", group_size, " do not fit fragments of ", k, " columns; they must be multiples of ",
                    half_columns, " that divide them");
    const int64_t tiles = (n + tile_rows - 1) / tile_rows, blocks = (k + block_columns - 1) / block_columns;
    const int64_t groups = group_size && k ? k / group_size : 1;
    check_tensor(op, "fragments", fragments, beside, ScalarType::Byte);
    check_tensor(op, "scale", scale, beside, ScalarType::Short);
    STD_TORCH_CHECK(fragments.dim() == 3 && fragments.size(0) == tiles && fragments.size(1) == blocks &&
                        fragments.size(2) == block_bytes(static_cast<int>(bits)),
                    op, ": fragments must be [", tiles, ", ", blocks, ", ", block_bytes(static_cast<int>(bits)),
                    "] for this weight; prepack it again");
    const auto fits = [&](const Tensor& t) {
        return t.dim() == 3 && t.size(0) == tiles && t.size(1) == groups && t.size(2) == tile_rows &&
               is_aligned(t.const_data_ptr());
    };
    STD_TORCH_CHECK(fits(scale), op, ": scale must be [", tiles, ", ", groups, ", 16] and begin at a multiple of 16");
    if (zero) {
        check_tensor(op, "zero", *zero, beside, ScalarType::Byte);
        STD_TORCH_CHECK(fits(*zero), op, ": zero must be [", tiles, ", ", groups,
                        ", 16] and begin at a multiple of 16");
    }
    STD_TORCH_CHECK(is_aligned(fragments.const_data_ptr()), op, ": fragments must begin at a multiple of 16");
    return {static_cast<const uint8_t*>(fragments.const_data_ptr()),
            static_cast<const uint16_t*>(scale.const_data_ptr()),
            zero ? static_cast<const uint8_t*>(zero->const_data_ptr()) : nullptr,
            static_cast<int>(n),
            static_cast<int>(k),
            static_cast<int>(groups),
            halves_of(static_cast<int>(k), static_cast<int>(groups))};
}

// Many tokens, or float32 ones: W in the type of x, made by run(Dequantize, type), and torch's own product.
template <class Run>
Tensor dense_linear(const char* op, const Tensor& x, const Weights& w, const std::optional<Tensor>& bias, Run run) {
    const std::array<int64_t, 2> sizes{w.n, w.k};
    const Tensor plain = empty_like_device({sizes.data(), sizes.size()}, x.scalar_type(), x);
    const Dequantize d{w, plain.mutable_data_ptr(), w.k * static_cast<int>(x.element_size()) % 16 == 0};
    if (w.n && w.k) check_launch(op, run(d, x.scalar_type()));
    return torch_linear(op, x, plain, bias);
}

// What `launch_linear` needs of x (contiguous, float16 or bfloat16) and of the result; `partial` is kept by the caller.
inline Linear linear_of(const Weights& w, const Tensor& x, const Tensor& out, Number out_kind,
                        const std::optional<Tensor>& bias, Number bias_kind, int splits,
                        std::optional<Tensor>& partial) {
    const int64_t tokens = tokens_of(x);
    if (splits > 1) partial = work_buffer(int64_t{splits} * tokens * w.n * 4, x);
    return {w,
            x.const_data_ptr(),
            out.mutable_data_ptr(),
            partial ? static_cast<float*>(partial->mutable_data_ptr()) : nullptr,
            bias ? bias->const_data_ptr() : nullptr,
            out_kind,
            bias_kind,
            nullptr,
            static_cast<int>(tokens),
            splits,
            is_aligned(x.const_data_ptr()) && w.k % 8 == 0};
}

// What `launch_quantized` needs of q and its scales, both contiguous.
inline void check_quantized(const char* op, const Weights& w, const Tensor& q, const Tensor& q_scale,
                            int64_t group_size) {
    STD_TORCH_CHECK((group_size ? group_size : w.k) <= 65536, op,
                    ": sums of more than 65536 products do not fit int32");
    const int64_t tokens = tokens_of(q);
    check_token_scale(op, q_scale, q, tokens);
    STD_TORCH_CHECK(tokens < int64_t{1} << 21, op, ": at most 2^21 tokens at once");
}
inline Quantized quantized_of(const Weights& w, const Tensor& q, const Tensor& q_scale, const Tensor& out,
                              Number out_kind, const std::optional<Tensor>& bias, Number bias_kind) {
    return {w,
            static_cast<const int8_t*>(q.const_data_ptr()),
            static_cast<const float*>(q_scale.const_data_ptr()),
            out.mutable_data_ptr(),
            bias ? bias->const_data_ptr() : nullptr,
            out_kind,
            bias_kind,
            static_cast<int>(tokens_of(q)),
            is_aligned(q.const_data_ptr()) && w.k % 16 == 0};
}

// Contiguous tokens as the products by wgmma take them.
template <class X>
Tensor arranged(const char* op, const Tensor& x, int k, Stream stream) {
    const int tokens = static_cast<int>(tokens_of(x));
    const Tensor to = work_buffer(arranged_bytes<X>(tokens, k), x);
    const Arrange p{x.const_data_ptr(), static_cast<uint8_t*>(to.mutable_data_ptr()), tokens, k,
                    is_aligned(x.const_data_ptr()) && k * sizeof(X) % 16 == 0};
    check_launch(op, launch_arrange<X>(p, stream));
    return to;
}
// Whether there are tokens enough for wgmma, and not too many: of two bytes, it is faster for more to decode the weight
// for torch's own product, where that `will_do`. X is as large as one of their numbers.
template <class X>
bool takes_wgmma(const Properties& gpu, const Weights& w, int64_t tokens, bool will_do = sizeof(X) == 2) {
    const int64_t most = !will_do ? int64_t{1} << 21 : w.groups == 1 && w.n >= 8192 ? 256 : 128;
    return gpu.takes_wgmma && tokens > few_wgmma_tokens<X>(w) && tokens <= most && suits_wgmma<X>(w);
}
// The product by wgmma of float16 or bfloat16 tokens x, or of int8 ones: run(Linear or Quantized, WgmmaPlan).
template <class Run>
void wgmma_linear(const char* op, Linear p, const Tensor& x, int bits, int processors, Stream stream, Run run) {
    const WgmmaPlan plan = wgmma_plan(p.w, p.tokens, processors, wgmma_tiles(bits), 8);
    const Tensor tokens = arranged<Half>(op, x, p.w.k, stream);  // bits are moved, of either type
    std::optional<Tensor> partial;
    if (plan.splits > 1) partial = work_buffer(int64_t{plan.splits} * p.tokens * p.w.n * 4, x);
    p.x = tokens.const_data_ptr();
    p.partial = partial ? static_cast<float*>(partial->mutable_data_ptr()) : nullptr;
    p.splits = plan.splits;
    check_launch(op, run(p, plan));
}
template <class Run>
void wgmma_quantized(const char* op, Quantized p, const Tensor& q, int bits, int processors, Stream stream, Run run) {
    const WgmmaPlan plan = wgmma_plan(p.w, p.tokens, processors, wgmma_tiles(bits), 1);
    const Tensor tokens = arranged<int8_t>(op, q, p.w.k, stream);
    p.q = static_cast<const int8_t*>(tokens.const_data_ptr());
    check_launch(op, run(p, plan));
}

}  // namespace ptq::fragments
