// ptq::decode_layers for the CPU. See ptq/ops/layer_ops.py.
#include <torch/csrc/stable/library.h>

#include <memory>

#include "common/handles.h"
#include "layer/decoder.h"

namespace ptq::layer {
namespace {

std::shared_ptr<Decoder> layer_of(const Tensor& handle) {
    const auto found = Handles<Decoder>::find(handle);
    STD_TORCH_CHECK(found, "decode_layers: expected what an op on layers gave, not a copy of it");
    return found;
}

// Every layer has as many tensors of the cache as the others.
Tensor decode(const Tensors& handles, const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensors& cache,
              const Int64s& before, const Int64s& bits, const Floats& clips, const Tensors& factors, int64_t order,
              const Floats& scaling, const Floats& multiplier, const std::optional<Tensor>& mask) {
    const size_t count = handles.size(), each = count ? cache.size() / count : 0;
    STD_TORCH_CHECK(count && cache.size() == each * count && before.size() == count && scaling.size() == count &&
                        multiplier.size() == count,
                    "decode_layers: expected as many of everything as layers");
    std::vector<std::shared_ptr<Decoder>> decoders;
    for (const Tensor& handle : handles) decoders.push_back(layer_of(handle));
    Tensor y = x;
    for (size_t i = 0; i < count; i++) {
        const Tensors held(cache.begin() + i * each, cache.begin() + (i + 1) * each);
        const Cache own{held, before[i], bits, clips, factors, order, mask};
        own.check();
        y = decoders[i]->decode(y, cos, sin, own, scaling[i], multiplier[i]);
    }
    return y;
}

}  // namespace

}  // namespace ptq::layer

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("decode_layers", TORCH_BOX(&ptq::layer::decode));
}
