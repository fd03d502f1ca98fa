// Tensors without the dispatcher, whose calls cost more than the work on a single token.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <vector>

#include "common/bfloat16.h"

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

// x is of this type and of these sizes; the op and the name are for the message.
inline void check_tensor(const char* op, const char* name, const torch::stable::Tensor& x,
                         torch::headeronly::ScalarType type, const std::vector<int64_t>& sizes) {
    const auto found = x.sizes();
    STD_TORCH_CHECK(x.scalar_type() == type && std::equal(found.begin(), found.end(), sizes.begin(), sizes.end()), op,
                    ": ", name, " has a wrong dtype or shape");
}

// A mask is bool [batch or 1, 1, tokens, length]; the op is for the message.
inline void check_mask(const char* op, const std::optional<torch::stable::Tensor>& mask, int64_t batch, int64_t tokens,
                       int64_t length) {
    STD_TORCH_CHECK(!mask || (mask->is_cpu() && mask->scalar_type() == torch::headeronly::ScalarType::Bool &&
                              mask->dim() == 4 && (mask->size(0) == 1 || mask->size(0) == batch) &&
                              mask->size(1) == 1 && mask->size(2) == tokens && mask->size(3) == length),
                    op, ": the mask has a wrong dtype or shape");
}

// x itself where it is contiguous.
inline torch::stable::Tensor compact(const torch::stable::Tensor& x) {
    return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

// Other sizes and strides for the memory of x, from an element on.
inline torch::stable::Tensor seen_as(const torch::stable::Tensor& x, const std::vector<int64_t>& sizes,
                                     const std::vector<int64_t>& strides, int64_t from) {
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                                          strides.data(), from, &made));
    return torch::stable::Tensor(made);
}

// The memory of a contiguous x in another shape of as many elements.
template <class Sizes>
torch::stable::Tensor reshaped(const torch::stable::Tensor& x, const Sizes& sizes) {
    const std::vector<int64_t> size(sizes.begin(), sizes.end());
    STD_TORCH_CHECK(std::accumulate(size.begin(), size.end(), int64_t{1}, std::multiplies<>()) == x.numel(),
                    "a tensor of ", x.numel(), " elements does not have the shape that is asked for");
    std::vector<int64_t> stride(size.size());
    for (int64_t i = static_cast<int64_t>(size.size()) - 1, step = 1; i >= 0; step *= size[i--]) stride[i] = step;
    return seen_as(x, size, stride, 0);
}

// Rows [from, from + count) of an x [t, k] that `fresh` has made, in its memory.
inline torch::stable::Tensor rows_of(const torch::stable::Tensor& x, int64_t from, int64_t count) {
    return seen_as(x, {count, x.size(1)}, {x.size(1), 1}, from * x.size(1));
}

constexpr int64_t few_numbers = 1 << 14;  // are converted here

// x, contiguous, in float32.
inline torch::stable::Tensor as_float(const torch::stable::Tensor& x) {
    using torch::headeronly::ScalarType;
    if (x.scalar_type() == ScalarType::Float) return compact(x);
    if (x.scalar_type() != ScalarType::BFloat16 || x.numel() > few_numbers)
        return compact(torch::stable::to(x, ScalarType::Float));
    const torch::stable::Tensor in = compact(x), out = fresh(in.sizes(), ScalarType::Float);
    const auto* from = static_cast<const uint16_t*>(in.const_data_ptr());
    auto* to = static_cast<float*>(out.mutable_data_ptr());
    const int64_t count = in.numel();  // asked for once: that is a call
    for (int64_t i = 0; i < count; i++) to[i] = from_bfloat16(from[i]);
    return out;
}

// x, contiguous and float32, in another dtype.
inline torch::stable::Tensor from_float(const torch::stable::Tensor& x, torch::headeronly::ScalarType type) {
    using torch::headeronly::ScalarType;
    if (type == ScalarType::Float) return x;
    if (type != ScalarType::BFloat16 || x.numel() > few_numbers) return torch::stable::to(x, type);
    const torch::stable::Tensor out = fresh(x.sizes(), type);
    const auto* from = static_cast<const float*>(x.const_data_ptr());
    auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
    const int64_t count = x.numel();
    for (int64_t i = 0; i < count; i++) to[i] = to_bfloat16(from[i]);
    return out;
}

// The sinks of attention, [heads] of float32 or bfloat16, times a factor; none: of no elements. The op is for the
// message.
inline std::vector<float> sinks_of(const char* op, const std::optional<torch::stable::Tensor>& sinks, int64_t heads,
                                   float factor) {
    using torch::headeronly::ScalarType;
    if (!sinks) return {};
    STD_TORCH_CHECK(sinks->is_cpu() && sinks->dim() == 1 && sinks->size(0) == heads &&
                        (sinks->scalar_type() == ScalarType::Float || sinks->scalar_type() == ScalarType::BFloat16),
                    op, ": sinks must be [", heads, "] in float32 or bfloat16");
    const torch::stable::Tensor numbers = as_float(*sinks);
    const auto* from = static_cast<const float*>(numbers.const_data_ptr());
    std::vector<float> made(from, from + heads);
    for (float& x : made) x *= factor;
    return made;
}

}  // namespace ptq
