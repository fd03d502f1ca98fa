// ptq::minifloat_linear_tiled, _linear_quantized and _linear_tokens for the CPU. Schemas, fake kernels, references and
// gradients are in fp6/tiled_ops.py.
#include "minifloat_tiled/minifloat_tiled_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "activations/activations_cpu.h"
#include "common/linear.h"
#include "gemm/product.h"
#include "tiles/layout.h"
#include "tiles/run_rows.h"

namespace ptq::minifloat_tiled {

extern const gemm::Unpack signed_bytes_amx;

namespace {

constexpr int64_t few_floats = 8;   // more go to gemm/,
constexpr int64_t few_slow = 5;     // in pairs that are slow,
constexpr int64_t few_tokens = 4;   // of integers
constexpr int64_t few_for_amx = 8;  // of them: tiles of AMX are slower

}  // namespace

bool is_many(const Floats& p) {
    return p.t > gemm::few_floats(p.x_type, in_slow_pairs(p) ? few_slow : few_floats) && p.w.k;
}
bool is_many(const Quantized& p) {
    return p.t > few_tokens && p.w.k && p.w.group_blocks * block_columns <= gemm::most_group;
}

namespace {

gemm::Panels panels_of(const Weight& w, gemm::Unpack unpack) {
    const int64_t step = block_bytes(w.element->bits);
    return {&w,
            unpack,
            w.scale,
            w.n,
            w.blocks * block_columns,
            w.groups,
            w.group_blocks * block_columns,
            w.tiles,
            w.blocks * step,
            step,
            byte_offset};
}

void many_floats(const Floats& p) {
    const Kernels& level = kernels();
    const bool pairs = level.unpack_pairs && gemm::are_pairs(p.x_type);
    gemm::multiply_panels({.w = panels_of(p.w, pairs ? level.unpack_pairs : level.unpack_floats),
                           .mode = pairs ? gemm::Mode::pairs : gemm::Mode::floats,
                           .x = p.x,
                           .x_type = p.x_type,
                           .t = p.t,
                           .k = p.w.k,
                           .token_scale = p.token_scale,
                           .bias = p.bias,
                           .out = p.out,
                           .out_type = p.out_type});
}

void many_tokens(const Quantized& p, const gemm::Tokens& from) {
    const gemm::Unpack amx = p.t > few_for_amx ? gemm::amx_unpack<signed_bytes_amx>() : nullptr;
    const gemm::Panels panels = panels_of(p.w, amx ? amx : kernels().unpack_bytes);
    gemm::Product product = gemm::product_of(panels, gemm::Mode::quads, p, from);
    product.by_vectors = !amx;
    gemm::multiply_panels(product);
}

// x (contiguous, float32 or bfloat16) times the weight, into `out`.
void multiply(const HeldWeight& h, const Tensor& x, const Tensor& out, int64_t t, const float* token_scale) {
    const Weight& w = h.w;
    const int64_t stride = tiles::arranged_bytes(w.k);
    Floats p{w,
             x.const_data_ptr(),
             number_of(x.scalar_type()),
             nullptr,
             stride,
             token_scale,
             floats_of(h.bias),
             out.mutable_data_ptr(),
             number_of(out.scalar_type()),
             t};
    if (is_many(p)) return many_floats(p);
    const std::unique_ptr<uint8_t[]> arranged(new uint8_t[t * stride]);
    p.arranged = arranged.get();
    run_codes(t, w.k, [&](int64_t first, int64_t last) { float_kernels(p).arrange(p, first, last); });
    run_codes(t ? row_tiles(w.n) : 0, tile_rows * w.k,
              [&](int64_t first, int64_t last) { float_kernels(p).floats(p, first, last); });
}

Tensor linear_tiled(const Tensor& x, const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& bias,
                    int64_t n, int64_t exponent, int64_t mantissa, int64_t group_size) {
    STD_TORCH_CHECK(x.dim() > 0, "minifloat_linear_tiled: x has no axis");
    const auto h = hold(tiles, scale, bias, n, x.size(-1), element_of(exponent, mantissa), group_size);
    const ScalarType dtype = x.scalar_type(), inside = kernel_type(dtype);
    const Tensor in = inside == ScalarType::BFloat16 ? compact(x) : as_float(x), out = empty_result(x, n, inside);
    multiply(*h, in, out, tokens_of(x), nullptr);
    return inside == dtype ? out : torch::stable::to(out, dtype);
}

void multiply_integers(const HeldWeight& h, const gemm::Tokens& tokens, const float* scales, const Tensor& out) {
    const Weight& w = h.w;
    const int64_t t = tokens.t, width = w.blocks * block_columns;
    const Number type = number_of(out.scalar_type());
    Quantized p{w, nullptr, width, scales, nullptr, floats_of(h.bias), out.mutable_data_ptr(), type, t};
    if (is_many(p)) return many_tokens(p, tokens);
    std::unique_ptr<int8_t[]> room;
    const std::unique_ptr<int32_t[]> sums(new int32_t[t * w.groups]);
    p.q = gemm::rows_of(tokens, width, room), p.sums = sums.get();
    run_codes(t, w.k / 4, [&](int64_t first, int64_t last) { kernels().sums(p, sums.get(), first, last); });
    run_codes(t ? row_tiles(w.n) : 0, tile_rows * w.k * std::max(int64_t{1}, t / 4),
              [&](int64_t first, int64_t last) { kernels().quantized(p, first, last); });
}

Tensor linear_quantized(const Tensor& q, const Tensor& q_scale, const Tensor& tiles, const Tensor& scale,
                        const std::optional<Tensor>& bias, int64_t n, int64_t exponent, int64_t mantissa,
                        int64_t group_size, ScalarType dtype) {
    STD_TORCH_CHECK(q.dim() > 0 && q.scalar_type() == ScalarType::Char, "minifloat_linear_quantized: q must be int8");
    const int64_t t = tokens_of(q), k = q.size(-1);
    STD_TORCH_CHECK(q_scale.numel() == t, "minifloat_linear_quantized: q_scale must have ", t, " elements");
    const auto h = hold(tiles, scale, bias, n, k, element_of(exponent, mantissa), group_size);
    const Tensor token_scale = as_float(q_scale), out = empty_result(q, n, kernel_type(dtype));
    const auto* factor = static_cast<const float*>(token_scale.const_data_ptr());
    if (h->element.whole) {
        std::vector<float> factors(factor, factor + t);
        for (float& each : factors) each = std::ldexp(each, -h->element.shift);
        const Tensor whole = compact(q);
        const auto* data = static_cast<const int8_t*>(whole.const_data_ptr());
        multiply_integers(*h, {t, k, data, nullptr, nullptr, 1}, factors.data(), out);
    } else {
        multiply(*h, compact(torch::stable::to(q, ScalarType::BFloat16)), out, t, factor);
    }
    return out.scalar_type() == dtype ? out : torch::stable::to(out, dtype);
}

Tensor linear_tokens(const Tensor& x, const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& bias,
                     int64_t n, int64_t exponent, int64_t mantissa, int64_t group_size, int64_t input_bits, double clip,
                     ScalarType dtype) {
    if (!element_of(exponent, mantissa).whole) {
        const auto [q, q_scale] = activations::quantize_tokens(x, input_bits, clip);
        return linear_quantized(q, q_scale, tiles, scale, bias, n, exponent, mantissa, group_size, dtype);
    }
    const activations::HeldTokens in = activations::hold(x, input_bits, clip);
    const activations::Numbers& numbers = in.numbers;
    const auto h = hold(tiles, scale, bias, n, numbers.k, element_of(exponent, mantissa), group_size);
    const Tensor out = empty_result(x, n, kernel_type(dtype));
    const std::unique_ptr<float[]> scales(new float[numbers.t]);
    const float unit = std::ldexp(1.0f, -h->element.shift);
    multiply_integers(*h, {numbers.t, numbers.k, nullptr, &numbers, scales.get(), unit}, scales.get(), out);
    return out.scalar_type() == dtype ? out : torch::stable::to(out, dtype);
}

}  // namespace

void run_quantized(const std::vector<Quantized>& problems) {
    const auto many = [](const Quantized& p) { many_tokens(p, {p.t, p.q_stride, p.q, nullptr, nullptr, 1}); };
    tiles::run_rows(kernels().quantized, problems, [](const Quantized& p) { return is_many(p); }, many);
}

void run_floats(const std::vector<Floats>& problems) {
    tiles::run_rows(
        float_kernels(problems.front()).floats, problems, [](const Floats& p) { return is_many(p); }, many_floats);
}

}  // namespace ptq::minifloat_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("minifloat_linear_tiled", TORCH_BOX(&ptq::minifloat_tiled::linear_tiled));
    m.impl("minifloat_linear_quantized", TORCH_BOX(&ptq::minifloat_tiled::linear_quantized));
    m.impl("minifloat_linear_tokens", TORCH_BOX(&ptq::minifloat_tiled::linear_tokens));
}
