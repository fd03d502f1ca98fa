// ptq::integer_* for the CPU. Schemas, fake kernels, references and gradients are in quarot/integer_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "common/cpu_level.h"
#include "common/ldlq.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "integer/kernels.h"

namespace ptq::integer {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::contiguous;
using torch::stable::empty;
using torch::stable::Tensor;

const Kernels& kernels() {
    return at_level<portable, avx2, avx2, avx512, avx512vnni>();
}

void check_bits(int64_t bits) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 8, "integer: bits must be 2 to 8, found ", bits);
}

int64_t group_columns(int64_t k, int64_t group_size) {
    const int64_t size = group_size ? group_size : std::max(k, int64_t{1});
    STD_TORCH_CHECK(size > 0 && k % size == 0, "integer: ", k, " columns do not divide into groups of ", size);
    return size;
}

std::tuple<Tensor, Tensor> fit(const Tensor& w, int64_t bits, int64_t group_size, bool symmetric, int64_t steps,
                               double floor) {
    check_bits(bits);
    STD_TORCH_CHECK(steps >= 0, "integer_fit: steps must not be negative, found ", steps);
    const int64_t n = w.size(0), k = w.size(1), size = group_columns(k, group_size);
    check_tensor("integer", "w", w, ScalarType::Float, {n, k});
    const Tensor in = contiguous(w);
    std::vector<float> shrink(steps);
    for (int64_t i = 0; i < steps; i++)
        shrink[i] = static_cast<float>(1 - i * (1 - floor) / std::max(steps - 1, int64_t{1}));
    const Tensor scale = empty({n, k / size}, ScalarType::Float), zero = empty({n, k / size}, ScalarType::Byte);
    const Fit p{static_cast<const float*>(in.const_data_ptr()),
                static_cast<float*>(scale.mutable_data_ptr()),
                static_cast<uint8_t*>(zero.mutable_data_ptr()),
                k,
                size,
                static_cast<int>(bits),
                symmetric,
                shrink.data(),
                steps};
    run(kernels().fit, p, n, k * steps);
    return {scale, zero};
}

Tensor round(const Tensor& w, const Tensor& scale, const Tensor& zero, int64_t bits, int64_t group_size) {
    check_bits(bits);
    const int64_t n = w.size(0), k = w.size(1), size = group_columns(k, group_size);
    check_tensor("integer", "w", w, ScalarType::Float, {n, k});
    check_tensor("integer", "scale", scale, ScalarType::Float, {n, k / size});
    check_tensor("integer", "zero", zero, ScalarType::Byte, {n, k / size});
    const Tensor in = contiguous(w), s = contiguous(scale), z = contiguous(zero);
    const Tensor codes = empty({n, k}, ScalarType::Byte);
    const Round p{static_cast<const float*>(in.const_data_ptr()),
                  static_cast<const float*>(s.const_data_ptr()),
                  static_cast<const uint8_t*>(z.const_data_ptr()),
                  static_cast<uint8_t*>(codes.mutable_data_ptr()),
                  k,
                  size,
                  static_cast<int>(bits)};
    run(kernels().round, p, n, k);
    return codes;
}

std::tuple<Tensor, Tensor> ldlq(const Tensor& target, const Tensor& w, const Tensor& factor, const Tensor& scale,
                                const Tensor& zero, const Tensor& group, int64_t bits) {
    check_bits(bits);
    const int64_t c = w.size(0), n = w.size(1), g = scale.size(0);
    check_tensor("integer", "target", target, ScalarType::Float, {c, n});
    check_tensor("integer", "w", w, ScalarType::Float, {c, n});
    check_tensor("integer", "factor", factor, ScalarType::Float, {c, c});
    check_tensor("integer", "scale", scale, ScalarType::Float, {g, n});
    check_tensor("integer", "zero", zero, ScalarType::Float, {g, n});
    check_tensor("integer", "group", group, ScalarType::Long, {c});
    const Tensor from = contiguous(target), in = contiguous(w), s = contiguous(scale), z = contiguous(zero);
    const Tensor of = contiguous(group), taken = contiguous(torch::stable::transpose(factor, 0, 1));
    const int64_t* groups = static_cast<const int64_t*>(of.const_data_ptr());
    for (int64_t i = 0; i < c; i++) STD_TORCH_CHECK(groups[i] >= 0 && groups[i] < g, "integer: no group ", groups[i]);
    const Tensor codes = empty({c, n}, ScalarType::Byte), error = empty({c, n}, ScalarType::Float);
    const Ldlq p{static_cast<const float*>(from.const_data_ptr()),
                 static_cast<const float*>(in.const_data_ptr()),
                 static_cast<const float*>(taken.const_data_ptr()),
                 static_cast<const float*>(s.const_data_ptr()),
                 static_cast<const float*>(z.const_data_ptr()),
                 groups,
                 static_cast<uint8_t*>(codes.mutable_data_ptr()),
                 static_cast<float*>(error.mutable_data_ptr()),
                 c,
                 n,
                 static_cast<int>(bits)};
    run(kernels().ldlq, p, (n + ldlq_strip - 1) / ldlq_strip, ldlq_strip * c * c / 2);
    return {codes, error};
}

