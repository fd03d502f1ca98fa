// ptq::kv_* for the CPU. Schemas, fake kernels and references are in ptq/ops/kv_ops.py and ptq/ops/kv_step.py.
#include "kv_cache/kv_cache_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <numbers>
#include <optional>
#include <vector>

#include "common/bfloat16.h"
#include "common/cpu_level.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "hadamard/hadamard_cpu.h"
#include "kv_cache/kernels.h"
#include "steps/steps_cpu.h"

namespace ptq::kv_cache {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::contiguous;
using torch::stable::empty;
using torch::stable::Tensor;

const Kernels& kernels() {
    return at_level<portable, avx2, avx2, avx512, avx512vnni>();
}

// Checks that codes and scales are a side of the cache with room for `length` tokens.
Side side(const Tensor& codes, const Tensor& scales, int64_t d, int64_t bits, bool channel_major, int64_t length) {
    STD_TORCH_CHECK((bits >= 2 && bits <= 4) || bits == 6 || bits == 8, "kv_cache: bits must be 2, 3, 4, 6 or 8");
    STD_TORCH_CHECK(d > 0 && d <= max_head_dim, "kv_cache: head_dim must be 1 to ", max_head_dim, ", found ", d);
    const int width = static_cast<int>(bits);
    STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte && codes.dim() == 4 && codes.is_contiguous() &&
                        codes.size(3) == chunk * 4 * words(d, width),
                    "kv_cache: codes have a wrong dtype, shape or stride");
    STD_TORCH_CHECK(scales.scalar_type() == ScalarType::BFloat16 && scales.dim() == 5 && scales.is_contiguous() &&
                        scales.size(0) == codes.size(0) && scales.size(1) == codes.size(1) &&
                        scales.size(2) == codes.size(2) && scales.size(3) == 2 && scales.size(4) == chunk,
                    "kv_cache: scales have a wrong dtype, shape or stride");
    STD_TORCH_CHECK(length >= 0 && length <= codes.size(0) * chunk, "kv_cache: ", length, " tokens do not fit");
    return {static_cast<uint32_t*>(const_cast<void*>(codes.const_data_ptr())),
            static_cast<uint16_t*>(const_cast<void*>(scales.const_data_ptr())),
            codes.size(1) * codes.size(2),
            d,
            width,
            channel_major};
}

void append(const Tensor& codes, const Tensor& scales, const Tensor& x, int64_t start, int64_t bits, double clip,
            bool channel_major) {
    STD_TORCH_CHECK(x.dim() == 4 && codes.dim() == 4 && x.size(0) == codes.size(1) && x.size(1) == codes.size(2),
                    "kv_append: x does not fit the cache");
    const int64_t count = x.size(2), d = x.size(3), room = codes.size(0) * chunk;
    STD_TORCH_CHECK(start >= 0 && start <= room - count, "kv_append: ", count, " tokens behind ", start,
                    " in room for ", room);
    const Side to = side(codes, scales, d, bits, channel_major, start + count);
    const Tensor in = as_float(x);
    const Append p{to, static_cast<const float*>(in.const_data_ptr()), start, count, static_cast<float>(clip)};
    run(kernels().append, p, count ? to.heads * p.block_count() : 0, std::min(count, block_tokens) * d * 4);
}

Tensor dequantize(const Tensor& codes, const Tensor& scales, int64_t length, int64_t d, int64_t bits,
                  bool channel_major) {
    const Side from = side(codes, scales, d, bits, channel_major, length);
    const Tensor out = empty({codes.size(1), codes.size(2), length, d}, ScalarType::Float);
    const Dequantize p{from, static_cast<float*>(out.mutable_data_ptr()), length};
    run(kernels().dequantize, p, from.heads * p.block_count(), block_tokens * d);
    return out;
}

// All there or none.
void check_sinks(const std::optional<Tensor>& starts, const std::optional<Tensor>& keys,
                 const std::optional<Tensor>& values, int64_t batch, int64_t heads, int64_t d) {
    STD_TORCH_CHECK(!starts == !keys && !starts == !values, "kv_attend: sinks without all parts");
    if (!starts) return;
    for (const Tensor* x : {&*keys, &*values})
        STD_TORCH_CHECK(x->dim() == 4 && x->size(0) == batch && x->size(1) == heads && x->size(2) == keys->size(2) &&
                            x->size(3) == d && x->size(2) <= chunk,
                        "kv_attend: the sinks have a wrong shape");
    STD_TORCH_CHECK(starts->scalar_type() == ScalarType::Long && starts->dim() == 1 && starts->size(0) == batch,
                    "kv_attend: starts have a wrong dtype or shape");
}

