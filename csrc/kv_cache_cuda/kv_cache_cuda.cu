// ptq::kv_* for CUDA. Schemas, fake kernels and references are in ptq/ops/kv_ops.py.
#include "cuda/torch_cuda.h"
#include "kv_cache_cuda/launch.cuh"

namespace ptq::kv_cache_cuda {
namespace {

using cuda::ScalarType;
using torch::stable::Tensor;

// Checks that codes and scales are a side of the cache with room for `length` tokens.
Side side(const char* op, const Tensor& codes, const Tensor& scales, int64_t d, int64_t bits, bool channel_major,
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

bool is_direct(ScalarType type) {
    return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}
Tensor direct(const Tensor& x) {
    return is_direct(x.scalar_type()) ? x : torch::stable::to(x, ScalarType::Float);
}
Number kind_of(ScalarType type) {
    return type == ScalarType::Float ? Number::float32 : type == ScalarType::Half ? Number::float16 : Number::bfloat16;
}

// `start_at` is where `start` stands on the device, or null.
void append_from(const char* op, const Tensor& codes, const Tensor& scales, const Tensor& x, int64_t start,
                 const int64_t* start_at, int64_t bits, double clip, bool channel_major) {
    STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == codes.get_device_index(), op,
                    ": x is on another device than the cache; move it there");
    STD_TORCH_CHECK(x.dim() == 4 && codes.dim() == 4 && x.size(0) == codes.size(1) && x.size(1) == codes.size(2), op,
                    ": x does not fit the cache");
    const int64_t count = x.size(2), d = x.size(3), room = codes.size(0) * chunk;
    STD_TORCH_CHECK(start >= 0 && start <= room - count, op, ": ", count, " tokens behind ", start, " in room for ",
                    room);
    const Side to = side(op, codes, scales, d, bits, channel_major, start + count);
    if (count == 0 || to.heads == 0) return;
    STD_TORCH_CHECK(to.heads * count < int64_t{1} << 31, op, ": too many tokens at once");
    Tensor in = direct(x);
    if (in.stride(3) != 1) in = torch::stable::contiguous(in);
    const Append p{to,
                   in.const_data_ptr(),
                   kind_of(in.scalar_type()),
                   in.stride(0),
                   in.stride(1),
                   in.stride(2),
                   static_cast<int>(x.size(1)),
                   static_cast<int>(start),
                   static_cast<int>(count),
                   static_cast<float>(clip),
                   start_at,
                   static_cast<int>(room)};
    cuda::check_launch(op, run_append(p, cuda::current_stream(codes.get_device_index())));
}

void append(const Tensor& codes, const Tensor& scales, const Tensor& x, int64_t start, int64_t bits, double clip,
            bool channel_major) {
    const torch::stable::accelerator::DeviceGuard guard(codes.get_device_index());
    cuda::properties(codes.get_device_index());
    append_from("kv_append", codes, scales, x, start, nullptr, bits, clip, channel_major);
}

void append_at(const Tensor& codes, const Tensor& scales, const Tensor& x, const Tensor& start, int64_t bits,
               double clip, bool channel_major) {
    constexpr const char* op = "kv_append_at";
    const torch::stable::accelerator::DeviceGuard guard(codes.get_device_index());
    cuda::properties(codes.get_device_index());
    cuda::check_tensor(op, "start", start, codes, ScalarType::Long);
    STD_TORCH_CHECK(start.numel() == 1, op, ": start must be one number, found ", start.numel());
    append_from(op, codes, scales, x, 0, static_cast<const int64_t*>(start.const_data_ptr()), bits, clip,
                channel_major);
}

Tensor dequantize(const Tensor& codes, const Tensor& scales, int64_t length, int64_t d, int64_t bits,
                  bool channel_major) {
    constexpr const char* op = "kv_dequantize";
    const torch::stable::accelerator::DeviceGuard guard(codes.get_device_index());
    cuda::properties(codes.get_device_index());
    const Side from = side(op, codes, scales, d, bits, channel_major, length);
    const std::array<int64_t, 4> sizes{codes.size(1), codes.size(2), length, d};
    const Tensor out = cuda::empty_like_device({sizes.data(), sizes.size()}, ScalarType::Float, codes);
    STD_TORCH_CHECK(from.heads < 65536, op, ": at most 65535 heads of all rows together, found ", from.heads);
    if (out.numel() == 0) return out;
    const Dequantize p{from, static_cast<float*>(out.mutable_data_ptr()), static_cast<int>(length)};
    cuda::check_launch(op, run_dequantize(p, cuda::current_stream(codes.get_device_index())));
    return out;
}

// What sinks there are, into p. `held` keeps the tensors alive.
void add_sinks(const char* op, Attend& p, const Tensor& beside, const Tensor& starts, const Tensor& keys,
               const Tensor& values, int64_t batch, std::vector<Tensor>& held) {
    for (const Tensor* x : {&keys, &values}) {
        cuda::check_tensor(op, "the sinks", *x, beside, ScalarType::Float);
        STD_TORCH_CHECK(x->dim() == 4 && x->size(0) == batch && x->size(1) == p.kv_heads &&
                            x->size(2) == keys.size(2) && x->size(2) <= chunk && x->size(3) == p.k.d,
                        op, ": the sinks have a wrong shape");
    }
    held.push_back(torch::stable::contiguous(starts));
    cuda::check_tensor(op, "starts", held.back(), beside, ScalarType::Long);
    STD_TORCH_CHECK(starts.dim() == 1 && starts.size(0) == batch, op, ": starts have a wrong shape");
    p.starts = static_cast<const int64_t*>(held.back().const_data_ptr());
    p.sink_keys = static_cast<const float*>(keys.const_data_ptr());
    p.sink_values = static_cast<const float*>(values.const_data_ptr());
    p.sinks = static_cast<int>(keys.size(2));
}

Tensor attend(const Tensor& q, const Tensor& k_codes, const Tensor& k_scales, const Tensor& v_codes,
              const Tensor& v_scales, int64_t length, int64_t k_bits, int64_t v_bits, double scaling,
              const std::optional<Tensor>& mask, const std::optional<Tensor>& starts,
              const std::optional<Tensor>& sink_keys, const std::optional<Tensor>& sink_values) {
    constexpr const char* op = "kv_attend";
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    cuda::properties(q.get_device_index());
    STD_TORCH_CHECK(q.dim() == 4 && k_codes.dim() == 4, op, ": q must be [batch, heads, tokens, head_dim]");
    const int64_t batch = q.size(0), q_heads = q.size(1), tokens = q.size(2), d = q.size(3);
    const int64_t kv_heads = k_codes.size(2);
    cuda::check_tensor(op, "the keys' codes", k_codes, q, ScalarType::Byte);
    cuda::check_tensor(op, "the values' codes", v_codes, q, ScalarType::Byte);
    Attend p{};
    p.k = side(op, k_codes, k_scales, d, k_bits, false, length);
    p.v = side(op, v_codes, v_scales, d, v_bits, true, length);
    STD_TORCH_CHECK(kv_heads > 0 && k_codes.size(1) == batch && q_heads % kv_heads == 0 && p.v.heads == p.k.heads, op,
                    ": q does not fit the cache");
    STD_TORCH_CHECK(p.k.heads < 65536 && q_heads / kv_heads * tokens < int64_t{1} << 16, op,
                    ": too many heads or query tokens: at most 65535 key-value heads of all rows together, and as "
                    "many query heads of a group times query tokens");
    const Tensor in = torch::stable::contiguous(direct(q));
    const ScalarType type = in.scalar_type();
    const std::array<int64_t, 4> sizes{batch, tokens, q_heads, d};
    const Tensor out = cuda::empty_like_device({sizes.data(), sizes.size()}, type, q);
    const bool same = type == q.scalar_type();
    if (out.numel() == 0) return out;
    if (length == 0) {
        torch::stable::zero_(const_cast<Tensor&>(out));
        return same ? out : torch::stable::to(out, q.scalar_type());
    }
    p.kv_heads = static_cast<int>(kv_heads), p.groups = static_cast<int>(q_heads / kv_heads);
    p.tokens = static_cast<int>(tokens), p.length = static_cast<int>(length);
    p.scaling = static_cast<float>(scaling);
    p.q = in.const_data_ptr(), p.q_kind = kind_of(type);
    p.parts = type == ScalarType::BFloat16 ? 1 : type == ScalarType::Half ? 2 : 3;
    p.out = out.mutable_data_ptr(), p.out_kind = p.q_kind;
    std::vector<Tensor> held;
    if (mask) {
        STD_TORCH_CHECK(mask->dim() == 4 && mask->size(1) == 1 && (mask->size(0) == 1 || mask->size(0) == batch) &&
                            mask->size(2) == tokens && mask->size(3) == length,
                        op, ": the mask has a wrong shape");
        held.push_back(torch::stable::contiguous(*mask));
        cuda::check_tensor(op, "the mask", held.back(), q, ScalarType::Bool);
        p.mask = static_cast<const uint8_t*>(held.back().const_data_ptr());
        p.mask_batch = mask->size(0) == 1 ? 0 : tokens * length;
    }
    if (starts && sink_keys && sink_values) add_sinks(op, p, q, *starts, *sink_keys, *sink_values, batch, held);
    p.splits = splits_of(p);
    held.push_back(cuda::work_buffer(p.work_numbers() * 4, q));
    p.partial = static_cast<float*>(held.back().mutable_data_ptr());
    cuda::check_launch(op, run_attend(p, cuda::current_stream(q.get_device_index())));
    return same ? out : torch::stable::to(out, q.scalar_type());
}

}  // namespace
}  // namespace ptq::kv_cache_cuda

STABLE_TORCH_LIBRARY_IMPL(ptq, CUDA, m) {
    m.impl("kv_append", TORCH_BOX(&ptq::kv_cache_cuda::append));
    m.impl("kv_append_at", TORCH_BOX(&ptq::kv_cache_cuda::append_at));
    m.impl("kv_dequantize", TORCH_BOX(&ptq::kv_cache_cuda::dequantize));
    m.impl("kv_attend", TORCH_BOX(&ptq::kv_cache_cuda::attend));
}