Tensor pack(const Tensor& codes, int64_t bits) {
    check_bits(bits);
    const int64_t n = codes.size(0), k = codes.size(1);
    check_tensor("integer", "codes", codes, ScalarType::Byte, {n, k});
    const Tensor in = contiguous(codes), packed = empty({n, (k * bits + 7) / 8}, ScalarType::Byte);
    const Pack p{static_cast<const uint8_t*>(in.const_data_ptr()), static_cast<uint8_t*>(packed.mutable_data_ptr()), k,
                 static_cast<int>(bits)};
    run(kernels().pack, p, k ? n : 0, k);
    return packed;
}

Tensor linear(const Tensor& x, const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero,
              const std::optional<Tensor>& bias, int64_t bits, int64_t group_size) {
    check_bits(bits);
    STD_TORCH_CHECK(x.dim() > 0, "integer_linear: x has no axis");
    const int64_t k = x.size(-1), n = codes.size(0), size = group_columns(k, group_size);
    check_tensor("integer", "codes", codes, ScalarType::Byte, {n, (k * bits + 7) / 8});
    check_tensor("integer", "scale", scale, ScalarType::Short, {n, k / size});
    const Tensor in = as_float(x), c = contiguous(codes), s = contiguous(scale);
    std::optional<Tensor> z, b;
    if (zero) {
        check_tensor("integer", "zero", *zero, ScalarType::Byte, {n, k / size});
        z = contiguous(*zero);
    }
    if (bias) {
        STD_TORCH_CHECK(bias->numel() == n, "integer_linear: bias must have ", n, " elements");
        b = as_float(*bias);
    }
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = n;
    const Tensor out = empty({sizes.data(), sizes.size()}, ScalarType::Float);
    const int64_t t = n ? out.numel() / n : 0;
    const Tensor arranged = empty({t, arranged_stride(k)}, ScalarType::Float);
    const Linear p{static_cast<const float*>(in.const_data_ptr()),
                   static_cast<float*>(arranged.mutable_data_ptr()),
                   static_cast<const uint8_t*>(c.const_data_ptr()),
                   static_cast<const uint16_t*>(s.const_data_ptr()),
                   z ? static_cast<const uint8_t*>(z->const_data_ptr()) : nullptr,
                   b ? static_cast<const float*>(b->const_data_ptr()) : nullptr,
                   static_cast<float*>(out.mutable_data_ptr()),
                   t,
                   k,
                   n,
                   size,
                   k / size,
                   static_cast<int>(bits)};
    run(kernels().arrange, p, t, k);
    run(kernels().linear, p, t ? (n + panel_rows - 1) / panel_rows : 0, panel_rows * k * (t + 4));
    return from_float(out, x.scalar_type());
}

}  // namespace
}  // namespace ptq::integer

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("integer_fit", TORCH_BOX(&ptq::integer::fit));
    m.impl("integer_round", TORCH_BOX(&ptq::integer::round));
    m.impl("integer_ldlq", TORCH_BOX(&ptq::integer::ldlq));
    m.impl("integer_pack", TORCH_BOX(&ptq::integer::pack));
    m.impl("integer_linear", TORCH_BOX(&ptq::integer::linear));
}
