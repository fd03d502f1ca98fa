// ptq::minifloat_layer for the CPU: a decoder layer, held for ptq::decode_layers. Schema and reference are in
// fp6/layer_ops.py.
#include <torch/csrc/stable/library.h>

#include "layer/layer.h"
#include "minifloat_tiled/weights.h"

namespace ptq::minifloat_tiled {
namespace {

struct Layers {
    Tensors tiles, scale;
    layer::Int64s n;
    int64_t exponent, mantissa, group_size;

    using Prepared = layer::Together<ExpertWeights>;
    std::vector<const Tensors*> tensors() const { return {&tiles, &scale}; }
    Prepared prepare(size_t first, size_t last, int64_t k, const Tensors& biases) const {
        const ElementTable element = element_of(exponent, mantissa);
        return Prepared::of(first, last, n, biases, [&](size_t i, const std::optional<Tensor>& bias) {
            return hold(tiles[i], scale[i], bias, n[i], k, element, group_size);
        });
    }
};

}  // namespace
}  // namespace ptq::minifloat_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    using namespace ptq;
    m.impl("minifloat_layer", TORCH_BOX((&layer::op<minifloat_tiled::Layers, const Tensors&, const Tensors&,
                                                    const layer::Int64s&, int64_t, int64_t, int64_t>)));
}
