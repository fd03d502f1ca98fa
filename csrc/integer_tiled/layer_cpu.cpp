// ptq::integer_layer for the CPU: a decoder layer, held for ptq::decode_layers. Schema and reference are in
// quarot/layer_ops.py.
#include <torch/csrc/stable/library.h>

#include "integer_tiled/tiled_cpu.h"
#include "layer/layer.h"

namespace ptq::integer_tiled {
namespace {

// `zero` is empty, or one for each.
struct Layers {
    Tensors tiles, scale, zero;
    layer::Int64s n;
    int64_t bits, group_size;

    struct Prepared {
        std::vector<HeldWeight> held;
        Tensors operator()(const Seen& in, ScalarType dtype) const {
            return in.scale ? multiply_quantized(in.x, *in.scale, held, dtype) : multiply_floats(in.x, held);
        }
    };
    std::vector<const Tensors*> tensors() const {
        if (zero.empty()) return {&tiles, &scale};
        return {&tiles, &scale, &zero};
    }
    Prepared prepare(size_t first, size_t last, int64_t k, const Tensors& biases) const {
        using experts::some;
        return {hold_all(some(tiles, first, last), some(scale, first, last), some(zero, first, last), biases,
                         layer::Int64s(n.begin() + first, n.begin() + last), k, bits, group_size)};
    }
};

}  // namespace
}  // namespace ptq::integer_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    using namespace ptq;
    m.impl("integer_layer", TORCH_BOX((&layer::op<integer_tiled::Layers, const Tensors&, const Tensors&, const Tensors&,
                                                  const layer::Int64s&, int64_t, int64_t>)));
}
