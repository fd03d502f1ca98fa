// ptq::decode_layer for the CPU. See ptq/ops/layer_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <utility>

#include "layer/held.h"

namespace ptq::layer {
namespace {

const char mark = 0;

// What lies behind a tensor that stands for a layer.
struct Handle {
    const void* kind = &mark;
    const Handle* self = this;  // a copy of the bytes is no handle
    std::unique_ptr<Held> layer;
};

Held& layer_of(const Tensor& handle) {
    const auto* found = static_cast<const Handle*>(handle.const_data_ptr());
    STD_TORCH_CHECK(handle.scalar_type() == ScalarType::Byte && handle.numel() == sizeof(Handle) &&
                        found->kind == &mark && found->self == found,
                    "decode_layer: expected what an op on layers gave, not a copy of it");
    return *found->layer;
}

Tensor decode(const Tensor& layer, const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensors& parts,
              int64_t before, const Ints& bits, double clip, const Tensors& factors, int64_t order, double scaling,
              double multiplier) {
    const Cache cache{parts, before, bits, clip, factors, order};
    cache.check();
    return layer_of(layer).decode(x, cos, sin, cache, scaling, multiplier);
}

}  // namespace

Tensor handle(std::unique_ptr<Held> layer) {
    auto* made = new Handle{.layer = std::move(layer)};
    const Ints size{sizeof(Handle)}, stride{1};
    return torch::stable::from_blob(
        made, size, stride, torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Byte,
        +[](void* bytes) { delete static_cast<Handle*>(bytes); });
}

}  // namespace ptq::layer

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("decode_layer", TORCH_BOX(&ptq::layer::decode));
}
