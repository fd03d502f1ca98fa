// ptq::integer_prepack, _unprepack, _linear_tiled, _linear_quantized and _linear_tokens for the CPU. Schemas, fake
// kernels, references and gradients are in quarot/tiled_ops.py.
#include "integer_tiled/tiled_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "activations/activations_cpu.h"
#include "gemm/product.h"
#include "integer_tiled/held.h"
#include "tiles/run_rows.h"

namespace ptq::integer_tiled {

extern const gemm::Unpack signed_bytes_amx;

namespace {

using torch::stable::empty;

constexpr int64_t few_tokens = 8;     // more go to `many_tokens`,
constexpr int64_t few_floats = 16;    // of floats, to `many_floats`, where there is one,
constexpr int64_t few_avx2 = 32;      // below AVX-512
constexpr int64_t chunk_tokens = 32;  // of floats: arranged, they stay in the second-level cache

}  // namespace

bool is_many(const Floats& p) {
    const int64_t few = cpu_level() < CpuLevel::avx512 ? few_avx2 : few_floats;
    return kernels().unpack_floats && p.t > gemm::few_floats(p.x_type, few) && p.w.k;
}
bool is_many(const Quantized& p) {
    const int64_t columns = p.w.multiples ? p.w.k : p.w.group_blocks * block_columns;
    return p.t > few_tokens && p.w.k && columns <= gemm::most_group;
}

namespace {

Tensors cast(Tensors results, ScalarType dtype) {
    if (results.front().scalar_type() != dtype)
        for (Tensor& y : results) y = torch::stable::to(y, dtype);
    return results;
}

gemm::Panels panels_of(const Weight& w, gemm::Unpack unpack) {
    return {.weight = &w,
            .unpack = unpack,
            .scale = w.scale,
            .n = w.n,
            .columns = blocks_in(w.k) * block_columns,
            .groups = w.groups,
            .group_columns = w.group_blocks * block_columns,
            .codes = w.tiles,
            .tile_bytes = tile_bytes(w.k, w.bits),
            .step_bytes = block_bytes(w.bits),
            .byte_offset = 1 << (w.bits - 1),
            .zero = w.zero,
            .direct = (w.multiples ? vector_kernels().multiplied : vector_kernels().direct)[w.bits - 2],
            .multiples = w.multiples};
}

// Integer scales, where codes are unpacked: panels hold bytes, codes times multiples, and the one scale of a row is its
// step, kept in `steps`.
gemm::Panels panels_of_bytes(const Weight& w, std::vector<uint16_t>& steps) {
    gemm::Panels p = panels_of(w, nullptr);
    for (int64_t tile = 0; tile < p.tiles(); tile++)
        for (int64_t r = 0; r < tile_rows; r++)
            steps.push_back(static_cast<uint16_t>(w.multiples[tile * (1 + w.groups) * tile_rows + r] << 7));
    p.scale = steps.data(), p.multiples = nullptr, p.direct = {}, p.byte_offset = 128;
    p.groups = 1, p.group_columns = p.columns;
    return p;
}

void many_tokens(const Quantized& p, const gemm::Tokens& from) {
    const gemm::Unpack amx = gemm::amx_unpack<signed_bytes_amx>();
    std::vector<uint16_t> steps;
    gemm::Panels panels = panels_of(p.w, nullptr);
    const bool bytes = p.w.multiples && (amx || p.t > panels.direct.tokens);
    if (bytes) panels = panels_of_bytes(p.w, steps);
    const int bits = bytes ? 8 : p.w.bits;
    const bool nibbles = !amx && bits <= 4, wide = !amx && bits == 8;
    const gemm::Mode mode = nibbles ? gemm::Mode::nibbles : wide ? gemm::Mode::wide : gemm::Mode::quads;
    panels.unpack = amx ? amx : kernels().unpack_bytes;
    gemm::multiply_panels(gemm::product_of(panels, mode, p, from));
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
                           .token_scale = nullptr,
                           .bias = p.bias,
                           .out = p.out,
                           .out_type = p.out_type});
}

