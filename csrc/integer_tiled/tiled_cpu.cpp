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
#include "common/cpu_level.h"
#include "common/linear.h"
#include "common/tensors.h"
#include "integer_tiled/gemm_kernels.h"
#include "integer_tiled/kernels.h"
#include "integer_tiled/layout.h"

namespace ptq::integer_tiled {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::empty;
using torch::stable::Tensor;

const Kernels& kernels() {
    return at_level<portable, avx2, avx512, avx512vnni, avx512bf16>();
}

constexpr int64_t few_tokens = 8;  // more go to `many_tokens`

void check_bits(int64_t bits) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 8, "integer tiles: bits must be 2 to 8, found ", bits);
}

constexpr int64_t chunk_tokens = 32;  // of floats: their spread stays in the second-level cache

// The tensors of a weight, checked and held: their pointers are in `w`.
struct Held {
    Tensor tiles, scale;
    std::optional<Tensor> zero, bias;
    Weight w;
    const float* bias_data() const { return bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr; }
};

Held hold(const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& zero,
          const std::optional<Tensor>& bias, int64_t n, int64_t k, int64_t bits, int64_t group_size) {
    check_bits(bits);
    STD_TORCH_CHECK(group_size >= 0 && group_size % block_columns == 0 && (group_size == 0 || k % group_size == 0),
                    "integer tiles: ", k, " columns do not divide into groups of ", group_size);
    const int64_t groups = group_size ? k / group_size : 1;
    check_tensor("integer tiles", "tiles", tiles, ScalarType::Byte,
                 {row_tiles(n), blocks_in(k), block_bytes(static_cast<int>(bits))});
    check_tensor("integer tiles", "scale", scale, ScalarType::Short, {row_tiles(n), groups, tile_rows});
    if (zero) check_tensor("integer tiles", "zero", *zero, ScalarType::Byte, {row_tiles(n), groups, tile_rows});
    STD_TORCH_CHECK(!bias || bias->numel() == n, "integer tiles: bias must have ", n, " elements");
    Held h{compact(tiles), compact(scale), std::nullopt, std::nullopt, {}};
    if (zero) h.zero = compact(*zero);
    if (bias) h.bias = as_float(*bias);
    h.w = {static_cast<const uint8_t*>(h.tiles.const_data_ptr()),
           static_cast<const uint16_t*>(h.scale.const_data_ptr()),
           h.zero ? static_cast<const uint8_t*>(h.zero->const_data_ptr()) : nullptr,
           n,
           k,
           groups,
           group_size ? group_size / block_columns : blocks_in(k),
           static_cast<int>(bits)};
    return h;
}

// Weights that share an input: `zero` and `bias` are empty, or one for each; a bias of no elements is none.
std::vector<Held> hold_all(const Tensors& tiles, const Tensors& scale, const Tensors& zero, const Tensors& bias,
                           const std::vector<int64_t>& n, int64_t k, int64_t bits, int64_t group_size) {
    const size_t count = n.size();
    STD_TORCH_CHECK(count > 0 && tiles.size() == count && scale.size() == count &&
                        (zero.empty() || zero.size() == count) && (bias.empty() || bias.size() == count),
                    "integer tiles: lists of different lengths");
    std::vector<Held> held;
    held.reserve(count);
    for (size_t i = 0; i < count; i++)
        held.push_back(hold(tiles[i], scale[i], zero.empty() ? std::nullopt : std::optional(zero[i]),
                            bias.empty() || !bias[i].numel() ? std::nullopt : std::optional(bias[i]), n[i], k, bits,
                            group_size));
    return held;
}

// The row tiles of all problems as one range of units: threads are woken once, and share all of it evenly.
template <class Problem>
void run_rows(void (*kernel)(const Problem&, int64_t, int64_t), const std::vector<Problem>& problems) {
    const Problem& one = problems.front();
    int64_t total = 0;
    for (const Problem& p : problems) total += row_tiles(p.w.n);
    run_codes(total, tile_rows * one.w.k * std::max(int64_t{1}, one.t / 4), [&](int64_t first, int64_t last) {
        for (const Problem& p : problems) {
            const int64_t units = row_tiles(p.w.n), from = std::max(first, int64_t{0}), to = std::min(last, units);
            if (from < to) kernel(p, from, to);
            first -= units, last -= units;
        }
    });
}

Tensors cast(Tensors results, ScalarType dtype) {
    if (results.front().scalar_type() != dtype)
        for (Tensor& y : results) y = torch::stable::to(y, dtype);
    return results;
}

