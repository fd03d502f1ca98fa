// ptq::rms_norm, rotary, decode_attention and the gates for the CPU. Schemas, fake kernels and references are in
// ptq/ops/steps.py.
#include "steps/steps_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <memory>
#include <numbers>
#include <tuple>
#include <vector>

#include "common/cpu_level.h"
#include "common/linear.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "steps/kernels.h"

namespace ptq::steps {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const Kernels& kernels() {
#if defined(__x86_64__)
    if (has_slow_pairs()) return avx512;
#endif
    return at_level<portable, avx2, avx2, avx512, avx512, avx512bf16>();
}

Number number_of(const Tensor& x, const char* op) {
    const ScalarType type = x.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, op, ": x must be float32 or bfloat16");
    return type == ScalarType::Float ? Number::float32 : Number::bfloat16;
}

int64_t size_of(Number type) {
    return type == Number::float32 ? 4 : 2;
}

// Heads of d channels, the first `rotary_dim` of them by the rotary embedding; the others stay as they are.
struct Rope {
    Number type;
    int64_t d, rotary_dim;
    bool wide = false;  // see `Rotary`
    decltype(Kernels::rotary) kernel = kernels().rotary;

    // One head of one token.
    void operator()(const char* x, const char* cos, const char* sin, char* y) const {
        kernel({type, rotary_dim, wide}, x, cos, sin, y);
        const int64_t size = size_of(type);
        std::memcpy(y + rotary_dim * size, x + rotary_dim * size, (d - rotary_dim) * size);
    }
};

bool fits(const Tensor& cos, int64_t d) {
    return cos.size(2) % 2 == 0 && cos.size(2) <= d;
}

}  // namespace

decltype(Kernels::rotary) rotary_kernel() {
    return kernels().rotary;
}

Tensor rms_norm(const Tensor& x, const Tensor& gain, double eps, double offset, bool round_first) {
    const Number type = number_of(x, "rms_norm");
    STD_TORCH_CHECK(
        x.dim() > 0 && gain.dim() == 1 && gain.size(0) == x.size(-1) && gain.scalar_type() == x.scalar_type(),
        "rms_norm: the gain must be [k] for x [*, k], in the same dtype");
    const Tensor in = compact(x), g = compact(gain), out = fresh(x.sizes(), x.scalar_type());
    const int64_t k = x.size(-1);
    const Norm p{type, in.const_data_ptr(),     g.const_data_ptr(),         out.mutable_data_ptr(),
                 k,    static_cast<float>(eps), static_cast<float>(offset), round_first};
    run(kernels().norm, p, k ? x.numel() / k : 0, k);
    return out;
}

namespace {

// x [b, h, t, d], in rows of d neighbours, with cos and sin [b or 1, t, r].
Tensor rotated(const Tensor& given, const Tensor& cos, const Tensor& sin, decltype(Kernels::rotary) kernel) {
    STD_TORCH_CHECK(given.dim() == 4 && cos.size(0) > 0 && cos.size(1) == given.size(2) && fits(cos, given.size(3)) &&
                        (cos.size(0) == 1 || cos.size(0) == given.size(0)),
                    "rotary: expected x [b, h, t, d], cos and sin [b or 1, t, r] with even r, d at most");
    const Tensor x = given.stride(3) == 1 ? given : compact(given);
    const Tensor out = fresh(x.sizes(), x.scalar_type());
    const Number type = number_of(x, "rotary"), table = number_of(cos, "rotary");
    const int64_t size = size_of(type), heads = x.size(1), tokens = x.size(2), d = x.size(3);
    const auto* from = static_cast<const char*>(x.const_data_ptr());
    const auto *c = static_cast<const char*>(cos.const_data_ptr()), *s = static_cast<const char*>(sin.const_data_ptr());
    auto* to = static_cast<char*>(out.mutable_data_ptr());
    const Rope rope{type, d, cos.size(2), table != type, kernel};
    const int64_t strides[] = {x.stride(0), x.stride(1), x.stride(2)}, row = rope.rotary_dim * size_of(table);
    const int64_t tables = cos.size(0) == 1 ? 0 : tokens * row;  // from batch to batch
    // Some tokens of a head at a time: linears leave a token's heads side by side, attention wants a head's tokens so.
    const int64_t each = std::clamp(tokens, int64_t{1}, int64_t{8}), blocks = (tokens + each - 1) / each;
    run_codes(x.size(0) * blocks * heads, each * d, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const int64_t b = i / (blocks * heads), h = i % heads, begin = i / heads % blocks * each;
            for (int64_t t = begin; t < std::min(tokens, begin + each); t++) {
                const int64_t at = b * strides[0] + h * strides[1] + t * strides[2], at_angle = b * tables + t * row;
                rope(from + at * size, c + at_angle, s + at_angle, to + ((b * heads + h) * tokens + t) * d * size);
            }
        }
    });
    return out;
}

