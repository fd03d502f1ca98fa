// ptq::decode_attention and ptq::kv_decode_attention for CUDA. Schemas, fake kernels and references are in
// ptq/ops/steps.py and ptq/ops/kv_step.py.
#include "kv_cache_cuda/torch_kv_cache.h"

namespace ptq::kv_cache_cuda {
namespace {

// Rows of tokens, and what is done to them before attention.
struct Decoded {
    const char* op;
    Tensor q, k, v, cos, sin, queries;
    int64_t kv_heads, d;
    int64_t* start_at = nullptr;

    Decoded(const char* op_, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& cos_,
            const Tensor& sin_, int64_t kv_heads_)
        : op(op_),
          q(q_),
          k(k_),
          v(v_),
          cos(torch::stable::contiguous(cos_)),
          sin(torch::stable::contiguous(sin_)),
          kv_heads(kv_heads_) {
        STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && kv_heads > 0 && k.size(2) % kv_heads == 0, op,
                        ": expected q, k and v [b, t, heads * d]");
        d = k.size(2) / kv_heads;
        STD_TORCH_CHECK(d > 0 && d <= most_input_channels && q.size(2) % k.size(2) == 0 && is_direct(q.scalar_type()),
                        op, ": heads of at most ", most_input_channels,
                        " channels in float16, bfloat16 or float32, as many of queries as of keys or a multiple");
        for (Tensor* x : {&q, &k, &v}) {
            STD_TORCH_CHECK(x->is_cuda() && x->get_device_index() == q.get_device_index() &&
                                x->scalar_type() == q.scalar_type() && x->dim() == 3 && x->size(0) == q.size(0) &&
                                x->size(1) == q.size(1) && (x == &q || x->size(2) == k.size(2)),
                            op, ": q, k and v must be of one device, dtype and number of tokens");
            if (x->stride(2) != 1) *x = torch::stable::contiguous(*x);
        }
        cuda::check_tensor(op, "cos", cos, q, q.scalar_type());
        cuda::check_tensor(op, "sin", sin, q, q.scalar_type());
        STD_TORCH_CHECK(cos.dim() == 3 && (cos.size(0) == 1 || cos.size(0) == q.size(0)) && cos.size(1) == q.size(1) &&
                            cos.size(2) % 2 == 0 && cos.size(2) <= d && sin.dim() == 3 && sin.size(0) == cos.size(0) &&
                            sin.size(1) == cos.size(1) && sin.size(2) == cos.size(2),
                        op, ": cos and sin must be [b or 1, t, r] with even r, d at most");
        const std::array<int64_t, 4> sizes{q.size(0), q.size(2) / d, q.size(1), d};
        queries = cuda::empty_like_device({sizes.data(), sizes.size()}, q.scalar_type(), q);
    }
    int64_t tokens() const { return q.size(1); }
    void check(int64_t length, const std::optional<Tensor>& mask) const {
        STD_TORCH_CHECK(tokens() <= 1 || mask, op, ": several tokens need a mask");
        check_attention(op, q, q.size(0), kv_heads, q.size(2) / k.size(2) * tokens(), tokens(), length, mask);
    }
    // `start` is on the device: the tokens are behind so many, and count there afterwards.
    void begin_at(const Tensor& start) {
        cuda::check_tensor(op, "start", start, q, ScalarType::Long);
        STD_TORCH_CHECK(start.numel() == 1, op, ": start must be one number, found ", start.numel());
        start_at = static_cast<int64_t*>(start.mutable_data_ptr());
    }
    template <class Room>
    void run(const Room& room, int64_t start, int64_t room_tokens, int64_t order,
             const std::optional<Tensor>& center = std::nullopt) const {
        STD_TORCH_CHECK(start >= 0 && start <= room_tokens - tokens() && room_tokens < int64_t{1} << 30, op, ": ",
                        tokens(), " tokens behind ", start, " in room for ", room_tokens);
        STD_TORCH_CHECK((order & (order - 1)) == 0 && (order == 0 || d % order == 0), op,
                        ": the transform must be of a power of two that divides head_dim, found ", order);
        STD_TORCH_CHECK(q.numel() + 2 * k.numel() < int64_t{1} << 31, op, ": too many tokens at once");
        if (q.numel() == 0) return;
        Input<Room> p{};
        int i = 0;
        for (const Tensor* x : {&q, &k, &v}) p.given[i++] = {x->const_data_ptr(), x->stride(0), x->stride(1)};
        p.cos = cos.const_data_ptr(), p.sin = sin.const_data_ptr();
        p.angle_stride = cos.size(0) == 1 ? 0 : cos.size(1) * cos.size(2);
        if (center) {
            cuda::check_tensor(op, "key_center", *center, q, q.scalar_type());
            STD_TORCH_CHECK(center->dim() == 2 && center->size(0) == kv_heads && center->size(1) == d, op,
                            ": key_center must be [", kv_heads, ", ", d, "]");
            p.center = center->const_data_ptr();
        }
        p.queries = queries.mutable_data_ptr(), p.room = room;
        p.batch = static_cast<int>(q.size(0)), p.tokens = static_cast<int>(tokens());
        p.q_heads = static_cast<int>(queries.size(1)), p.kv_heads = static_cast<int>(kv_heads);
        p.d = static_cast<int>(d), p.rotary_dim = static_cast<int>(cos.size(2)), p.order = static_cast<int>(order);
        p.start = static_cast<int>(start), p.start_at = start_at, p.room_tokens = static_cast<int>(room_tokens);
        cuda::check_launch(op, run_input(p, kind_of(q.scalar_type()), cuda::current_stream(q.get_device_index())));
    }
};

// --- keys and values as they are -------------------------------------------------------------------------------------

// Whether x [b, heads, room, d] has memory of its own for every head, `stride`s apart that kernels can read at once.
bool is_room(const Tensor& x, int64_t batch, int64_t heads, int64_t room, int64_t d) {
    if (x.dim() != 4 || x.size(0) != batch || x.size(1) != heads || x.size(2) != room || x.size(3) != d) return false;
    const int64_t head = heads > 1 ? x.stride(1) : room * d, row = batch > 1 ? x.stride(0) : heads * head;
    return x.stride(3) == 1 && x.stride(2) == d && head >= room * d && row >= heads * head &&
           (x.stride(0) | x.stride(1)) % 8 == 0 && cuda::is_aligned(x.const_data_ptr());
}

Tensor over_plain(Decoded& rows, const Tensor& keys, const Tensor& values, int64_t before, double scaling,
                  const std::optional<Tensor>& mask) {
    const char* op = rows.op;
    const int64_t batch = rows.q.size(0), d = rows.d, room = keys.size(2), length = before + rows.tokens();
    STD_TORCH_CHECK(rows.q.scalar_type() != ScalarType::Float && d % 8 == 0, op,
                    ": float16 or bfloat16, and whole eights of channels");
    for (const Tensor* x : {&keys, &values})
        STD_TORCH_CHECK(x->is_cuda() && x->get_device_index() == rows.q.get_device_index() &&
                            x->scalar_type() == rows.q.scalar_type() && is_room(*x, batch, rows.kv_heads, room, d) &&
                            x->stride(0) == keys.stride(0) && x->stride(1) == keys.stride(1),
                        op, ": keys and values must be on the device, in the dtype and the batch of q, of one shape, ",
                        "contiguous or the last tokens of what is, and begin at a multiple of 16 bytes");
    rows.check(length, mask);
    const PlainRoom to{{keys.mutable_data_ptr(), values.mutable_data_ptr()},
                       keys.stride(0),
                       keys.stride(1),
                       static_cast<int>(rows.kv_heads),
                       static_cast<int>(d)};
    rows.run(to, rows.start_at ? 0 : before, room, 0);
    const Tensor out = cuda::empty_like_device(rows.q.sizes(), rows.q.scalar_type(), rows.q);
    if (out.numel() == 0) return out;
    Plain p{{}, keys.const_data_ptr(), values.const_data_ptr(), keys.stride(0), keys.stride(1)};
    Attend& a = p.attend;
    a.k.heads = a.v.heads = static_cast<int>(batch * rows.kv_heads), a.k.d = a.v.d = static_cast<int>(d);
    std::vector<Tensor> held;
    describe(op, a, rows.queries, out, rows.kv_heads, length, scaling, mask, held);
    a.stored = rows.start_at;
    a.splits = shares_of(a);
    held.push_back(cuda::work_buffer(a.work_numbers() * 4, rows.q));
    a.partial = static_cast<float*>(held.back().mutable_data_ptr());
    cuda::check_launch(op, run_plain(p, cuda::current_stream(rows.q.get_device_index())));
    return out;
}

Tensor decode_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                        const Tensor& keys, const Tensor& values, int64_t before, double scaling,
                        const std::optional<Tensor>& mask, const std::optional<Tensor>& sinks) {
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    cuda::properties(q.get_device_index());
    constexpr const char* op = "decode_attention";
    STD_TORCH_CHECK(keys.dim() == 4, op, ": keys must be [b, heads, room, d]");
    STD_TORCH_CHECK(!sinks, op, ": there are no sinks on a GPU");
    Decoded rows(op, q, k, v, cos, sin, keys.size(1));
    return over_plain(rows, keys, values, before, scaling, mask);
}

