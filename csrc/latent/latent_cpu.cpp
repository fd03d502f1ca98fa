// ptq::latent_attention for the CPU. Schema, fake kernel and reference are in ptq/ops/latent_ops.py.
#include "latent/latent_cpu.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <numbers>
#include <vector>

#include "common/linear.h"
#include "common/tensors.h"
#include "dense/dense_cpu.h"
#include "steps/steps_cpu.h"

namespace ptq::latent {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

constexpr int64_t part = 256;  // tokens: so few that there are parts for all threads early

// The sizes of a call, and the bytes of a number.
struct Shape {
    int64_t b, t, heads, dk, dv, rank, r, room, more_room, size;
    int64_t tokens() const { return b * t; }
};

// The room for these keys, of which this may be the end: tokens.
int64_t whole_room(const Tensor& x, int64_t b, int64_t room, int64_t d, ScalarType type) {
    STD_TORCH_CHECK(x.dim() == 4 && x.size(0) == b && x.size(1) == 1 && x.size(2) == room && x.size(3) == d &&
                        x.scalar_type() == type,
                    "latent_attention: expected latents [b, 1, room, rank] and rope_keys [b, 1, room, r] in one dtype");
    const int64_t whole = b > 1 ? x.stride(0) / d : room;
    STD_TORCH_CHECK(x.stride(3) == 1 && x.stride(2) == d && (b == 1 || x.stride(0) == whole * d) && whole >= room,
                    "latent_attention: what is cached must be contiguous, or the last tokens of what is");
    return whole;
}

Shape shape_of(const Tensor& q, const Tensor& latent, const Tensor& rotary, const Tensor& latents,
               const Tensor& rope_keys, const Expansion& e) {
    STD_TORCH_CHECK(q.dim() == 3 && latent.dim() == 3 && rotary.dim() == 3 && e.keys.dim() == 3 && latents.dim() == 4,
                    "latent_attention: expected q [b, t, heads (dk + r)], latent [b, t, rank] and rotary [b, t, r]");
    const ScalarType type = q.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                    "latent_attention: q must be float32 or bfloat16");
    Shape s{};
    s.b = q.size(0), s.t = q.size(1), s.heads = e.keys.size(0), s.rank = e.keys.size(1), s.dk = e.keys.size(2);
    s.dv = e.values.size(1), s.r = rotary.size(2), s.size = type == ScalarType::Float ? 4 : 2;
    check_tensor("latent_attention", "q", q, type, {s.b, s.t, s.heads * (s.dk + s.r)});
    check_tensor("latent_attention", "latent", latent, type, {s.b, s.t, s.rank});
    check_tensor("latent_attention", "rotary", rotary, type, {s.b, s.t, s.r});
    check_tensor("latent_attention", "the matrix of keys", e.keys, type, {s.heads, s.rank, s.dk});
    check_tensor("latent_attention", "the matrix of values", e.values, type, {s.heads, s.dv, s.rank});
    STD_TORCH_CHECK(s.heads > 0 && s.rank > 0 && s.r > 0 && s.r % 2 == 0 && s.dk > 0 && s.dv > 0,
                    "latent_attention: expected heads, and an even number of channels that are rotated");
    s.room = whole_room(latents, s.b, latents.size(2), s.rank, type);
    s.more_room = whole_room(rope_keys, s.b, latents.size(2), s.r, type);
    return s;
}

// The rotary embedding of r numbers of one head of one token.
struct Rope {
    RopeLayout how;
    Number type;
    int64_t r;
    Tensor cos, sin;               // [b or 1, t, r], or of complex numbers [b or 1, t, r / 2] in float32
    int64_t batch = 0, bytes = 0;  // rows of a table between those of two sequences; bytes of a row

    Rope(RopeLayout rope_layout, const Tensor& c, const Tensor& s, const Shape& shape, ScalarType x)
        : how(rope_layout), type(number_of(x)), r(shape.r), cos(c), sin(s) {
        if (how == RopeLayout::none) return;
        const bool complex = how == RopeLayout::complex;
        STD_TORCH_CHECK(how == RopeLayout::halves || how == RopeLayout::pairs || complex,
                        "latent_attention: no such rotary embedding");
        STD_TORCH_CHECK(c.dim() == 3 && (c.size(0) == 1 || c.size(0) == shape.b),
                        "latent_attention: cos and sin must be [b or 1, t, *]");
        const ScalarType wanted = complex ? ScalarType::Float : x;
        const int64_t width = complex ? r / 2 : r;
        for (const Tensor* table : {&c, &s})
            check_tensor("latent_attention", "cos or sin", *table, wanted, {c.size(0), shape.t, width});
        batch = c.size(0) == 1 ? 0 : shape.t;
        bytes = width * (wanted == ScalarType::Float ? 4 : 2);
        cos = compact(c), sin = compact(s);
    }