void check_tables(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool wide) {
    const auto is_like = [&](const Tensor& x) {
        return x.scalar_type() == q.scalar_type() || (wide && x.scalar_type() == ScalarType::Float);
    };
    STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && is_like(cos) && sin.scalar_type() == cos.scalar_type(),
                    "rotary: all tensors must have one dtype");
    STD_TORCH_CHECK(cos.dim() == 3 && sin.dim() == 3, "rotary: cos and sin must be [b or 1, t, r]");
    for (int64_t i = 0; i < 3; i++) STD_TORCH_CHECK(cos.size(i) == sin.size(i), "rotary: cos and sin differ in shape");
}

}  // namespace

std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
    check_tables(q, k, cos, sin, false);
    const Tensor c = compact(cos), s = compact(sin);
    return {rotated(q, c, s, kernels().rotary), rotated(k, c, s, kernels().rotary)};
}

std::tuple<Tensor, Tensor> rotary_pairs(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
    check_tables(q, k, cos, sin, true);
    const Tensor c = compact(cos), s = compact(sin);
    return {rotated(q, c, s, kernels().rotary_pairs), rotated(k, c, s, kernels().rotary_pairs)};
}

namespace {

Tensor gated(const char* op, const Tensor& gate, const Tensor& up, Gate kind, double alpha = 0, double limit = 0) {
    const Number type = number_of(gate, op);
    const auto a = gate.sizes(), b = up.sizes();
    STD_TORCH_CHECK(up.scalar_type() == gate.scalar_type() && std::equal(a.begin(), a.end(), b.begin(), b.end()), op,
                    ": expected two tensors of one shape and dtype");
    const Tensor x = compact(gate), y = compact(up), out = fresh(a, gate.scalar_type());
    const Gated p{type, x.const_data_ptr(),        y.const_data_ptr(),       out.mutable_data_ptr(), x.numel(),
                  kind, static_cast<float>(alpha), static_cast<float>(limit)};
    run(kernels().gated, p, (p.size + 15) / 16, 16);
    return out;
}

}  // namespace

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
    return gated("silu_mul", gate, up, Gate::silu);
}

Tensor gelu_mul(const Tensor& gate, const Tensor& up) {
    return gated("gelu_mul", gate, up, Gate::gelu);
}

Tensor sigmoid_mul(const Tensor& gate, const Tensor& x) {
    return gated("sigmoid_mul", gate, x, Gate::sigmoid);
}

Tensor clamped_swiglu(const Tensor& gate, const Tensor& up, double alpha, double limit) {
    return gated("clamped_swiglu", gate, up, Gate::clamped, alpha, limit);
}

Tensor sum(const Tensor& a, const Tensor& b) {
    const Number type = number_of(a, "sum");
    const auto sizes = a.sizes(), others = b.sizes();
    STD_TORCH_CHECK(
        b.scalar_type() == a.scalar_type() && std::equal(sizes.begin(), sizes.end(), others.begin(), others.end()),
        "sum: expected two tensors of one shape and dtype");
    const Tensor x = compact(a), y = compact(b), out = fresh(sizes, a.scalar_type());
    const Sum p{type, x.const_data_ptr(), y.const_data_ptr(), out.mutable_data_ptr(), x.numel()};
    run(kernels().sum, p, (p.size + 15) / 16, 16);
    return out;
}

namespace {

// q, k or v: d neighbours for each head of each token.
struct HeadRows {
    Tensor held;
    const char* data;
    int64_t batch, token, head;  // strides in bytes
};

// x [b, t, heads * d]
HeadRows rows_of(const Tensor& given, int64_t b, int64_t t, int64_t heads, int64_t d, Number type) {
    STD_TORCH_CHECK(given.dim() == 3 && given.size(0) == b && given.size(1) == t && given.size(2) == heads * d,
                    "decode_attention: expected q, k and v [b, t, heads * d]");
    STD_TORCH_CHECK(number_of(given, "decode_attention") == type, "decode_attention: all tensors must have one dtype");
    const Tensor x = compact(given);
    const int64_t size = size_of(type);
    return {x, static_cast<const char*>(x.const_data_ptr()), t * heads * d * size, heads * d * size, d * size};
}

}  // namespace

