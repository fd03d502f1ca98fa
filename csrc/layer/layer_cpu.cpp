// ptq::decode_layer for the CPU. See ptq/ops/layer_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "layer/decoder.h"

namespace ptq::layer {
namespace {

std::mutex mutex;  // of the layers

// By the address of their handles. Never destroyed: handles may live longer than what is static here.
std::unordered_map<const void*, std::shared_ptr<Decoder>>& layers() {
    static auto& all = *new std::unordered_map<const void*, std::shared_ptr<Decoder>>;
    return all;
}

std::shared_ptr<Decoder> layer_of(const Tensor& handle) {
    const std::lock_guard lock(mutex);
    const auto found = layers().find(handle.const_data_ptr());
    STD_TORCH_CHECK(found != layers().end(), "decode_layer: expected what an op on layers gave, not a copy of it");
    return found->second;
}

void forget(void* byte) {
    std::shared_ptr<Decoder> layer;  // goes after the lock
    const std::lock_guard lock(mutex);
    if (const auto found = layers().find(byte); found != layers().end()) {
        layer = std::move(found->second);
        layers().erase(found);
    }
    delete static_cast<char*>(byte);
}

Tensor decode(const Tensor& layer, const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensors& tensors,
              int64_t before, const Ints& bits, double clip, const Tensors& factors, int64_t order, double scaling,
              double multiplier, const std::optional<Tensor>& mask) {
    const Cache cache{tensors, before, bits, clip, factors, order, mask};
    cache.check();
    return layer_of(layer)->decode(x, cos, sin, cache, scaling, multiplier);
}

}  // namespace

Tensor handle(std::unique_ptr<Decoder> layer) {
    auto byte = std::make_unique<char>();
    {
        const std::lock_guard lock(mutex);
        layers().emplace(byte.get(), std::move(layer));
    }
    const Ints one{1};
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    return torch::stable::from_blob(byte.release(), one, one, cpu, ScalarType::Byte, &forget);
}

}  // namespace ptq::layer

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("decode_layer", TORCH_BOX(&ptq::layer::decode));
}
