// ptq::e8p_prepack, _unprepack, _dequantize, _linear_tiled and _linear_quantized for the CPU. Schemas, fake kernels,
// references and gradients are in quip_sharp/tiled_ops.py.
#include "e8p_tiled/e8p_tiled_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "common/linear.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "gemm/product.h"
#include "tiles/run_rows.h"

namespace ptq::e8p_tiled {

extern const gemm::Unpack signed_bytes_amx;

namespace {

using torch::stable::empty;

constexpr int64_t few_tokens = 8;  // more go to gemm/

gemm::Panels panels_of(const Weight& w, gemm::Unpack unpack) {
    const int64_t columns = blocks_in(w.k) * block_columns;
    return {.weight = &w,
            .unpack = unpack,
            .scale = nullptr,
            .n = w.n,
            .columns = columns,
            .groups = 1,
            .group_columns = columns,
            .codes = w.tiles,
            .tile_bytes = tile_bytes(w.k, w.bits),
            .step_bytes = block_bytes(w.bits),
            .byte_offset = offset_of(w.bits),
            .factor = w.scale};
}

void many_tokens(const Quantized& p) {
    const gemm::Unpack amx = gemm::amx_unpack<signed_bytes_amx>();
    const gemm::Panels panels = panels_of(p.w, amx ? amx : kernels().unpack_bytes);
    const gemm::Mode mode = !amx && are_wide(p.w.bits) ? gemm::Mode::wide : gemm::Mode::quads;
    gemm::multiply_panels(gemm::product_of(panels, mode, p, {p.t, panels.columns, p.q, nullptr, nullptr, 1}));
}

bool is_many(const Quantized& p) {
    return p.t > few_tokens && p.w.k;
}
bool is_many(const Floats& p) {
    return p.t > gemm::few_floats(p.x_type, few_tokens) && p.w.k;
}
Form form_of(Number x_type, bool many) {
    if (!many) return kernels().few;
    return kernels().unpack_pairs && gemm::are_pairs(x_type) ? Form::pairs : Form::floats;
}

void many_floats(const Floats& p) {
    const Kernels& level = kernels();
    const bool pairs = p.form == Form::pairs;
    const gemm::Panels panels = panels_of(p.w, pairs ? level.unpack_pairs : level.unpack_floats);
    gemm::multiply_panels({.w = panels,
                           .mode = pairs ? gemm::Mode::pairs : gemm::Mode::floats,
                           .x = nullptr,
                           .x_type = Number::float32,
                           .t = p.t,
                           .k = panels.columns,
                           .token_scale = nullptr,
                           .bias = p.bias,
                           .out = p.out,
                           .out_type = p.out_type,
                           .rows = reinterpret_cast<const uint32_t*>(p.arranged),
                           .row_steps = p.arranged_stride / 4});
}

// x as its kernel wants it, in the memory that is returned.
std::unique_ptr<int32_t[]> arrange(Floats& p, bool many) {
    p.form = form_of(p.x_type, many);
    const int64_t steps = spread_steps(p.w.k, p.x_type, p.form);
    std::unique_ptr<int32_t[]> room(new int32_t[p.t * steps]);
    p.arranged = reinterpret_cast<uint8_t*>(room.get()), p.arranged_stride = 4 * steps;
    run(kernels().arrange_floats, p, p.t, p.w.k);
    return room;
}

Tensor linear_quantized(const Tensor& q, const Tensor& q_scale, const Tensor& tiles, const Tensor& scale,
                        const std::optional<Tensor>& bias, int64_t n, int64_t bits, ScalarType dtype) {
    STD_TORCH_CHECK(q.dim() > 0 && q.scalar_type() == ScalarType::Char, "e8p_linear_quantized: q must be int8");
    const int64_t k = q.size(-1), t = tokens_of(q), width = blocks_in(k) * block_columns;
    STD_TORCH_CHECK(q_scale.numel() == t, "e8p_linear_quantized: q_scale must have ", t, " elements");
    const HeldWeight h = hold(tiles, scale, bias, n, k, bits);
    const Tensor tokens = compact(q), token_scale = as_float(q_scale);
    const std::unique_ptr<int32_t[]> arranged(new int32_t[t * width / 4]), offsets(new int32_t[t]);
    auto* rows = reinterpret_cast<int8_t*>(arranged.get());
    run(kernels().arrange_tokens,
        ArrangedTokens{static_cast<const int8_t*>(tokens.const_data_ptr()), t, k, rows, offsets.get(),
                       offset_of(h.w.bits)},
        t, k / 4);
    const Tensor out = empty_result(q, n, kernel_type(dtype));
    const auto* scales = static_cast<const float*>(token_scale.const_data_ptr());
    const Quantized p{h.w, rows, offsets.get(), scales, h.bias_data(), out.mutable_data_ptr(), number_of(dtype), t};
    if (is_many(p))
        many_tokens(p);
    else
        run(kernels().quantized, p, t ? row_tiles(n) : 0, tile_rows * k * std::max(int64_t{1}, t / 4) / 2);
    return out.scalar_type() == dtype ? out : torch::stable::to(out, dtype);
}

Tensor linear_tiled(const Tensor& x, const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& bias,
                    int64_t n, int64_t bits) {
    STD_TORCH_CHECK(x.dim() > 0, "e8p_linear_tiled: x has no axis");
    const int64_t k = x.size(-1), t = tokens_of(x);
    const HeldWeight h = hold(tiles, scale, bias, n, k, bits);
    const ScalarType dtype = x.scalar_type(), inside = kernel_type(dtype);
    const Tensor in = inside == ScalarType::BFloat16 ? compact(x) : as_float(x);
    const Tensor out = empty_result(x, n, inside);
    Floats p{h.w, in.const_data_ptr(), number_of(inside),      nullptr,           0,
             {},  h.bias_data(),       out.mutable_data_ptr(), number_of(inside), t};
    const bool many = is_many(p);
    const std::unique_ptr<int32_t[]> room = arrange(p, many);
    if (many)
        many_floats(p);
    else
        run(kernels().floats, p, t ? row_tiles(n) : 0, tile_rows * k * std::max(int64_t{1}, t / 4));
    return inside == dtype ? out : torch::stable::to(out, dtype);
}

}  // namespace

void run_quantized(const std::vector<Quantized>& problems) {
    tiles::run_rows(kernels().quantized, problems, [](const Quantized& p) { return is_many(p); }, many_tokens);
}

void run_floats(const std::vector<Floats>& problems) {
    const auto many = [](Floats p) {
        if (p.form == form_of(p.x_type, true)) return many_floats(p);
        const std::unique_ptr<int32_t[]> room = arrange(p, true);
        many_floats(p);
    };
    tiles::run_rows(kernels().floats, problems, [](const Floats& p) { return is_many(p); }, many);
}

namespace {

Tensor dequantize(const Tensor& tiles, const Tensor& scale, int64_t n, int64_t bits, int64_t k) {
    const HeldWeight h = hold(tiles, scale, std::nullopt, n, k, bits);
    const Tensor out = empty({n, k}, ScalarType::Float);
    run(kernels().dequantize, Dequantize{h.w, static_cast<float*>(out.mutable_data_ptr())}, k ? row_tiles(n) : 0,
        tile_rows * k);
    return out;
}

Tensor prepack(const Tensor& codes) {
    STD_TORCH_CHECK(codes.dim() == 3 && codes.scalar_type() == ScalarType::Byte,
                    "e8p_prepack: codes must be uint8 [bits, n, columns / 8]");
    const int64_t bits = codes.size(0), n = codes.size(1), row_codes = codes.size(2);
    check_bits(bits);
    const Tensor rows = compact(codes);
    const Tensor tiles = empty({row_tiles(n), blocks_in(8 * row_codes) * bits, 64}, ScalarType::Byte);
    const Pack p{const_cast<uint8_t*>(static_cast<const uint8_t*>(rows.const_data_ptr())),
                 static_cast<uint8_t*>(tiles.mutable_data_ptr()), n, row_codes, static_cast<int>(bits)};
    run(pack_tiles, p, row_codes ? row_tiles(n) : 0, tile_rows * row_codes);
    return tiles;
}

Tensor unprepack(const Tensor& tiles, int64_t n, int64_t bits, int64_t k) {
    check_bits(bits);
    check_tensor("e8p tiles", "tiles", tiles, ScalarType::Byte, {row_tiles(n), blocks_in(k) * bits, 64});
    const int64_t row_codes = (k + 7) / 8;
    const Tensor in = compact(tiles), codes = empty({bits, n, row_codes}, ScalarType::Byte);
    const Pack p{static_cast<uint8_t*>(codes.mutable_data_ptr()),
                 const_cast<uint8_t*>(static_cast<const uint8_t*>(in.const_data_ptr())), n, row_codes,
                 static_cast<int>(bits)};
    run(unpack_tiles, p, row_tiles(n), tile_rows * row_codes);
    return codes;
}

}  // namespace
}  // namespace ptq::e8p_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("e8p_prepack", TORCH_BOX(&ptq::e8p_tiled::prepack));
    m.impl("e8p_unprepack", TORCH_BOX(&ptq::e8p_tiled::unprepack));
    m.impl("e8p_dequantize", TORCH_BOX(&ptq::e8p_tiled::dequantize));
    m.impl("e8p_linear_tiled", TORCH_BOX(&ptq::e8p_tiled::linear_tiled));
    m.impl("e8p_linear_quantized", TORCH_BOX(&ptq::e8p_tiled::linear_quantized));
}
