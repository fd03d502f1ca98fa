// ptq::minifloat_experts for the CPU: what the chosen experts of a block make of few tokens, as one op. Schema, fake
// kernel and reference are in fp6/expert_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "experts/moe.h"
#include "minifloat_tiled/weights.h"

namespace ptq::minifloat_tiled {
namespace {

Tensor compute(const Tensor& x, const experts::Int64s& tokens, const experts::Int64s& counts,
               const experts::Shares& shares, const Tensors& tiles, const Tensors& scale, int64_t width,
               int64_t exponent, int64_t mantissa, int64_t group_size, int64_t input_bits, double clip,
               const Tensors& factors, int64_t order, int64_t down_bits, double down_clip, const Tensors& biases,
               const experts::Shares& clamped) {
    const experts::ExpertRows rows{tokens, counts, shares};
    const experts::Inside inside{biases, clamped};
    experts::check(x, rows, tiles.size(), inside);
    STD_TORCH_CHECK(scale.size() == tiles.size(), "minifloat tiles: lists of different lengths");
    const size_t count = counts.size();
    const ElementTable element = element_of(exponent, mantissa);
    const auto weights = [&](size_t first, size_t last, int64_t n, int64_t k) {
        ExpertWeights found;
        for (size_t i = first; i < last; i++)
            found.held.push_back(hold(tiles[i], scale[i], inside.bias(i), n, k, element, group_size));
        return found;
    };
    const Tensors none;
    return experts::compute(x, rows, width, weights(0, 2 * count, width, x.size(1)),
                            weights(2 * count, 3 * count, x.size(1), width), {input_bits, clip, none, 0}, inside,
                            {down_bits, down_clip, factors, order});
}

Tensor hold_experts(const Tensors& tiles, const Tensors& scale, int64_t width, int64_t exponent, int64_t mantissa,
                    int64_t group_size, int64_t input_bits, double clip, const Tensors& factors, int64_t order,
                    int64_t down_bits, double down_clip, const Tensors& biases, const experts::Shares& clamped) {
    return experts::hold(tiles.size(), [=](const Tensor& x, const experts::Choice& c) {
        return compute(x, c.tokens, c.counts, c.shares, c.of(tiles), c.of(scale), width, exponent, mantissa, group_size,
                       input_bits, clip, factors, order, down_bits, down_clip, c.of(biases), clamped);
    });
}

}  // namespace
}  // namespace ptq::minifloat_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("minifloat_experts", TORCH_BOX(&ptq::minifloat_tiled::compute));
    m.impl("minifloat_all_experts", TORCH_BOX(&ptq::minifloat_tiled::hold_experts));
}
