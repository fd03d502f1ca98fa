// ptq::integer_experts for the CPU: what the chosen experts of a block make of few tokens, as one op. Schema, fake
// kernel and reference are in quarot/expert_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "experts/moe.h"
#include "gemm/tokens.h"
#include "integer_tiled/tiled_cpu.h"

namespace ptq::integer_tiled {
namespace {

struct ExpertWeights {
    std::vector<HeldWeight> held;

    void multiply(const Seen& in, const std::vector<experts::Product>& products) const {
        in.scale ? integers(in.x, *in.scale, products) : floats(in.x, products);
    }
    void integers(const Tensor& q, const Tensor& scale, const std::vector<experts::Product>& products) const {
        const int64_t rows = q.size(0), k = q.size(1), groups = held.front().w.groups;
        const int64_t width = blocks_in(k) * block_columns;
        const gemm::Tokens tokens{rows, k, static_cast<const int8_t*>(q.const_data_ptr()), nullptr, nullptr, 1};
        std::unique_ptr<int8_t[]> room;
        const int8_t* padded = gemm::rows_of(tokens, width, room);
        const std::unique_ptr<int32_t[]> sums(new int32_t[rows * groups]);
        std::vector<Quantized> problems;
        for (const experts::Product& p : products)
            problems.push_back({held[p.weight].w, padded + p.from * width, width,
                                static_cast<const float*>(scale.const_data_ptr()) + p.from,
                                sums.get() + p.from * groups, held[p.weight].bias_data(), p.to(),
                                number_of(p.out.scalar_type()), p.rows});
        const Sums s{padded, width, k / std::max(groups, int64_t{1}), groups, sums.get()};
        if (experts::any_few(problems))
            run_codes(rows, k / 4, [&](int64_t first, int64_t last) { kernels().sums(s, first, last); });
        run_quantized(problems);
    }

    void floats(const Tensor& x, const std::vector<experts::Product>& products) const {
        const int64_t rows = x.size(0), k = x.size(1), groups = held.front().w.groups, bytes = arranged_bytes(k);
        const int64_t size = k * experts::width_of(x.scalar_type());
        const std::unique_ptr<uint8_t[]> arranged(new uint8_t[rows * bytes]);
        const std::unique_ptr<float[]> sums(new float[rows * groups]);
        std::vector<Floats> problems;
        for (const experts::Product& p : products)
            problems.push_back({held[p.weight].w, static_cast<const uint8_t*>(x.const_data_ptr()) + p.from * size,
                                number_of(x.scalar_type()), arranged.get() + p.from * bytes, bytes,
                                sums.get() + p.from * groups, held[p.weight].bias_data(), p.to(),
                                number_of(p.out.scalar_type()), p.rows});
        Floats all = problems.front();
        all.x = x.const_data_ptr(), all.arranged = arranged.get(), all.sums = sums.get(), all.t = rows;
        if (experts::any_few(problems))
            run_codes(rows, k, [&](int64_t first, int64_t last) { vector_kernels().arrange(all, first, last); });
        run_floats(problems);
    }
};

Tensor compute(const Tensor& x, const experts::Int64s& tokens, const experts::Int64s& counts,
               const experts::Shares& shares, const Tensors& tiles, const Tensors& scale, const Tensors& zero,
               int64_t width, int64_t bits, int64_t group_size, int64_t input_bits, double clip, const Tensors& factors,
               int64_t order, int64_t down_bits, double down_clip, const Tensors& biases,
               const experts::Shares& clamped) {
    const experts::ExpertRows rows{tokens, counts, shares};
    const experts::Inside inside{biases, clamped};
    experts::check(x, rows, tiles.size(), inside);
    STD_TORCH_CHECK(scale.size() == tiles.size() && (zero.empty() || zero.size() == tiles.size()),
                    "integer tiles: lists of different lengths");
    const size_t count = counts.size();
    const auto weights = [&](size_t first, size_t last, int64_t n, int64_t k) {
        const auto part = [&](const Tensors& all) { return experts::some(all, first, last); };
        return ExpertWeights{hold_all(part(tiles), part(scale), part(zero), part(biases),
                                      experts::Int64s(last - first, n), k, bits, group_size)};
    };
    const Tensors none;
    return experts::compute(x, rows, width, weights(0, 2 * count, width, x.size(1)),
                            weights(2 * count, 3 * count, x.size(1), width), {input_bits, clip, none, 0}, inside,
                            {down_bits, down_clip, factors, order});
}

Tensor hold_experts(const Tensors& tiles, const Tensors& scale, const Tensors& zero, int64_t width, int64_t bits,
                    int64_t group_size, int64_t input_bits, double clip, const Tensors& factors, int64_t order,
                    int64_t down_bits, double down_clip, const Tensors& biases, const experts::Shares& clamped) {
    return experts::hold(tiles.size(), [=](const Tensor& x, const experts::Choice& c) {
        return compute(x, c.tokens, c.counts, c.shares, c.of(tiles), c.of(scale), c.of(zero), width, bits, group_size,
                       input_bits, clip, factors, order, down_bits, down_clip, c.of(biases), clamped);
    });
}

}  // namespace
}  // namespace ptq::integer_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("integer_experts", TORCH_BOX(&ptq::integer_tiled::compute));
    m.impl("integer_all_experts", TORCH_BOX(&ptq::integer_tiled::hold_experts));
}