Tensor decode_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                        const Tensor& keys, const Tensor& values, int64_t before, double scaling,
                        const std::optional<Tensor>& mask, const std::optional<Tensor>& sinks) {
    const Number type = number_of(q, "decode_attention");
    STD_TORCH_CHECK(keys.dim() == 4 && q.dim() == 3 && keys.size(1) > 0 && keys.size(3) > 0 && keys.size(3) % 2 == 0,
                    "decode_attention: expected q [b, t, heads * d] and keys [b, heads, room, d], d even");
    const int64_t b = keys.size(0), heads = keys.size(1), room = keys.size(2), d = keys.size(3), t = q.size(1);
    const int64_t whole = keys.stride(1) / d;  // the room of which this may be the end
    for (const Tensor* x : {&keys, &values}) {
        STD_TORCH_CHECK(x->dim() == 4 && x->size(0) == b && x->size(1) == heads && x->size(2) == room &&
                            x->size(3) == d && number_of(*x, "decode_attention") == type,
                        "decode_attention: keys and values must be in one shape and the dtype of q");
        STD_TORCH_CHECK(x->stride(3) == 1 && x->stride(2) == d && whole >= room && x->stride(1) == whole * d &&
                            x->stride(0) == heads * whole * d,
                        "decode_attention: keys and values must be contiguous, or the last tokens of what is");
    }
    STD_TORCH_CHECK(before >= 0 && before <= room - t, "decode_attention: ", t, " tokens behind ", before,
                    " in room for ", room);
    const int64_t groups = q.size(2) / (heads * d), size = size_of(type);
    const HeadRows from_q = rows_of(q, b, t, heads * groups, d, type), from_k = rows_of(k, b, t, heads, d, type),
                   from_v = rows_of(v, b, t, heads, d, type);
    STD_TORCH_CHECK(cos.dim() == 3 && sin.dim() == 3 && (cos.size(0) == 1 || cos.size(0) == b) && cos.size(1) == t &&
                        fits(cos, d) && number_of(cos, "decode_attention") == type,
                    "decode_attention: cos and sin must be [b or 1, t, r] with even r, d at most");
    for (int64_t i = 0; i < 3; i++)
        STD_TORCH_CHECK(sin.size(i) == cos.size(i) && sin.scalar_type() == cos.scalar_type(),
                        "decode_attention: cos and sin differ");
    check_mask("decode_attention", mask, b, t, before + t);
    constexpr auto log2e = static_cast<float>(std::numbers::log2e);
    const std::vector<float> powers = sinks_of("decode_attention", sinks, heads * groups, log2e);
    const Tensor c = compact(cos), s = compact(sin), out = fresh(q.sizes(), q.scalar_type());
    if (!out.numel()) return out;
    const auto* c_data = static_cast<const char*>(c.const_data_ptr());
    const auto* s_data = static_cast<const char*>(s.const_data_ptr());
    auto *to_k = static_cast<char*>(keys.mutable_data_ptr()), *to_v = static_cast<char*>(values.mutable_data_ptr());
    std::vector<char> rotated(b * t * heads * groups * d * size);
    const Rope rope{type, d, cos.size(2)};
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < t; j++) {
            const int64_t row = ((cos.size(0) == 1 ? 0 : i) * t + j) * rope.rotary_dim * size;
            const auto rotate = [&](const HeadRows& x, int64_t head, char* to) {
                rope(x.data + i * x.batch + j * x.token + head * x.head, c_data + row, s_data + row, to);
            };
            for (int64_t h = 0; h < heads * groups; h++)
                rotate(from_q, h, rotated.data() + ((i * heads * groups + h) * t + j) * d * size);
            for (int64_t h = 0; h < heads; h++) {
                const int64_t at = ((i * heads + h) * whole + before + j) * d * size;
                rotate(from_k, h, to_k + at);
                std::memcpy(to_v + at, from_v.data + i * from_v.batch + j * from_v.token + h * from_v.head, d * size);
            }
        }
    std::optional<Tensor> masks;
    if (mask) masks = compact(*mask);
    Attend p{.type = type,
             .q = rotated.data(),
             .keys = to_k,
             .values = to_v,
             .out = out.mutable_data_ptr(),
             .heads = heads,
             .groups = groups,
             .tokens = t,
             .d = d,
             .before = before,
             .room = whole,
             .more_keys = nullptr,
             .more = 0,
             .more_room = 0,
             .scaling = static_cast<float>(scaling * std::numbers::log2e),
             .partial = nullptr,
             .mask = masks ? static_cast<const uint8_t*>(masks->const_data_ptr()) : nullptr,
             .mask_batch = masks && masks->size(0) == b ? t * (before + t) : 0,
             .units = 0};
    if (sinks) p.sinks = powers.data();
    attend(p, b);
    return out;
}

void attend(Attend p, int64_t batch) {
    const int64_t parts = p.parts(), heads = batch * p.heads, rows = heads * p.rows();
    p.units = heads * parts;
    std::unique_ptr<float[]> partial;
    if (parts > 1) partial.reset(new float[rows * parts * (padded(p.d) + 2)]);
    p.partial = partial.get();
    in_shares(p.units, rows * (p.before + p.tokens) * p.d, 1,
              [&](int64_t first, int64_t last) { kernels().attend(p, first, last); });
    if (partial) run(kernels().merge, p, rows, parts * p.d);
}

}  // namespace ptq::steps

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("rms_norm", TORCH_BOX(&ptq::steps::rms_norm));
    m.impl("rotary", TORCH_BOX(&ptq::steps::rotary));
    m.impl("rotary_pairs", TORCH_BOX(&ptq::steps::rotary_pairs));
    m.impl("silu_mul", TORCH_BOX(&ptq::steps::silu_mul));
    m.impl("sigmoid_mul", TORCH_BOX(&ptq::steps::sigmoid_mul));
    m.impl("gelu_mul", TORCH_BOX(&ptq::steps::gelu_mul));
    m.impl("clamped_swiglu", TORCH_BOX(&ptq::steps::clamped_swiglu));
    m.impl("decode_attention", TORCH_BOX(&ptq::steps::decode_attention));
}
