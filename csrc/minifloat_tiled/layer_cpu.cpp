// ptq::minifloat_layer for the CPU: all that a decoder layer does to a decoded token, as one op. Schema, fake kernel
// and reference are in fp6/layer_ops.py.
#include <torch/csrc/stable/library.h>

#include "layer/layer.h"
#include "minifloat_tiled/weights.h"

namespace ptq::minifloat_tiled {
namespace {

using layer::Ints;

struct LayerWeights {
    const Tensors &tiles, &scale;
    const Ints& n;
    int64_t exponent, mantissa, group_size;

    Tensors operator()(const Seen& in, size_t first, size_t last, const Tensors& biases, ScalarType dtype) const {
        STD_TORCH_CHECK(tiles.size() == n.size() && scale.size() == n.size(),
                        "minifloat_layer: lists of different lengths");
        const Element element = element_of(exponent, mantissa);
        return layer::multiplied<Weights>(in, first, last, biases, n, dtype,
                                          [&](size_t i, int64_t k, const std::optional<Tensor>& bias) {
                                              return hold(tiles[i], scale[i], bias, n[i], k, element, group_size);
                                          });
    }
};

}  // namespace
}  // namespace ptq::minifloat_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    using namespace ptq;
    using layer::Ints;
    m.impl("minifloat_layer", TORCH_BOX((&layer::op<minifloat_tiled::LayerWeights, const Tensors&, const Tensors&,
                                                    const Ints&, int64_t, int64_t, int64_t>)));
}