// `like`: a tensor with the axes of the tokens.
Tensors multiply_tokens(const Tensor& like, const gemm::Tokens& tokens, const float* scales,
                        const std::vector<HeldWeight>& held, ScalarType dtype) {
    const int64_t t = tokens.t, groups = held.front().w.groups;
    const int64_t width = blocks_in(tokens.k) * block_columns;
    const std::unique_ptr<int32_t[]> sums(new int32_t[t * groups]);
    Tensors results;
    std::vector<Quantized> problems;
    for (const HeldWeight& h : held) {
        results.push_back(empty_result(like, h.w.n, kernel_type(dtype)));
        problems.push_back({h.w, nullptr, width, scales, sums.get(), h.bias_data(), results.back().mutable_data_ptr(),
                            number_of(dtype), t});
    }
    if (is_many(problems.front())) {
        for (const Quantized& p : problems) many_tokens(p, tokens);
    } else if (t) {
        std::unique_ptr<int8_t[]> room;
        const int8_t* q = gemm::rows_of(tokens, width, room);
        for (Quantized& p : problems) p.q = q;
        const Sums s{q, width, tokens.k / std::max(groups, int64_t{1}), groups, sums.get()};
        run_codes(t, tokens.k / 4, [&](int64_t first, int64_t last) { kernels().sums(s, first, last); });
        run_rows(kernels().quantized, problems);
    }
    return cast(std::move(results), dtype);
}

}  // namespace

void run_quantized(const std::vector<Quantized>& problems) {
    const auto many = [](const Quantized& p) { many_tokens(p, {p.t, p.q_stride, p.q, nullptr, nullptr, 1}); };
    run_rows(kernels().quantized, problems, [](const Quantized& p) { return is_many(p); }, many);
}

void run_floats(const std::vector<Floats>& problems) {
    run_rows(vector_kernels().floats, problems, [](const Floats& p) { return is_many(p); }, many_floats);
}

Tensors multiply_quantized(const Tensor& q, const Tensor& q_scale, const std::vector<HeldWeight>& held,
                           ScalarType dtype) {
    const int64_t t = tokens_of(q);
    STD_TORCH_CHECK(q_scale.numel() == t, "integer_linear_quantized: q_scale must have ", t, " elements");
    const Tensor whole = compact(q), scale = as_float(q_scale);
    const gemm::Tokens tokens{t, q.size(-1), static_cast<const int8_t*>(whole.const_data_ptr()), nullptr, nullptr, 1};
    return multiply_tokens(q, tokens, static_cast<const float*>(scale.const_data_ptr()), held, dtype);
}

Tensors multiply_floats(const Tensor& x, const std::vector<HeldWeight>& held) {
    const int64_t k = x.size(-1), t = tokens_of(x);
    const ScalarType dtype = x.scalar_type(), inside = kernel_type(dtype);
    const Tensor in = inside == ScalarType::BFloat16 ? compact(x) : as_float(x);
    Tensors results;
    for (const HeldWeight& h : held) results.push_back(empty_result(x, h.w.n, inside));
    const auto problem = [&](size_t i) {
        return Floats{
            held[i].w,           in.const_data_ptr(),           number_of(inside), nullptr, arranged_bytes(k), nullptr,
            held[i].bias_data(), results[i].mutable_data_ptr(), number_of(inside), t};
    };
    if (is_many(problem(0))) {
        for (size_t i = 0; i < held.size(); i++) many_floats(problem(i));
        return cast(std::move(results), dtype);
    }
    const int64_t most = std::min(t, chunk_tokens), size = inside == ScalarType::BFloat16 ? 2 : 4;
    const std::unique_ptr<uint8_t[]> arranged(new uint8_t[most * arranged_bytes(k)]);
    const std::unique_ptr<float[]> sums(new float[most * held.front().w.groups]);
    for (int64_t from = 0; from < t; from += most) {
        std::vector<Floats> problems;
        for (size_t i = 0; i < held.size(); i++) {
            Floats p = problem(i);
            p.x = static_cast<const uint8_t*>(p.x) + from * k * size;
            p.out = static_cast<uint8_t*>(p.out) + from * p.w.n * size;
            p.arranged = arranged.get(), p.sums = sums.get(), p.t = std::min(most, t - from);
            problems.push_back(p);
        }
        const Floats& one = problems.front();
        run_codes(one.t, k, [&](int64_t first, int64_t last) { vector_kernels().arrange(one, first, last); });
        run_rows(vector_kernels().floats, problems);
    }
    return cast(std::move(results), dtype);
}

