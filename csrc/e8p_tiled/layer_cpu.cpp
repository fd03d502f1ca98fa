// ptq::e8p_layer for the CPU: all that a decoder layer does to a decoded token, as one op. Schema, fake kernel and
// reference are in quip_sharp/layer_ops.py.
#include <torch/csrc/stable/library.h>

#include "e8p_tiled/weights.h"
#include "layer/layer.h"

namespace ptq::e8p_tiled {
namespace {

using layer::Ints;

struct LayerWeights {
    const Tensors &tiles, &scale;
    const Ints& n;
    int64_t bits;

    Tensors operator()(const Seen& in, size_t first, size_t last, const Tensors& biases, ScalarType dtype) const {
        STD_TORCH_CHECK(tiles.size() == n.size() && scale.size() == n.size(), "e8p_layer: lists of different lengths");
        return layer::multiplied<Weights>(in, first, last, biases, n, dtype,
                                          [&](size_t i, int64_t k, const std::optional<Tensor>& bias) {
                                              return hold(tiles[i], scale[i], bias, n[i], k, bits);
                                          });
    }
};

}  // namespace
}  // namespace ptq::e8p_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    using namespace ptq;
    using layer::Ints;
    m.impl("e8p_layer",
           TORCH_BOX((&layer::op<e8p_tiled::LayerWeights, const Tensors&, const Tensors&, const Ints&, int64_t>)));
}