Tensor attend(const Tensor& q, const Tensor& k_codes, const Tensor& k_scales, const Tensor& v_codes,
              const Tensor& v_scales, int64_t length, int64_t k_bits, int64_t v_bits, double scaling,
              const std::optional<Tensor>& mask, const std::optional<Tensor>& starts,
              const std::optional<Tensor>& sink_keys, const std::optional<Tensor>& sink_values) {
    STD_TORCH_CHECK(q.dim() == 4 && k_codes.dim() == 4, "kv_attend: q must be [batch, heads, tokens, head_dim]");
    const int64_t batch = q.size(0), q_heads = q.size(1), tokens = q.size(2), d = q.size(3);
    const int64_t kv_heads = k_codes.size(2), heads = batch * kv_heads;
    Attend p{};
    p.k = side(k_codes, k_scales, d, k_bits, false, length);
    p.v = side(v_codes, v_scales, d, v_bits, true, length);
    STD_TORCH_CHECK(kv_heads > 0 && k_codes.size(1) == batch && q_heads % kv_heads == 0 && v_codes.size(1) == batch &&
                        v_codes.size(2) == kv_heads,
                    "kv_attend: q does not fit the cache");
    const Tensor in = as_float(q), out = fresh(std::vector<int64_t>{batch, tokens, q_heads, d}, ScalarType::Float);
    std::optional<Tensor> masks, at, keys, values;
    check_mask("kv_attend", mask, batch, tokens, length);
    if (mask) {
        masks = compact(*mask);
        p.mask = static_cast<const uint8_t*>(masks->const_data_ptr());
        p.mask_batch = mask->size(0) == 1 ? 0 : tokens * length;
    }
    check_sinks(starts, sink_keys, sink_values, batch, kv_heads, d);
    if (starts) {
        p.sinks = sink_keys->size(2);
        at = contiguous(*starts), keys = as_float(*sink_keys), values = as_float(*sink_values);
        p.starts = static_cast<const int64_t*>(at->const_data_ptr());
        p.sink_keys = static_cast<const float*>(keys->const_data_ptr());
        p.sink_values = static_cast<const float*>(values->const_data_ptr());
    }
    p.kv_heads = kv_heads, p.groups = q_heads / kv_heads, p.tokens = tokens, p.length = length;
    p.scaling = static_cast<float>(scaling * std::numbers::log2e);
    const std::unique_ptr<float[]> partial(new float[heads * p.chunks() * p.rows() * partial_stride(d)]);
    p.q = static_cast<const float*>(in.const_data_ptr());
    p.partial = partial.get();
    p.out = static_cast<float*>(out.mutable_data_ptr());
    run(kernels().attend, p, heads * p.chunks(), p.rows() * std::min(length, chunk) * d / 2);
    run(kernels().merge, p, heads * p.rows(), p.chunks() * d);
    return from_float(out, q.scalar_type());
}

// x [b, t, heads * d] as [b, heads, t, d]: of one token the same memory, of several a copy.
Tensor by_head(const Tensor& x, int64_t heads, int64_t d) {
    const int64_t b = x.size(0), t = x.size(1);
    if (t == 1) return reshaped(compact(x), std::vector<int64_t>{b, heads, 1, d});
    const Tensor rows = reshaped(compact(x), std::vector<int64_t>{b, t, heads, d});
    return contiguous(torch::stable::transpose(rows, 1, 2));
}

// key [b, heads, t, d] becomes less(key, center [heads, d]), number by number of T.
template <class T, class Less>
void less_each(const Tensor& key, const Tensor& center, const Less& less) {
    const int64_t heads = key.size(1), t = key.size(2), d = key.size(3), rows = key.size(0) * heads * t;
    auto* y = static_cast<T*>(key.mutable_data_ptr());
    const auto* c = static_cast<const T*>(center.const_data_ptr());
    for (int64_t row = 0; row < rows; row++, y += d) {
        const T* own = c + row / t % heads * d;
        for (int64_t i = 0; i < d; i++) y[i] = less(y[i], own[i]);
    }
}

