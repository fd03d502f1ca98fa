// Tensors without the dispatcher, whose calls cost more than the work on a single token.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

namespace ptq {

// A contiguous tensor on the CPU, with whatever lies in its memory.
template <class Sizes>
torch::stable::Tensor fresh(const Sizes& sizes, torch::headeronly::ScalarType type) {
    const std::vector<int64_t> size(sizes.begin(), sizes.end());
    std::vector<int64_t> stride(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0;) {
        stride[i] = step;
        step *= size[i] > 0 ? size[i] : 1;
    }
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.data(), stride.data(),
                                                    static_cast<int32_t>(type), aoti_torch_device_type_cpu(), 0,
                                                    &made));
    return torch::stable::Tensor(made);
}

// x itself where it is contiguous.
inline torch::stable::Tensor compact(const torch::stable::Tensor& x) {
    return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

}  // namespace ptq
