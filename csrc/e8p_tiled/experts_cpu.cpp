// ptq::e8p_experts for the CPU: what the chosen experts of a block make of few tokens, as one op. Schema, fake kernel
// and reference are in quip_sharp/expert_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "e8p_tiled/weights.h"
#include "experts/moe.h"
#include "hadamard/hadamard_cpu.h"

namespace ptq::e8p_tiled {
namespace {

using experts::Int64s;
using Products = std::vector<experts::Product>;

// A vector for every row: that of its expert.
Tensor of_rows(const Tensors& vectors, size_t first, const Int64s& counts, int64_t size) {
    int64_t rows = 0;
    for (const int64_t count : counts) rows += count;
    const Tensor found = fresh(Int64s{rows, size}, ScalarType::Float);
    auto* to = static_cast<float*>(found.mutable_data_ptr());
    for (const int64_t count : counts) {
        const Tensor vector = compact(vectors[first++]);
        for (int64_t row = 0; row < count; row++, to += size)
            std::memcpy(to, vector.const_data_ptr(), size * sizeof(float));
    }
    return found;
}

// y [rows, n] += the bias of each row's expert, float32.
void add_biases(const Tensor& y, const experts::Inside& inside, size_t first, const Int64s& counts) {
    const int64_t n = y.size(1);
    auto* to = static_cast<float*>(y.mutable_data_ptr());
    for (const int64_t count : counts) {
        const std::optional<Tensor> bias = inside.bias(first++);
        if (bias) {
            STD_TORCH_CHECK(bias->numel() == n, "e8p_experts: bias must have ", n, " elements");
            const Tensor held = as_float(*bias);
            const auto* from = static_cast<const float*>(held.const_data_ptr());
            for (int64_t i = 0; i < count * n; i++) to[i] += from[i % n];
        }
        to += count * n;
    }
}

// What `count` weights of every expert make of the same input, before their products are transformed back: float32
// [count * rows, n], one weight of all experts after the other.
Tensor multiplied(const ExpertWeights& weights, const Seen& in, const Int64s& counts, size_t count, int64_t n,
                  ScalarType dtype) {
    const int64_t rows = in.x.size(0);
    const Tensor out = fresh(Int64s{static_cast<int64_t>(count) * rows, n}, in.scale ? ScalarType::Float : dtype);
    Tensors pieces;
    for (size_t i = 0; i < count; i++) pieces.push_back(rows_of(out, static_cast<int64_t>(i) * rows, rows));
    Products products;
    size_t weight = 0;
    for (const Tensor& piece : pieces) {
        int64_t from = 0;
        for (const int64_t size : counts) {
            products.push_back({weight++, from, size, piece});
            from += size;
        }
    }
    weights.multiply(in, products);
    return as_float(out);
}

Tensor compute(const Tensor& x, const Int64s& tokens, const Int64s& counts, const experts::Shares& shares,
               const Tensors& tiles, const Tensors& scale, const Tensors& su, const Tensors& sv, int64_t width,
               int64_t bits, int64_t input_bits, double clip, int64_t down_bits, double down_clip,
               const Tensors& factors, int64_t order, const Tensors& width_factors, int64_t width_order,
               const Tensors& biases, const experts::Shares& clamped) {
    const experts::Inside inside{biases, clamped};
    experts::check(x, {tokens, counts, shares}, tiles.size(), inside);
    const size_t count = counts.size();
    STD_TORCH_CHECK(scale.size() == tiles.size() && su.size() == count + 1 && sv.size() == 3 * count,
                    "e8p_experts: lists of weights or signs do not fit together");
    const int64_t k = x.size(1);
    const ScalarType dtype = x.scalar_type();
    for (size_t i = 0; i <= count; i++) check_tensor("e8p_experts", "su", su[i], ScalarType::Float, {i ? width : k});
    for (size_t i = 0; i < 3 * count; i++)
        check_tensor("e8p_experts", "sv", sv[i], ScalarType::Float, {i < 2 * count ? width : k});
    const auto weights = [&](size_t first, size_t last, int64_t n, int64_t columns) {
        ExpertWeights found;
        for (size_t i = first; i < last; i++)
            found.held.push_back(hold(tiles[i], scale[i], std::nullopt, n, columns, bits));
        return found;
    };
    Seen in = seen(x, {input_bits, clip, factors, order, su.front()});
    in.x = experts::gathered(in.x, tokens);
    if (in.scale) in.scale = experts::gathered(*in.scale, tokens);
    Int64s twice = counts;
    twice.insert(twice.end(), counts.begin(), counts.end());
    Tensor y = multiplied(weights(0, 2 * count, width, k), in, counts, 2, width, dtype);
    y = hadamard::hadamard(y, of_rows(sv, 0, twice, width), width_factors, width_order, -1, true);
    add_biases(y, inside, 0, twice);
    y = from_float(y, dtype);
    const auto rows = static_cast<int64_t>(tokens.size());
    const Tensor gated = inside.gated(rows_of(y, 0, rows), rows_of(y, rows, rows));
    in = seen(gated, {down_bits, down_clip, width_factors, width_order, of_rows(su, 1, counts, width)});
    y = multiplied(weights(2 * count, 3 * count, k, width), in, counts, 1, k, dtype);
    y = hadamard::hadamard(y, of_rows(sv, 2 * count, counts, k), factors, order, -1, true);
    add_biases(y, inside, 2 * count, counts);
    return experts::weighed(from_float(y, dtype), {tokens, counts, shares}, x);
}

// The numbers of a sign vector, which is stored as the bits of float16 numbers, none of them infinite or NaN.
Tensor numbers(const Tensor& signs) {
    STD_TORCH_CHECK(signs.scalar_type() == ScalarType::Short, "e8p_all_experts: signs must be int16");
    const Tensor in = compact(signs), out = fresh(in.sizes(), ScalarType::Float);
    const auto* from = static_cast<const uint16_t*>(in.const_data_ptr());
    auto* to = static_cast<float*>(out.mutable_data_ptr());
    const int64_t count = in.numel();
    for (int64_t i = 0; i < count; i++) {  // 2^112: the difference of the biases of both exponents
        const uint32_t size = (from[i] & 0x7fffu) << 13, sign = (from[i] & 0x8000u) << 16;
        to[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(size) * 0x1p112f) | sign);
    }
    return out;
}

Tensors numbers_of(const Tensors& signs) {
    Tensors found;
    for (const Tensor& each : signs) found.push_back(numbers(each));
    return found;
}

// `su`: of gates and ups, which share it, then of all downs.
Tensor hold_experts(const Tensors& tiles, const Tensors& scale, const Tensors& su, const Tensors& sv, int64_t width,
                    int64_t bits, int64_t input_bits, double clip, int64_t down_bits, double down_clip,
                    const Tensors& factors, int64_t order, const Tensors& width_factors, int64_t width_order,
                    const Tensors& biases, const experts::Shares& clamped) {
    STD_TORCH_CHECK(su.size() == tiles.size() / 3 + 1 && sv.size() == tiles.size(),
                    "e8p_all_experts: lists of weights and signs do not fit together");
    return experts::hold(tiles.size(), [=](const Tensor& x, const experts::Choice& c) {
        Tensors inputs{numbers(su.front())};
        for (const int64_t expert : c.experts) inputs.push_back(numbers(su[expert + 1]));
        return compute(x, c.tokens, c.counts, c.shares, c.of(tiles), c.of(scale), inputs, numbers_of(c.of(sv)), width,
                       bits, input_bits, clip, down_bits, down_clip, factors, order, width_factors, width_order,
                       c.of(biases), clamped);
    });
}

}  // namespace
}  // namespace ptq::e8p_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("e8p_experts", TORCH_BOX(&ptq::e8p_tiled::compute));
    m.impl("e8p_all_experts", TORCH_BOX(&ptq::e8p_tiled::hold_experts));
}
