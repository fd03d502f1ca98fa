// ptq::integer_experts for the CPU: what the chosen experts of a block make of few tokens, as one op. Schema, fake
// kernel and reference are in quarot/expert_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "gemm/tokens.h"
#include "integer_tiled/held.h"
#include "integer_tiled/input.h"
#include "steps/steps_cpu.h"

namespace ptq::integer_tiled {
namespace {

using Ints = std::vector<int64_t>;
using Shares = std::vector<double>;

int64_t width_of(ScalarType type) {
    return type == ScalarType::Char ? 1 : type == ScalarType::BFloat16 ? 2 : 4;
}

// Rows of x [t, ...], one after another.
Tensor gathered(const Tensor& x, const Ints& rows) {
    Ints sizes(x.sizes().begin(), x.sizes().end());
    const int64_t bytes = sizes[0] ? x.numel() / sizes[0] * width_of(x.scalar_type()) : 0;
    sizes[0] = static_cast<int64_t>(rows.size());
    const Tensor in = compact(x), out = fresh(sizes, x.scalar_type());
    const auto* from = static_cast<const char*>(in.const_data_ptr());
    auto* to = static_cast<char*>(out.mutable_data_ptr());
    for (size_t i = 0; i < rows.size(); i++) std::memcpy(to + i * bytes, from + rows[i] * bytes, bytes);
    return out;
}

// Some rows of the input, times one weight: rows of `out` [rows, n].
struct Product {
    const Held& weight;
    int64_t from, rows;
    const Tensor& out;
    void* to() const {
        auto* data = static_cast<char*>(out.mutable_data_ptr());
        return data + from * weight.w.n * width_of(out.scalar_type());
    }
};

void multiply_integers(const Tensor& q, const Tensor& scale, const std::vector<Product>& products) {
    const int64_t rows = q.size(0), k = q.size(1), groups = products.front().weight.w.groups;
    const int64_t width = blocks_in(k) * block_columns;
    const gemm::Tokens tokens{rows, k, static_cast<const int8_t*>(q.const_data_ptr()), nullptr, nullptr, 1};
    std::unique_ptr<int8_t[]> room;
    const int8_t* padded = gemm::rows_of(tokens, width, room);
    const std::unique_ptr<int32_t[]> sums(new int32_t[rows * groups]);
    kernels().sums({padded, width, k / std::max(groups, int64_t{1}), groups, sums.get()}, 0, rows);
    std::vector<Quantized> problems;
    for (const Product& p : products)
        problems.push_back({p.weight.w, padded + p.from * width, width,
                            static_cast<const float*>(scale.const_data_ptr()) + p.from, sums.get() + p.from * groups,
                            nullptr, p.to(), number_of(p.out.scalar_type()), p.rows});
    run_rows(kernels().quantized, problems);
}

void multiply_floats(const Tensor& x, const std::vector<Product>& products) {
    const int64_t rows = x.size(0), k = x.size(1), groups = products.front().weight.w.groups, bytes = spread_bytes(k);
    const int64_t size = k * width_of(x.scalar_type());
    const std::unique_ptr<uint8_t[]> spread(new uint8_t[rows * bytes]);
    const std::unique_ptr<float[]> sums(new float[rows * groups]);
    std::vector<Floats> problems;
    for (const Product& p : products)
        problems.push_back({p.weight.w, static_cast<const uint8_t*>(x.const_data_ptr()) + p.from * size,
                            number_of(x.scalar_type()), spread.get() + p.from * bytes, bytes,
                            sums.get() + p.from * groups, nullptr, p.to(), number_of(p.out.scalar_type()), p.rows});
    Floats all = problems.front();
    all.x = x.const_data_ptr(), all.spread = spread.get(), all.sums = sums.get(), all.t = rows;
    run_codes(rows, k, [&](int64_t first, int64_t last) { kernels().spread(all, first, last); });
    run_rows(kernels().floats, problems);
}

void multiply(const Seen& in, const std::vector<Product>& products) {
    in.scale ? multiply_integers(in.x, *in.scale, products) : multiply_floats(in.x, products);
}

// To the nearest bfloat16, halves to even.
struct Brain {
    uint16_t bits;
    static Brain of(float x) {
        uint32_t all;
        std::memcpy(&all, &x, sizeof all);
        const uint32_t nearest = (all + 0x7fffu + (all >> 16 & 1u)) >> 16;
        return {static_cast<uint16_t>((all & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest)};
    }
    operator float() const {
        const uint32_t all = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &all, sizeof x);
        return x;
    }
};
struct Single {
    float x;
    static Single of(float x) { return {x}; }
    operator float() const { return x; }
};

// total[tokens[i]] += share[i] * y[i], row after row: product and sum are rounded each.
template <class Element>
void add_rows(const Tensor& y, const Shares& shares, const Ints& tokens, const Tensor& total) {
    const int64_t k = y.size(1);
    const auto* from = static_cast<const Element*>(y.const_data_ptr());
    auto* to = static_cast<Element*>(total.mutable_data_ptr());
    std::fill(to, to + total.numel(), Element::of(0));
    for (size_t i = 0; i < tokens.size(); i++) {
        const auto share = static_cast<float>(shares[i]);
        for (int64_t j = 0; j < k; j++) {
            Element& sum = to[tokens[i] * k + j];
            sum = Element::of(sum + Element::of(from[i * k + j] * share));
        }
    }
}

void check(const Tensor& x, const Ints& tokens, const Ints& counts, const Shares& shares, const Tensors& tiles) {
    const bool floats = x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16;
    STD_TORCH_CHECK(x.dim() == 2 && floats, "integer_experts: expected x [t, k], float32 or bfloat16");
    const auto rows = static_cast<int64_t>(tokens.size());
    STD_TORCH_CHECK(rows > 0 && std::accumulate(counts.begin(), counts.end(), int64_t{0}) == rows &&
                        std::all_of(counts.begin(), counts.end(), [](int64_t count) { return count > 0; }) &&
                        shares.size() == tokens.size() && tiles.size() == 3 * counts.size(),
                    "integer_experts: tokens, counts, shares and weights do not fit together");
    for (const int64_t token : tokens)
        STD_TORCH_CHECK(token >= 0 && token < x.size(0), "integer_experts: there is no token ", token);
}

Tensor experts(const Tensor& x, const Ints& tokens, const Ints& counts, const Shares& shares, const Tensors& tiles,
               const Tensors& scale, const Tensors& zero, int64_t width, int64_t bits, int64_t group_size,
               int64_t input_bits, double clip, const Tensors& factors, int64_t order, int64_t down_bits,
               double down_clip) {
    check(x, tokens, counts, shares, tiles);
    const size_t count = counts.size();
    const auto held = [&](size_t first, size_t last, int64_t n, int64_t k) {
        const auto some = [&](const Tensors& all) {
            return all.empty() ? all : Tensors(all.begin() + first, all.begin() + last);
        };
        return hold_all(some(tiles), some(scale), some(zero), {}, Ints(last - first, n), k, bits, group_size);
    };
    STD_TORCH_CHECK(scale.size() == tiles.size() && (zero.empty() || zero.size() == tiles.size()),
                    "integer tiles: lists of different lengths");
    const int64_t rows = static_cast<int64_t>(tokens.size()), k = x.size(1);
    const Tensors none;
    Seen in = seen(x, {input_bits, clip, none, 0});
    in.x = gathered(in.x, tokens);
    if (in.scale) in.scale = gathered(*in.scale, tokens);

    const Tensor gate = fresh(Ints{rows, width}, x.scalar_type()), up = fresh(Ints{rows, width}, x.scalar_type());
    const std::vector<Held> first = held(0, 2 * count, width, k), last = held(2 * count, 3 * count, k, width);
    std::vector<Product> products;
    const auto add = [&](const Held* weights, const Tensor& out) {
        int64_t from = 0;
        for (size_t i = 0; i < count; from += counts[i++]) products.push_back({weights[i], from, counts[i], out});
    };
    add(first.data(), gate);
    add(first.data() + count, up);
    multiply(in, products);

    const Tensor y = fresh(Ints{rows, k}, x.scalar_type()), total = fresh(x.sizes(), x.scalar_type());
    products.clear();
    add(last.data(), y);
    multiply(seen(steps::silu_mul(gate, up), {down_bits, down_clip, factors, order}), products);
    const auto sum = x.scalar_type() == ScalarType::Float ? add_rows<Single> : add_rows<Brain>;
    sum(y, shares, tokens, total);
    return total;
}

}  // namespace
}  // namespace ptq::integer_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("integer_experts", TORCH_BOX(&ptq::integer_tiled::experts));
}
