// ptq::e8p_layer for the CPU: a decoder layer, held for ptq::decode_layers. Schema and reference are in
// quip_sharp/layer_ops.py.
#include <torch/csrc/stable/library.h>

#include "e8p_tiled/weights.h"
#include "layer/layer.h"

namespace ptq::e8p_tiled {
namespace {

struct Layers {
    Tensors tiles, scale;
    layer::Int64s n;
    int64_t bits;

    using Prepared = layer::Together<ExpertWeights>;
    std::vector<const Tensors*> tensors() const { return {&tiles, &scale}; }
    Prepared prepare(size_t first, size_t last, int64_t k, const Tensors& biases) const {
        return Prepared::of(first, last, n, biases, [&](size_t i, const std::optional<Tensor>& bias) {
            return hold(tiles[i], scale[i], bias, n[i], k, bits);
        });
    }
};

}  // namespace
}  // namespace ptq::e8p_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    using namespace ptq;
    m.impl("e8p_layer",
           TORCH_BOX((&layer::op<e8p_tiled::Layers, const Tensors&, const Tensors&, const layer::Int64s&, int64_t>)));
}