    void operator()(const char* x, int64_t b, int64_t token, char* y) const {
        const int64_t row = (b * batch + token) * bytes, size = type == Number::float32 ? 4 : 2;
        if (how == RopeLayout::none) {
            std::memcpy(y, x, r * size);
            return;
        }
        const char *c = static_cast<const char*>(cos.const_data_ptr()) + row,
                   *s = static_cast<const char*>(sin.const_data_ptr()) + row;
        if (how == RopeLayout::complex) return as_complex(x, c, s, y);
        std::vector<char> halves;
        if (how == RopeLayout::pairs) {
            halves.resize(r * size);
            for (int64_t i = 0; i < r; i++)
                std::memcpy(halves.data() + (i % 2 * (r / 2) + i / 2) * size, x + i * size, size);
            x = halves.data();
        }
        steps::rotary_kernel()({type, r}, x, c, s, y);
    }

  private:
    // Neighbours are one number, which stays in its place; rounded once.
    void as_complex(const char* x, const char* c, const char* s, char* y) const {
        for (int64_t i = 0; i < r; i += 2) {
            const float re = at(x, i), im = at(x, i + 1);
            const float cosine = reinterpret_cast<const float*>(c)[i / 2],
                        sine = reinterpret_cast<const float*>(s)[i / 2];
            put(y, i, re * cosine - im * sine), put(y, i + 1, re * sine + im * cosine);
        }
    }
    float at(const char* x, int64_t i) const {
        if (type == Number::float32) return reinterpret_cast<const float*>(x)[i];
        return from_bfloat16(reinterpret_cast<const uint16_t*>(x)[i]);
    }
    void put(char* y, int64_t i, float number) const {
        if (type == Number::float32)
            reinterpret_cast<float*>(y)[i] = number;
        else
            reinterpret_cast<uint16_t*>(y)[i] = to_bfloat16(number);
    }
};

const char* bytes_of(const Tensor& x) {
    return static_cast<const char*>(x.const_data_ptr());
}
char* bytes_in(const Tensor& x) {
    return static_cast<char*>(x.mutable_data_ptr());
}

// Copies so many bytes of each head of each token: `from` and `to` say where they are.
template <class From, class To>
void for_heads(const Shape& s, int64_t bytes, const From& from, const To& to) {
    for (int64_t h = 0; h < s.heads; h++)
        for (int64_t i = 0; i < s.tokens(); i++) std::memcpy(to(h, i), from(h, i), bytes);
}

// The new tokens go to the cache.
void append(const Shape& s, const Tensor& latent, const Tensor& rotary, const Rope& rope, const Tensor& latents,
            const Tensor& rope_keys, int64_t before) {
    const Tensor x = compact(latent), y = compact(rotary);
    for (int64_t i = 0; i < s.tokens(); i++) {
        const int64_t b = i / s.t, token = i % s.t;
        std::memcpy(bytes_in(latents) + (b * s.room + before + token) * s.rank * s.size,
                    bytes_of(x) + i * s.rank * s.size, s.rank * s.size);
        rope(bytes_of(y) + i * s.r * s.size, b, token,
             bytes_in(rope_keys) + (b * s.more_room + before + token) * s.r * s.size);
    }
}

// Queries for latent vectors and what is turned, [b, heads, t, rank + r].
Tensor queries(const Shape& s, const Tensor& q, const Rope& rope, const Expansion& e) {
    const Tensor x = compact(q), plain = fresh(Sizes{s.heads, s.tokens(), s.dk}, q.scalar_type());
    const int64_t d = s.dk + s.r, wide = s.rank + s.r;
    const auto given = [&](int64_t h, int64_t i) { return bytes_of(x) + (i * s.heads + h) * d * s.size; };
    for_heads(s, s.dk * s.size, given,
              [&](int64_t h, int64_t i) { return bytes_in(plain) + (h * s.tokens() + i) * s.dk * s.size; });
    const Tensor absorbed = dense::linear_of_heads(plain, e.keys);  // [heads, tokens, rank]
    const Tensor out = fresh(Sizes{s.b, s.heads, s.t, wide}, q.scalar_type());
    const auto to = [&](int64_t h, int64_t i) {
        return bytes_in(out) + ((i / s.t * s.heads + h) * s.t + i % s.t) * wide * s.size;
    };
    for_heads(
        s, s.rank * s.size,
        [&](int64_t h, int64_t i) { return bytes_of(absorbed) + (h * s.tokens() + i) * s.rank * s.size; }, to);
    for (int64_t h = 0; h < s.heads; h++)
        for (int64_t i = 0; i < s.tokens(); i++)
            rope(given(h, i) + s.dk * s.size, i / s.t, i % s.t, to(h, i) + s.rank * s.size);
    return out;
}

