// ptq::kv_* for CUDA. Schemas, fake kernels and references are in ptq/ops/kv_ops.py.
#include "kv_cache_cuda/torch_kv_cache.h"

namespace ptq::kv_cache_cuda {
namespace {

// What sinks there are, which were checked, into p. `held` keeps the tensors alive.
void add_sinks(Attend& p, const KeptSinks& sinks, std::vector<Tensor>& held) {
    if (!sinks.starts) return;
    held.push_back(torch::stable::contiguous(*sinks.starts));
    p.starts = static_cast<const int64_t*>(held.back().const_data_ptr());
    p.sink_keys = static_cast<const float*>(sinks.keys->const_data_ptr());
    p.sink_values = static_cast<const float*>(sinks.values->const_data_ptr());
    p.sinks = static_cast<int>(sinks.keys->size(2));
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

Tensor attend(const Tensor& q, const Tensor& k_codes, const Tensor& k_scales, const Tensor& v_codes,
              const Tensor& v_scales, int64_t length, int64_t k_bits, int64_t v_bits, double scaling,
              const std::optional<Tensor>& mask, const std::optional<Tensor>& starts,
              const std::optional<Tensor>& sink_keys, const std::optional<Tensor>& sink_values) {
    constexpr const char* op = "kv_attend";
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    cuda::properties(q.get_device_index());
    STD_TORCH_CHECK(q.dim() == 4 && k_codes.dim() == 4, op, ": q must be [batch, heads, tokens, head_dim]");
    const Tensor in = torch::stable::contiguous(direct(q));
    const std::array<int64_t, 4> sizes{q.size(0), q.size(2), q.size(1), q.size(3)};
    const Tensor out = cuda::empty_like_device({sizes.data(), sizes.size()}, in.scalar_type(), q);
    attend_into(op, in, out, {k_codes, k_scales, v_codes, v_scales, k_bits, v_bits}, length, scaling, mask,
                {starts, sink_keys, sink_values});
    return in.scalar_type() == q.scalar_type() ? out : torch::stable::to(out, q.scalar_type());
}

}  // namespace

void attend_into(const char* op, const Tensor& q, const Tensor& out, const Packed& cache, int64_t length,
                 double scaling, const std::optional<Tensor>& mask, const KeptSinks& sinks, int64_t* stored) {
    const int64_t batch = q.size(0), q_heads = q.size(1), tokens = q.size(2), d = q.size(3);
    const int64_t kv_heads = cache.k_codes.size(2);
    cuda::check_tensor(op, "the keys' codes", cache.k_codes, q, ScalarType::Byte);
    cuda::check_tensor(op, "the values' codes", cache.v_codes, q, ScalarType::Byte);
    Attend p{};
    p.k = side(op, cache.k_codes, cache.k_scales, d, cache.k_bits, false, length);
    p.v = side(op, cache.v_codes, cache.v_scales, d, cache.v_bits, true, length);
    STD_TORCH_CHECK(kv_heads > 0 && cache.k_codes.size(1) == batch && q_heads % kv_heads == 0 &&
                        cache.v_codes.size(1) == batch && cache.v_codes.size(2) == kv_heads,
                    op, ": q does not fit the cache");
    check_sinks(op, sinks, q, batch, kv_heads, d);
    if (out.numel() == 0) return;
    if (length == 0) {
        torch::stable::zero_(const_cast<Tensor&>(out));
        return;
    }
    std::vector<Tensor> held;
    describe(op, p, q, out, kv_heads, length, scaling, mask, held);
    add_sinks(p, sinks, held);
    p.stored = stored;
    p.splits = splits_of(p);
    held.push_back(cuda::work_buffer(p.work_numbers() * 4, q));
    p.partial = static_cast<float*>(held.back().mutable_data_ptr());
    cuda::check_launch(op, run_attend(p, cuda::current_stream(q.get_device_index())));
}

}  // namespace ptq::kv_cache_cuda

STABLE_TORCH_LIBRARY_IMPL(ptq, CUDA, m) {
    m.impl("kv_append", TORCH_BOX(&ptq::kv_cache_cuda::append));
    m.impl("kv_append_at", TORCH_BOX(&ptq::kv_cache_cuda::append_at));
    m.impl("kv_dequantize", TORCH_BOX(&ptq::kv_cache_cuda::dequantize));
    m.impl("kv_attend", TORCH_BOX(&ptq::kv_cache_cuda::attend));
}
