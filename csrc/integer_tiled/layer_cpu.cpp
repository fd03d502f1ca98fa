// ptq::integer_layer for the CPU: all that a decoder layer does to a decoded token, as one op. Schema, fake kernel and
// reference are in quarot/layer_ops.py.
#include <torch/csrc/stable/library.h>

#include "integer_tiled/tiled_cpu.h"
#include "layer/layer.h"

namespace ptq::integer_tiled {
namespace {

using layer::Ints;

// `zero` is empty, or one for each.
struct Weights {
    const Tensors &tiles, &scale, &zero;
    const Ints& n;
    int64_t bits, group_size;

    Tensors operator()(const Seen& in, size_t first, size_t last, const Tensors& biases, ScalarType dtype) const {
        const auto some = [&](const auto& all) {
            using List = std::remove_cvref_t<decltype(all)>;
            STD_TORCH_CHECK(all.empty() || all.size() == n.size(), "integer_layer: lists of different lengths");
            return all.empty() ? List() : List(all.begin() + first, all.begin() + last);
        };
        const Tensors t = some(tiles), s = some(scale), z = some(zero);
        if (in.scale) return linears_quantized(in.x, *in.scale, t, s, z, biases, some(n), bits, group_size, dtype);
        return linears_tiled(in.x, t, s, z, biases, some(n), bits, group_size);
    }
};

}  // namespace
}  // namespace ptq::integer_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    using namespace ptq;
    using layer::Ints;
    m.impl("integer_layer", TORCH_BOX((&layer::op<integer_tiled::Weights, const Tensors&, const Tensors&,
                                                  const Tensors&, const Ints&, int64_t, int64_t>)));
}