namespace {

void check_input(const Tensor& q) {
    STD_TORCH_CHECK(q.dim() > 0 && q.scalar_type() == ScalarType::Char, "integer_linear_quantized: q must be int8");
}

Tensor linear_quantized(const Tensor& q, const Tensor& q_scale, const Tensor& tiles, const Tensor& scale,
                        const std::optional<Tensor>& zero, const std::optional<Tensor>& bias, int64_t n, int64_t bits,
                        int64_t group_size, ScalarType dtype) {
    check_input(q);
    std::vector<HeldWeight> held;
    held.push_back(hold(tiles, scale, zero, bias, n, q.size(-1), bits, group_size));
    return multiply_quantized(q, q_scale, held, dtype).front();
}

Tensor linear_tokens(const Tensor& x, const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& zero,
                     const std::optional<Tensor>& bias, int64_t n, int64_t bits, int64_t group_size, int64_t input_bits,
                     double clip, ScalarType dtype) {
    const activations::HeldTokens in = activations::hold(x, input_bits, clip);
    std::vector<HeldWeight> held;
    held.push_back(hold(tiles, scale, zero, bias, n, x.size(-1), bits, group_size));
    const std::unique_ptr<float[]> scales(new float[in.numbers.t]);
    const gemm::Tokens tokens{in.numbers.t, in.numbers.k, nullptr, &in.numbers, scales.get(), 1};
    return multiply_tokens(x, tokens, scales.get(), held, dtype).front();
}

Tensors linears_quantized(const Tensor& q, const Tensor& q_scale, const Tensors& tiles, const Tensors& scale,
                          const Tensors& zero, const Tensors& bias, const std::vector<int64_t>& n, int64_t bits,
                          int64_t group_size, ScalarType dtype) {
    check_input(q);
    const std::vector<HeldWeight> held = hold_all(tiles, scale, zero, bias, n, q.size(-1), bits, group_size);
    return multiply_quantized(q, q_scale, held, dtype);
}

Tensor linear_tiled(const Tensor& x, const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& zero,
                    const std::optional<Tensor>& bias, int64_t n, int64_t bits, int64_t group_size) {
    STD_TORCH_CHECK(x.dim() > 0, "integer_linear_tiled: x has no axis");
    std::vector<HeldWeight> held;
    held.push_back(hold(tiles, scale, zero, bias, n, x.size(-1), bits, group_size));
    return multiply_floats(x, held).front();
}

Tensors linears_tiled(const Tensor& x, const Tensors& tiles, const Tensors& scale, const Tensors& zero,
                      const Tensors& bias, const std::vector<int64_t>& n, int64_t bits, int64_t group_size) {
    STD_TORCH_CHECK(x.dim() > 0, "integer_linear_tiled: x has no axis");
    return multiply_floats(x, hold_all(tiles, scale, zero, bias, n, x.size(-1), bits, group_size));
}

Tensor prepack(const Tensor& codes, int64_t bits, int64_t k) {
    check_bits(bits);
    const int64_t n = codes.size(0), bytes = (k * bits + 7) / 8;
    check_tensor("integer tiles", "codes", codes, ScalarType::Byte, {n, bytes});
    const Tensor rows = compact(codes);
    const Tensor tiles = empty({row_tiles(n), blocks_in(k), block_bytes(static_cast<int>(bits))}, ScalarType::Byte);
    const Pack p{const_cast<uint8_t*>(static_cast<const uint8_t*>(rows.const_data_ptr())),
                 static_cast<uint8_t*>(tiles.mutable_data_ptr()),
                 n,
                 k,
                 bytes,
                 static_cast<int>(bits)};
    run_codes(k ? row_tiles(n) : 0, tile_rows * k, [&](int64_t first, int64_t last) { pack_tiles(p, first, last); });
    return tiles;
}

Tensor unprepack(const Tensor& tiles, int64_t n, int64_t bits, int64_t k) {
    check_bits(bits);
    check_tensor("integer tiles", "tiles", tiles, ScalarType::Byte,
                 {row_tiles(n), blocks_in(k), block_bytes(static_cast<int>(bits))});
    const int64_t bytes = (k * bits + 7) / 8;
    const Tensor in = compact(tiles), rows = empty({n, bytes}, ScalarType::Byte);
    const Pack p{static_cast<uint8_t*>(rows.mutable_data_ptr()),
                 const_cast<uint8_t*>(static_cast<const uint8_t*>(in.const_data_ptr())),
                 n,
                 k,
                 bytes,
                 static_cast<int>(bits)};
    run_codes(row_tiles(n), tile_rows * k, [&](int64_t first, int64_t last) { unpack_tiles(p, first, last); });
    return rows;
}

}  // namespace
}  // namespace ptq::integer_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("integer_prepack", TORCH_BOX(&ptq::integer_tiled::prepack));
    m.impl("integer_unprepack", TORCH_BOX(&ptq::integer_tiled::unprepack));
    m.impl("integer_linear_tiled", TORCH_BOX(&ptq::integer_tiled::linear_tiled));
    m.impl("integer_linear_quantized", TORCH_BOX(&ptq::integer_tiled::linear_quantized));
    m.impl("integer_linear_tokens", TORCH_BOX(&ptq::integer_tiled::linear_tokens));
    m.impl("integer_linears_tiled", TORCH_BOX(&ptq::integer_tiled::linears_tiled));
    m.impl("integer_linears_quantized", TORCH_BOX(&ptq::integer_tiled::linears_quantized));
}