// `like`: a tensor with the axes of the tokens.
Tensors multiply_tokens(const Tensor& like, const gemm::Tokens& tokens, const float* scales,
                        const std::vector<Held>& held, ScalarType dtype) {
    const int64_t t = tokens.t, groups = held.front().w.groups, group_blocks = held.front().w.group_blocks;
    const int64_t width = blocks_in(tokens.k) * block_columns;
    const std::unique_ptr<int32_t[]> sums(new int32_t[t * groups]);
    Tensors results;
    std::vector<Quantized> problems;
    for (const Held& h : held) {
        results.push_back(empty_result(like, h.w.n, kernel_type(dtype)));
        problems.push_back({h.w, nullptr, width, scales, sums.get(), h.bias_data(), results.back().mutable_data_ptr(),
                            number_of(dtype), t});
    }
    if (t > few_tokens && tokens.k && group_blocks <= gemm_blocks) {
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

Tensors multiply_quantized(const Tensor& q, const Tensor& q_scale, const std::vector<Held>& held, ScalarType dtype) {
    const int64_t t = tokens_of(q);
    STD_TORCH_CHECK(q_scale.numel() == t, "integer_linear_quantized: q_scale must have ", t, " elements");
    const Tensor whole = compact(q), scale = as_float(q_scale);
    const gemm::Tokens tokens{t, q.size(-1), static_cast<const int8_t*>(whole.const_data_ptr()), nullptr, nullptr, 1};
    return multiply_tokens(q, tokens, static_cast<const float*>(scale.const_data_ptr()), held, dtype);
}

Tensors multiply_floats(const Tensor& x, const std::vector<Held>& held) {
    const int64_t k = x.size(-1), t = tokens_of(x);
    const ScalarType dtype = x.scalar_type(), inside = kernel_type(dtype);
    const Tensor in = inside == ScalarType::BFloat16 ? compact(x) : as_float(x);
    Tensors results;
    for (const Held& h : held) results.push_back(empty_result(x, h.w.n, inside));
    const int64_t most = std::min(t, chunk_tokens), size = inside == ScalarType::BFloat16 ? 2 : 4;
    const std::unique_ptr<uint8_t[]> spread(new uint8_t[most * spread_bytes(k)]);
    const std::unique_ptr<float[]> sums(new float[most * held.front().w.groups]);
    for (int64_t from = 0; from < t; from += most) {
        std::vector<Floats> problems;
        for (size_t i = 0; i < held.size(); i++)
            problems.push_back({held[i].w, static_cast<const uint8_t*>(in.const_data_ptr()) + from * k * size,
                                number_of(inside), spread.get(), spread_bytes(k), sums.get(), held[i].bias_data(),
                                static_cast<uint8_t*>(results[i].mutable_data_ptr()) + from * held[i].w.n * size,
                                number_of(inside), std::min(most, t - from)});
        const Floats& one = problems.front();
        run_codes(one.t, k, [&](int64_t first, int64_t last) { kernels().spread(one, first, last); });
        run_rows(kernels().floats, problems);
    }
    return cast(std::move(results), dtype);
}

void check_input(const Tensor& q) {
    STD_TORCH_CHECK(q.dim() > 0 && q.scalar_type() == ScalarType::Char, "integer_linear_quantized: q must be int8");
}

Tensor linear_quantized(const Tensor& q, const Tensor& q_scale, const Tensor& tiles, const Tensor& scale,
                        const std::optional<Tensor>& zero, const std::optional<Tensor>& bias, int64_t n, int64_t bits,
                        int64_t group_size, ScalarType dtype) {
    check_input(q);
    std::vector<Held> held;
    held.push_back(hold(tiles, scale, zero, bias, n, q.size(-1), bits, group_size));
    return multiply_quantized(q, q_scale, held, dtype).front();
}

Tensor linear_tokens(const Tensor& x, const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& zero,
                     const std::optional<Tensor>& bias, int64_t n, int64_t bits, int64_t group_size, int64_t input_bits,
                     double clip, ScalarType dtype) {
    const activations::Held in = activations::hold(x, input_bits, clip);
    std::vector<Held> held;
    held.push_back(hold(tiles, scale, zero, bias, n, x.size(-1), bits, group_size));
    const std::unique_ptr<float[]> scales(new float[in.numbers.t]);
    const gemm::Tokens tokens{in.numbers.t, in.numbers.k, nullptr, &in.numbers, scales.get(), 1};
    return multiply_tokens(x, tokens, scales.get(), held, dtype).front();
}

}  // namespace

Tensors linears_quantized(const Tensor& q, const Tensor& q_scale, const Tensors& tiles, const Tensors& scale,
                          const Tensors& zero, const Tensors& bias, const std::vector<int64_t>& n, int64_t bits,
                          int64_t group_size, ScalarType dtype) {
    check_input(q);
    const std::vector<Held> held = hold_all(tiles, scale, zero, bias, n, q.size(-1), bits, group_size);
    return multiply_quantized(q, q_scale, held, dtype);
}

namespace {

Tensor linear_tiled(const Tensor& x, const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& zero,
                    const std::optional<Tensor>& bias, int64_t n, int64_t bits, int64_t group_size) {
    STD_TORCH_CHECK(x.dim() > 0, "integer_linear_tiled: x has no axis");
    std::vector<Held> held;
    held.push_back(hold(tiles, scale, zero, bias, n, x.size(-1), bits, group_size));
    return multiply_floats(x, held).front();
}

}  // namespace

Tensors linears_tiled(const Tensor& x, const Tensors& tiles, const Tensors& scale, const Tensors& zero,
                      const Tensors& bias, const std::vector<int64_t>& n, int64_t bits, int64_t group_size) {
    STD_TORCH_CHECK(x.dim() > 0, "integer_linear_tiled: x has no axis");
    return multiply_floats(x, hold_all(tiles, scale, zero, bias, n, x.size(-1), bits, group_size));
}

namespace {

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
    run_codes(row_tiles(n), tile_rows * k, [&](int64_t first, int64_t last) { pack_tiles(p, first, last); });
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