// key -= center in the dtype of the key, which the rotary embedding has made: float32 or bfloat16, contiguous.
void center_keys(const Tensor& key, const Tensor& center) {
    const ScalarType type = key.scalar_type();
    const Tensor own = center.scalar_type() == type ? compact(center) : from_float(as_float(center), type);
    if (type == ScalarType::Float)
        less_each<float>(key, own, [](float x, float c) { return x - c; });
    else
        less_each<uint16_t>(key, own,
                            [](uint16_t x, uint16_t c) { return to_bfloat16(from_bfloat16(x) - from_bfloat16(c)); });
}

}  // namespace

Tensor decode_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                        const Tensor& k_codes, const Tensor& k_scales, const Tensor& v_codes, const Tensor& v_scales,
                        int64_t before, int64_t k_bits, int64_t v_bits, const std::vector<double>& clips,
                        const std::vector<Tensor>& factors, int64_t order, double scaling,
                        const std::optional<Tensor>& starts, const std::optional<Tensor>& sink_keys,
                        const std::optional<Tensor>& sink_values, const std::optional<Tensor>& mask,
                        const std::optional<Tensor>& key_center) {
    STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && k_codes.dim() == 4 && v_codes.dim() == 4 && k_codes.size(2) > 0,
                    "kv_decode_attention: expected q and k [b, t, heads * d] and codes of heads");
    const int64_t heads = k_codes.size(2), d = k.size(2) / heads, t = q.size(1);
    // All that could be refused comes before anything is stored.
    for (const Tensor* x : {&q, &k, &v})
        STD_TORCH_CHECK(x->dim() == 3 && x->size(0) == k_codes.size(1) && x->size(0) == v_codes.size(1) &&
                            x->size(1) == t && v_codes.size(2) == heads,
                        "kv_decode_attention: q, k and v do not fit the cache");
    STD_TORCH_CHECK(d > 0 && q.size(2) % (heads * d) == 0 && k.size(2) == heads * d && v.size(2) == heads * d,
                    "kv_decode_attention: q, k and v do not fit the cache");
    const int64_t room = k_codes.size(0) * chunk;
    STD_TORCH_CHECK(t > 0 && before >= 0 && before <= room - t, "kv_decode_attention: ", t, " tokens behind ", before,
                    " in room for ", room);
    STD_TORCH_CHECK(t == 1 || mask, "kv_decode_attention: several tokens need a mask");
    STD_TORCH_CHECK(clips.size() == 2, "kv_decode_attention: expected two clips, found ", clips.size());
    STD_TORCH_CHECK(!key_center || (key_center->dim() == 2 && key_center->size(0) == heads && key_center->size(1) == d),
                    "kv_decode_attention: key_center must be [", heads, ", ", d, "]");
    side(k_codes, k_scales, d, k_bits, false, before + t);
    side(v_codes, v_scales, d, v_bits, true, before + t);
    check_sinks(starts, sink_keys, sink_values, q.size(0), heads, d);
    check_mask("kv_decode_attention", mask, q.size(0), t, before + t);
    const Tensor value = by_head(v, heads, d);
    auto [query, key] = steps::rotary(by_head(q, q.size(2) / d, d), by_head(k, heads, d), cos, sin);
    if (key_center) center_keys(key, *key_center);
    if (order) {
        query = hadamard::hadamard(query, std::nullopt, factors, order, -1, false);
        key = hadamard::hadamard(key, std::nullopt, factors, order, -1, false);
    }
    append(k_codes, k_scales, key, before, k_bits, clips[0], false);
    append(v_codes, v_scales, value, before, v_bits, clips[1], true);
    const Tensor out = attend(query, k_codes, k_scales, v_codes, v_scales, before + t, k_bits, v_bits, scaling, mask,
                              starts, sink_keys, sink_values);
    return reshaped(out, q.sizes());
}

}  // namespace ptq::kv_cache

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("kv_append", TORCH_BOX(&ptq::kv_cache::append));
    m.impl("kv_dequantize", TORCH_BOX(&ptq::kv_cache::dequantize));
    m.impl("kv_attend", TORCH_BOX(&ptq::kv_cache::attend));
    m.impl("kv_decode_attention", TORCH_BOX(&ptq::kv_cache::decode_attention));
}