Tensor decode_attention_at(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                           const Tensor& keys, const Tensor& values, const Tensor& start, double scaling,
                           const Tensor& mask) {
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    cuda::properties(q.get_device_index());
    constexpr const char* op = "decode_attention_at";
    STD_TORCH_CHECK(keys.dim() == 4 && q.dim() == 3 && keys.size(2) >= q.size(1), op,
                    ": keys must be [b, heads, room, d], with room for the tokens");
    Decoded rows(op, q, k, v, cos, sin, keys.size(1));
    rows.begin_at(start);
    return over_plain(rows, keys, values, keys.size(2) - q.size(1), scaling, mask);
}

// --- the packed cache ------------------------------------------------------------------------------------------------

Tensor over_packed(Decoded& rows, const Packed& cache, int64_t before, const std::vector<double>& clips,
                   const std::vector<Tensor>& factors, int64_t order, double scaling, const std::optional<Tensor>& mask,
                   const KeptSinks& sinks, const std::optional<Tensor>& center) {
    const char* op = rows.op;
    const int64_t length = before + rows.tokens(), room = cache.k_codes.size(0) * chunk;
    STD_TORCH_CHECK(factors.empty(), op, ": the transform must have no dense factors");
    STD_TORCH_CHECK(clips.size() == 2, op, ": expected two clips, found ", clips.size());
    rows.check(length, mask);
    check_sinks(op, sinks, rows.q, rows.q.size(0), rows.kv_heads, rows.d);
    STD_TORCH_CHECK(cache.k_codes.size(1) == rows.q.size(0) && cache.v_codes.dim() == 4 &&
                        cache.v_codes.size(0) == cache.k_codes.size(0) && cache.v_codes.size(1) == rows.q.size(0) &&
                        cache.v_codes.size(2) == rows.kv_heads,
                    op, ": q, k and v do not fit the cache");
    const PackedRoom to{{side(op, cache.k_codes, cache.k_scales, rows.d, cache.k_bits, false, length),
                         side(op, cache.v_codes, cache.v_scales, rows.d, cache.v_bits, true, length)},
                        {static_cast<float>(clips[0]), static_cast<float>(clips[1])}};
    for (const Tensor* x : {&cache.k_codes, &cache.v_codes})
        STD_TORCH_CHECK(x->is_cuda() && x->get_device_index() == rows.q.get_device_index(), op,
                        ": the cache is on another device than q; move it there");
    rows.run(to, rows.start_at ? 0 : before, room, order, center);
    const Tensor out = cuda::empty_like_device(rows.q.sizes(), rows.q.scalar_type(), rows.q);
    attend_into(op, rows.queries, out, cache, length, scaling, mask, sinks, rows.start_at);
    return out;
}