// Values of what was attended, [b, t, heads, rank].
Tensor values(const Shape& s, const Tensor& attended, const Expansion& e) {
    const Tensor by_head = fresh(Sizes{s.heads, s.tokens(), s.rank}, attended.scalar_type());
    for_heads(
        s, s.rank * s.size,
        [&](int64_t h, int64_t i) { return bytes_of(attended) + (i * s.heads + h) * s.rank * s.size; },
        [&](int64_t h, int64_t i) { return bytes_in(by_head) + (h * s.tokens() + i) * s.rank * s.size; });
    const Tensor found = dense::linear_of_heads(by_head, e.values);  // [heads, tokens, dv]
    const Tensor out = fresh(Sizes{s.b, s.t, s.heads * s.dv}, attended.scalar_type());
    for_heads(
        s, s.dv * s.size, [&](int64_t h, int64_t i) { return bytes_of(found) + (h * s.tokens() + i) * s.dv * s.size; },
        [&](int64_t h, int64_t i) { return bytes_in(out) + (i * s.heads + h) * s.dv * s.size; });
    return out;
}

Tensor op(const Tensor& q, const Tensor& latent, const Tensor& rotary, const Tensor& cos, const Tensor& sin,
          const Tensor& latents, const Tensor& rope_keys, int64_t before, const Tensor& keys, const Tensor& values,
          int64_t rope_layout, double scaling, const std::optional<Tensor>& mask) {
    return attention(q, latent, rotary, cos, sin, latents, rope_keys, before, {keys, values, RopeLayout{rope_layout}},
                     scaling, mask);
}

}  // namespace

void check(const Expansion& e, int64_t query_rows, int64_t latent_rows) {
    STD_TORCH_CHECK(e.keys.dim() == 3 && e.values.dim() == 3 && e.keys.size(0) == e.values.size(0) &&
                        e.keys.size(1) == e.values.size(2) && e.keys.scalar_type() == e.values.scalar_type(),
                    "latent_attention: expected matrices [heads, rank, dk] and [heads, dv, rank] in one dtype");
    const int64_t heads = e.keys.size(0), r = latent_rows - e.keys.size(1);
    STD_TORCH_CHECK(heads > 0 && r > 0 && r % 2 == 0 && query_rows == heads * (e.keys.size(2) + r),
                    "latent_attention: ", query_rows, " rows of queries and ", latent_rows,
                    " of latent vectors do not fit the matrices");
    STD_TORCH_CHECK(e.rope_layout >= RopeLayout::halves && e.rope_layout <= RopeLayout::none,
                    "latent_attention: no such rotary embedding");
}

Tensor attention(const Tensor& q, const Tensor& latent, const Tensor& rotary, const Tensor& cos, const Tensor& sin,
                 const Tensor& latents, const Tensor& rope_keys, int64_t before, const Expansion& expansion,
                 double scaling, const std::optional<Tensor>& mask) {
    const Shape s = shape_of(q, latent, rotary, latents, rope_keys, expansion);
    STD_TORCH_CHECK(before >= 0 && before <= latents.size(2) - s.t, "latent_attention: ", s.t, " tokens behind ",
                    before, " in room for ", latents.size(2));
    check_mask("latent_attention", mask, s.b, s.t, before + s.t);
    const ScalarType type = q.scalar_type();
    const Rope rope(expansion.rope_layout, cos, sin, s, type);
    const Tensor attended = fresh(Sizes{s.b, s.t, s.heads, s.rank}, type);
    if (!attended.numel()) return fresh(Sizes{s.b, s.t, s.heads * s.dv}, type);
    append(s, latent, rotary, rope, latents, rope_keys, before);
    const Tensor asked = queries(s, q, rope, expansion);
    std::optional<Tensor> masks;
    if (mask) masks = compact(*mask);
    steps::attend({.type = number_of(type),
                   .q = asked.const_data_ptr(),
                   .keys = latents.const_data_ptr(),
                   .values = latents.const_data_ptr(),
                   .out = attended.mutable_data_ptr(),
                   .heads = 1,
                   .groups = s.heads,
                   .tokens = s.t,
                   .d = s.rank,
                   .before = before,
                   .room = s.room,
                   .more_keys = rope_keys.const_data_ptr(),
                   .more = s.r,
                   .more_room = s.more_room,
                   .scaling = static_cast<float>(scaling * std::numbers::log2e),
                   .partial = nullptr,
                   .mask = masks ? static_cast<const uint8_t*>(masks->const_data_ptr()) : nullptr,
                   .mask_batch = masks && masks->size(0) == s.b ? s.t * (before + s.t) : 0,
                   .units = 0,
                   .part = part},
                  s.b);
    return values(s, attended, expansion);
}

}  // namespace ptq::latent

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("latent_attention", TORCH_BOX(&ptq::latent::op));
}
