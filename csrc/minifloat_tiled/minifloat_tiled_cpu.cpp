// ptq::minifloat_linear_tiled, _linear_quantized and _linear_tokens for the CPU. Schemas, fake kernels, references and
// gradients are in fp6/tiled_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "activations/activations_cpu.h"
#include "common/cpu_level.h"
#include "common/linear.h"
#include "common/tensors.h"
#include "integer_tiled/layout.h"
#include "minifloat_tiled/kernels.h"

namespace ptq::minifloat_tiled {
namespace {

using integer_tiled::block_bytes;
using integer_tiled::block_columns;
using integer_tiled::blocks_in;
using integer_tiled::row_tiles;
using integer_tiled::tile_rows;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const Kernels& kernels() {
    return at_level<portable, avx2, avx512, avx512vnni, avx512bf16>();
}

constexpr int64_t few_tokens = 4;  // more go to gemm/

// --- the weight ------------------------------------------------------------------------------------------------------

// Value and tables of the element with these bits: (-1)^s 2^(E - bias) (1 + M / 2^m), subnormal where E = 0.
Element element_of(int64_t exponent, int64_t mantissa) {
    const int64_t bits = 1 + exponent + mantissa;
    STD_TORCH_CHECK(exponent >= 1 && exponent <= 4 && mantissa >= 0 && bits >= 4 && bits <= 7, "minifloat tiles: e",
                    exponent, "m", mantissa, " is none of the elements of 4 to 7 bits with 1 to 4 exponent bits");
    Element e{static_cast<int>(exponent), static_cast<int>(mantissa), static_cast<int>(bits), {}, {}, 0, false};
    const int bias = (1 << (e.exponent - 1)) - 1, half = 1 << (e.bits - 1), steps = 1 << e.mantissa;
    e.shift = bias - 1 + e.mantissa;
    e.whole = true;
    for (int code = 0; code < most_codes; code++) {
        const int rest = code & (half - 1), field = rest / steps, fraction = rest % steps;
        const int64_t number = static_cast<int64_t>(field ? steps + fraction : fraction) << std::max(0, field - 1);
        const int64_t with_sign = code & half ? -number : number;  // times 2^shift
        e.value[code] = std::ldexp(static_cast<float>(with_sign), -e.shift);
        if (code == half) e.value[code] = -0.0f;
        e.byte[code] = static_cast<uint8_t>(with_sign + byte_offset);
        e.whole = e.whole && number < byte_offset;
    }
    return e;
}

const float* floats_of(const std::optional<Tensor>& x) {
    return x ? static_cast<const float*>(x->const_data_ptr()) : nullptr;
}

// The tensors of a weight, checked and held: their pointers are in `w`.
struct Held {
    Tensor tiles, scale;
    std::optional<Tensor> bias;
    Element element;
    Weight w;
};

std::unique_ptr<Held> hold(const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& bias, int64_t n,
                           int64_t k, int64_t exponent, int64_t mantissa, int64_t group_size) {
    STD_TORCH_CHECK(group_size >= 0 && group_size % block_columns == 0, "minifloat tiles: groups must be multiples of ",
                    block_columns, " columns, found ", group_size);
    const int64_t groups = group_size ? (k + group_size - 1) / group_size : 1;
    const Element element = element_of(exponent, mantissa);
    check_tensor("minifloat tiles", "tiles", tiles, ScalarType::Byte,
                 {row_tiles(n), blocks_in(k), block_bytes(element.bits)});
    check_tensor("minifloat tiles", "scale", scale, ScalarType::Short, {row_tiles(n), groups, tile_rows});
    STD_TORCH_CHECK(!bias || bias->numel() == n, "minifloat tiles: bias must have ", n, " elements");
    std::unique_ptr<Held> h(new Held{compact(tiles), compact(scale), std::nullopt, element, {}});
    if (bias) h->bias = as_float(*bias);
    h->w = {static_cast<const uint8_t*>(h->tiles.const_data_ptr()),
            static_cast<const uint16_t*>(h->scale.const_data_ptr()),
            n,
            k,
            blocks_in(k),
            groups,
            group_size ? group_size / block_columns : std::max(int64_t{1}, blocks_in(k)),
            &h->element};
    return h;
}

// --- tokens ----------------------------------------------------------------------------------------------------------

gemm::Panels panels_of(const Weight& w, gemm::Unpack unpack) {
    const int64_t step = block_bytes(w.element->bits);
    return {&w,      unpack,          w.scale, w.n, w.blocks * block_columns, w.groups, w.group_blocks * block_columns,
            w.tiles, w.blocks * step, step};
}

// x (contiguous, float32 or bfloat16) times the weight, into `out`.
void multiply(const Held& h, const Tensor& x, const Tensor& out, int64_t t, const float* token_scale) {
    const Weight& w = h.w;
    const Kernels& level = kernels();
    const Number x_type = number_of(x.scalar_type()), out_type = number_of(out.scalar_type());
    if (t > few_tokens && w.k) {
        const bool pairs = level.unpack_pairs && x_type == Number::bfloat16;
        const gemm::Mode mode = pairs ? gemm::Mode::pairs : gemm::Mode::floats;
        const gemm::Panels panels = panels_of(w, pairs ? level.unpack_pairs : level.unpack_floats);
        return gemm::multiply_panels({panels, mode, x.const_data_ptr(), x_type, t, w.k, token_scale, floats_of(h.bias),
                                      out.mutable_data_ptr(), out_type});
    }
    const int64_t stride = integer_tiled::spread_bytes(w.k);
    const std::unique_ptr<uint8_t[]> spread(new uint8_t[t * stride]);
    const Floats p{w,
                   x.const_data_ptr(),
                   x_type,
                   spread.get(),
                   stride,
                   token_scale,
                   floats_of(h.bias),
                   out.mutable_data_ptr(),
                   out_type,
                   t};
    run_codes(t, w.k, [&](int64_t first, int64_t last) { level.spread(p, first, last); });
    run_codes(t ? row_tiles(w.n) : 0, tile_rows * w.k,
              [&](int64_t first, int64_t last) { level.floats(p, first, last); });
}

Tensor linear_tiled(const Tensor& x, const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& bias,
                    int64_t n, int64_t exponent, int64_t mantissa, int64_t group_size) {
    STD_TORCH_CHECK(x.dim() > 0, "minifloat_linear_tiled: x has no axis");
    const auto h = hold(tiles, scale, bias, n, x.size(-1), exponent, mantissa, group_size);
    const ScalarType dtype = x.scalar_type(), inside = kernel_type(dtype);
    const Tensor in = inside == ScalarType::BFloat16 ? compact(x) : as_float(x), out = empty_result(x, n, inside);
    multiply(*h, in, out, tokens_of(x), nullptr);
    return inside == dtype ? out : torch::stable::to(out, dtype);
}

void multiply_integers(const Held& h, const gemm::Tokens& tokens, const float* scales, const Tensor& out) {
    const Weight& w = h.w;
    const Kernels& level = kernels();
    const int64_t t = tokens.t, width = w.blocks * block_columns;
    const Number type = number_of(out.scalar_type());
    if (t > few_tokens && w.k && w.group_blocks * block_columns <= gemm::most_group)
        return gemm::multiply_panels({panels_of(w, level.unpack_bytes), gemm::Mode::quads, nullptr, Number::float32, t,
                                      w.k, scales, floats_of(h.bias), out.mutable_data_ptr(), type, tokens});
    std::unique_ptr<int8_t[]> room;
    const int8_t* q = gemm::rows_of(tokens, width, room);
    const std::unique_ptr<int32_t[]> sums(new int32_t[t * w.groups]);
    const Quantized p{w, q, width, scales, sums.get(), floats_of(h.bias), out.mutable_data_ptr(), type, t};
    run_codes(t, w.k / 4, [&](int64_t first, int64_t last) { level.sums(p, sums.get(), first, last); });
    run_codes(t ? row_tiles(w.n) : 0, tile_rows * w.k * std::max(int64_t{1}, t / 4),
              [&](int64_t first, int64_t last) { level.quantized(p, first, last); });
}

Tensor linear_quantized(const Tensor& q, const Tensor& q_scale, const Tensor& tiles, const Tensor& scale,
                        const std::optional<Tensor>& bias, int64_t n, int64_t exponent, int64_t mantissa,
                        int64_t group_size, ScalarType dtype) {
    STD_TORCH_CHECK(q.dim() > 0 && q.scalar_type() == ScalarType::Char, "minifloat_linear_quantized: q must be int8");
    const int64_t t = tokens_of(q), k = q.size(-1);
    STD_TORCH_CHECK(q_scale.numel() == t, "minifloat_linear_quantized: q_scale must have ", t, " elements");
    const auto h = hold(tiles, scale, bias, n, k, exponent, mantissa, group_size);
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
    const activations::Held in = activations::hold(x, input_bits, clip);
    const activations::Numbers& numbers = in.numbers;
    const auto h = hold(tiles, scale, bias, n, numbers.k, exponent, mantissa, group_size);
    const Tensor out = empty_result(x, n, kernel_type(dtype));
    const std::unique_ptr<float[]> scales(new float[numbers.t]);
    const float unit = std::ldexp(1.0f, -h->element.shift);
    multiply_integers(*h, {numbers.t, numbers.k, nullptr, &numbers, scales.get(), unit}, scales.get(), out);
    return out.scalar_type() == dtype ? out : torch::stable::to(out, dtype);
}

}  // namespace
}  // namespace ptq::minifloat_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("minifloat_linear_tiled", TORCH_BOX(&ptq::minifloat_tiled::linear_tiled));
    m.impl("minifloat_linear_quantized", TORCH_BOX(&ptq::minifloat_tiled::linear_quantized));
    m.impl("minifloat_linear_tokens", TORCH_BOX(&ptq::minifloat_tiled::linear_tokens));
}