Tensor kv_decode_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                           const Tensor& k_codes, const Tensor& k_scales, const Tensor& v_codes, const Tensor& v_scales,
                           int64_t before, int64_t k_bits, int64_t v_bits, const std::vector<double>& clips,
                           const std::vector<Tensor>& factors, int64_t order, double scaling,
                           const std::optional<Tensor>& starts, const std::optional<Tensor>& sink_keys,
                           const std::optional<Tensor>& sink_values, const std::optional<Tensor>& mask,
                           const std::optional<Tensor>& key_center) {
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    cuda::properties(q.get_device_index());
    constexpr const char* op = "kv_decode_attention";
    STD_TORCH_CHECK(k_codes.dim() == 4, op, ": the keys' codes must be [chunks, b, heads, bytes]");
    Decoded rows(op, q, k, v, cos, sin, k_codes.size(2));
    return over_packed(rows, {k_codes, k_scales, v_codes, v_scales, k_bits, v_bits}, before, clips, factors, order,
                       scaling, mask, {starts, sink_keys, sink_values}, key_center);
}

Tensor kv_decode_attention_at(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                              const Tensor& k_codes, const Tensor& k_scales, const Tensor& v_codes,
                              const Tensor& v_scales, const Tensor& start, int64_t k_bits, int64_t v_bits,
                              const std::vector<double>& clips, const std::vector<Tensor>& factors, int64_t order,
                              double scaling, const Tensor& mask, const std::optional<Tensor>& key_center) {
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    cuda::properties(q.get_device_index());
    constexpr const char* op = "kv_decode_attention_at";
    STD_TORCH_CHECK(k_codes.dim() == 4 && q.dim() == 3 && mask.dim() == 4 && mask.size(3) >= q.size(1), op,
                    ": the keys' codes must be [chunks, b, heads, bytes], the mask [b or 1, 1, t, length]");
    Decoded rows(op, q, k, v, cos, sin, k_codes.size(2));
    rows.begin_at(start);
    return over_packed(rows, {k_codes, k_scales, v_codes, v_scales, k_bits, v_bits}, mask.size(3) - q.size(1), clips,
                       factors, order, scaling, mask, {std::nullopt, std::nullopt, std::nullopt}, key_center);
}

}  // namespace
}  // namespace ptq::kv_cache_cuda

STABLE_TORCH_LIBRARY_IMPL(ptq, CUDA, m) {
    m.impl("decode_attention", TORCH_BOX(&ptq::kv_cache_cuda::decode_attention));
    m.impl("decode_attention_at", TORCH_BOX(&ptq::kv_cache_cuda::decode_attention_at));
    m.impl("kv_decode_attention", TORCH_BOX(&ptq::kv_cache_cuda::kv_decode_attention));
    m.impl("kv_decode_attention_at", TORCH_BOX(&ptq::kv_cache_cuda::kv_decode_attention_at));
}
