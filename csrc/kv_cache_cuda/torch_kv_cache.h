// What the ops on keys and values for CUDA share: tensors, checked, as the kernels take them.
#pragma once

#include "cuda/torch_cuda.h"
#include "kv_cache_cuda/launch.cuh"

namespace ptq::kv_cache_cuda {

using cuda::ScalarType;
using torch::stable::Tensor;

// Checks that codes and scales are a side of the cache with room for `length` tokens.
inline Side side(const char* op, const Tensor& codes, const Tensor& scales, int64_t d, int64_t bits, bool channel_major,
                 int64_t length) {
    STD_TORCH_CHECK((bits >= 2 && bits <= 4) || bits == 6 || bits == 8, op, ": bits must be 2, 3, 4, 6 or 8");
    STD_TORCH_CHECK(d > 0 && d <= most_channels, op, ": head_dim must be 1 to ", most_channels, ", found ", d);
    cuda::check_tensor(op, "codes", codes, codes, ScalarType::Byte);
    cuda::check_tensor(op, "scales", scales, codes, ScalarType::BFloat16);
    const int width = static_cast<int>(bits);
    STD_TORCH_CHECK(codes.dim() == 4 && codes.size(3) == chunk * 4 * words_of(static_cast<int>(d), width), op,
                    ": codes have a wrong shape");
    STD_TORCH_CHECK(scales.dim() == 5 && scales.size(0) == codes.size(0) && scales.size(1) == codes.size(1) &&
                        scales.size(2) == codes.size(2) && scales.size(3) == 2 && scales.size(4) == chunk,
                    op, ": scales have a wrong shape");
    STD_TORCH_CHECK(length >= 0 && length <= codes.size(0) * chunk && length < int64_t{1} << 30, op, ": ", length,
                    " tokens do not fit");
    STD_TORCH_CHECK(cuda::is_aligned(codes.const_data_ptr()) && cuda::is_aligned(scales.const_data_ptr()), op,
                    ": codes and scales must begin at a multiple of 16");
    return {static_cast<uint32_t*>(const_cast<void*>(codes.const_data_ptr())),
            static_cast<uint16_t*>(const_cast<void*>(scales.const_data_ptr())),
            static_cast<int>(codes.size(1) * codes.size(2)),
            static_cast<int>(d),
            width,
            channel_major};
}

inline bool is_direct(ScalarType type) {
    return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}
inline Tensor direct(const Tensor& x) {
    return is_direct(x.scalar_type()) ? x : torch::stable::to(x, ScalarType::Float);
}
inline Number kind_of(ScalarType type) {
    return type == ScalarType::Float ? Number::float32 : type == ScalarType::Half ? Number::float16 : Number::bfloat16;
}

// What is refused, before anything is stored.
inline void check_attention(const char* op, const Tensor& q, int64_t batch, int64_t kv_heads, int64_t rows,
                            int64_t tokens, int64_t length, const std::optional<Tensor>& mask) {
    STD_TORCH_CHECK(batch * kv_heads < 65536 && rows < int64_t{1} << 16, op,
                    ": too many heads or query tokens: at most 65535 key-value heads of all rows together, and as "
                    "many query heads of a group times query tokens");
    if (!mask) return;
    STD_TORCH_CHECK(mask->dim() == 4 && mask->size(1) == 1 && (mask->size(0) == 1 || mask->size(0) == batch) &&
                        mask->size(2) == tokens && mask->size(3) == length,
                    op, ": the mask has a wrong shape");
    STD_TORCH_CHECK(
        mask->is_cuda() && mask->get_device_index() == q.get_device_index() && mask->scalar_type() == ScalarType::Bool,
        op, ": the mask must be of bools, on the device of the input");
}

// What attention of q [batch, heads, tokens, d], contiguous, into out [batch, tokens, heads, d] is whatever the cache.
// `held` keeps tensors alive.
inline void describe(const char* op, Attend& p, const Tensor& q, const Tensor& out, int64_t kv_heads, int64_t length,
                     double scaling, const std::optional<Tensor>& mask, std::vector<Tensor>& held) {
    const int64_t batch = q.size(0), groups = q.size(1) / kv_heads, tokens = q.size(2);
    check_attention(op, q, batch, kv_heads, groups * tokens, tokens, length, mask);
    p.kv_heads = static_cast<int>(kv_heads), p.groups = static_cast<int>(groups);
    p.tokens = static_cast<int>(tokens), p.length = static_cast<int>(length);
    p.scaling = static_cast<float>(scaling);
    p.q = q.const_data_ptr(), p.q_kind = p.out_kind = kind_of(q.scalar_type());
    p.parts = p.q_kind == Number::bfloat16 ? 1 : p.q_kind == Number::float16 ? 2 : 3;
    p.out = out.mutable_data_ptr();
    if (!mask) return;
    // One for all rows of the batch may come as an expanded one, which is not copied for each of them.
    const bool shared = mask->size(0) == 1 || mask->stride(0) == 0;
    const bool is_flat = mask->stride(3) == 1 && mask->stride(2) == length;
    held.push_back(shared && is_flat ? *mask : torch::stable::contiguous(*mask));
    p.mask = static_cast<const uint8_t*>(held.back().const_data_ptr());
    p.mask_batch = shared ? 0 : tokens * length;
}

// Both sides of a packed cache.
struct Packed {
    const Tensor &k_codes, &k_scales, &v_codes, &v_scales;
    int64_t k_bits, v_bits;
};

// Its sinks, which are all there or none.
struct KeptSinks {
    const std::optional<Tensor>&starts, &keys, &values;
};
inline void check_sinks(const char* op, const KeptSinks& sinks, const Tensor& beside, int64_t batch, int64_t kv_heads,
                        int64_t d) {
    STD_TORCH_CHECK(!sinks.starts == !sinks.keys && !sinks.starts == !sinks.values, op, ": sinks without all parts");
    if (!sinks.starts) return;
    for (const Tensor* x : {&*sinks.keys, &*sinks.values}) {
        cuda::check_tensor(op, "the sinks", *x, beside, ScalarType::Float);
        STD_TORCH_CHECK(x->dim() == 4 && x->size(0) == batch && x->size(1) == kv_heads &&
                            x->size(2) == sinks.keys->size(2) && x->size(2) <= chunk && x->size(3) == d,
                        op, ": the sinks have a wrong shape");
    }
    const Tensor& starts = *sinks.starts;
    STD_TORCH_CHECK(starts.is_cuda() && starts.get_device_index() == beside.get_device_index() &&
                        starts.scalar_type() == ScalarType::Long && starts.dim() == 1 && starts.size(0) == batch,
                    op, ": starts must be one int64 number of each row, on the device of the input");
}

// ptq::kv_attend of q, contiguous and of a type that kernels read, into out. `stored`: as in Attend.
void attend_into(const char* op, const Tensor& q, const Tensor& out, const Packed& cache, int64_t length,
                 double scaling, const std::optional<Tensor>& mask, const KeptSinks& sinks, int64_t* stored = nullptr);

}  // namespace ptq::kv_cache_cuda
