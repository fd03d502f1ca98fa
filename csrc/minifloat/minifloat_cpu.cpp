// ptq::minifloat_fit, _nearest, _encode, _decode, _ldlq for the CPU. Schemas, fake kernels and references are in
// fp6/minifloat_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "common/cpu_level.h"
#include "common/ldlq.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "minifloat/kernels.h"

namespace ptq::minifloat {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::contiguous;
using torch::stable::empty;
using torch::stable::Tensor;

const Kernels& kernels() {
    return at_level<portable, avx2, avx2, avx512>();
}

Element element_of(int64_t exponent, int64_t mantissa) {
    STD_TORCH_CHECK(exponent >= 2 && exponent <= 5 && mantissa >= 1 && mantissa <= 7 - exponent,
                    "minifloat: no element of ", exponent, " exponent and ", mantissa, " mantissa bits");
    return {static_cast<int>(exponent), static_cast<int>(mantissa)};
}

int64_t group_columns(int64_t k, int64_t group_size) {
    const int64_t size = group_size ? group_size : std::max(k, int64_t{1});
    STD_TORCH_CHECK(size > 0 && k % size == 0, "minifloat: ", k, " columns do not divide into groups of ", size);
    return size;
}

template <class T>
const T* in(const Tensor& x) {
    return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
T* out(const Tensor& x) {
    return static_cast<T*>(x.mutable_data_ptr());
}

Tensor fit(const Tensor& w, int64_t exponent, int64_t mantissa, int64_t group_size, bool power, bool search) {
    const Element element = element_of(exponent, mantissa);
    const int64_t n = w.size(0), k = w.size(1), size = group_columns(k, group_size);
    check_tensor("minifloat", "w", w, ScalarType::Float, {n, k});
    const Tensor x = contiguous(w), scale = empty({n, k / size}, ScalarType::Float);
    run(kernels().fit, Fit{in<float>(x), out<float>(scale), k, size, element, power, search}, n, k);
    return scale;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> nearest(const Tensor& w, int64_t exponent, int64_t mantissa,
                                                   int64_t group_size, bool power, bool search) {
    const Element element = element_of(exponent, mantissa);
    STD_TORCH_CHECK(w.dim() == 2, "minifloat: w must be [n, k]");
    const int64_t n = w.size(0), k = w.size(1), size = group_columns(k, group_size);
    const bool bfloat16 = w.scalar_type() == ScalarType::BFloat16;
    const bool taken = bfloat16 || w.scalar_type() == ScalarType::Float;
    const Tensor x = contiguous(taken ? w : torch::stable::to(w, ScalarType::Float));
    const Tensor codes = empty({n, k}, ScalarType::Byte), scale = empty({n, k / size}, ScalarType::Float);
    const Tensor error = empty({n}, ScalarType::Double), energy = empty({n}, ScalarType::Double);
    const Nearest p{x.const_data_ptr(),
                    out<uint8_t>(codes),
                    out<float>(scale),
                    out<double>(error),
                    out<double>(energy),
                    k,
                    size,
                    element,
                    power,
                    search,
                    bfloat16};
    run(kernels().nearest, p, n, k);
    return {codes, scale, error, energy};
}

Tensor encode(const Tensor& w, const Tensor& scale, int64_t exponent, int64_t mantissa, int64_t group_size) {
    const Element element = element_of(exponent, mantissa);
    const int64_t n = w.size(0), k = w.size(1), size = group_columns(k, group_size);
    check_tensor("minifloat", "w", w, ScalarType::Float, {n, k});
    check_tensor("minifloat", "scale", scale, ScalarType::Float, {n, k / size});
    const Tensor x = contiguous(w), s = contiguous(scale), codes = empty({n, k}, ScalarType::Byte);
    run(kernels().encode, Encode{in<float>(x), in<float>(s), out<uint8_t>(codes), k, size, element}, n, k);
    return codes;
}

Tensor decode(const Tensor& codes, const Tensor& scale, int64_t exponent, int64_t mantissa, int64_t group_size) {
    const Element element = element_of(exponent, mantissa);
    const int64_t n = codes.size(0), k = codes.size(1), size = group_columns(k, group_size);
    check_tensor("minifloat", "codes", codes, ScalarType::Byte, {n, k});
    check_tensor("minifloat", "scale", scale, ScalarType::Float, {n, k / size});
    const Tensor c = contiguous(codes), s = contiguous(scale), w = empty({n, k}, ScalarType::Float);
    run(kernels().decode, Decode{in<uint8_t>(c), in<float>(s), out<float>(w), k, size, element}, n, k);
    return w;
}

std::tuple<Tensor, Tensor> ldlq(const Tensor& target, const Tensor& w, const Tensor& factor, const Tensor& scale,
                                const Tensor& group, int64_t exponent, int64_t mantissa) {
    const Element element = element_of(exponent, mantissa);
    const int64_t c = w.size(0), n = w.size(1), g = scale.size(0);
    check_tensor("minifloat", "target", target, ScalarType::Float, {c, n});
    check_tensor("minifloat", "w", w, ScalarType::Float, {c, n});
    check_tensor("minifloat", "factor", factor, ScalarType::Float, {c, c});
    check_tensor("minifloat", "scale", scale, ScalarType::Float, {g, n});
    check_tensor("minifloat", "group", group, ScalarType::Long, {c});
    const Tensor from = contiguous(target), x = contiguous(w), s = contiguous(scale), of = contiguous(group);
    const Tensor taken = contiguous(torch::stable::transpose(factor, 0, 1));
    const int64_t* groups = in<int64_t>(of);
    for (int64_t i = 0; i < c; i++) STD_TORCH_CHECK(groups[i] >= 0 && groups[i] < g, "minifloat: no group ", groups[i]);
    const Tensor codes = empty({c, n}, ScalarType::Byte), error = empty({c, n}, ScalarType::Float);
    const Ldlq p{in<float>(from),
                 in<float>(x),
                 in<float>(taken),
                 in<float>(s),
                 groups,
                 out<uint8_t>(codes),
                 out<float>(error),
                 c,
                 n,
                 element};
    run(kernels().ldlq, p, (n + ldlq_strip - 1) / ldlq_strip, ldlq_strip * c * c / 2);
    return {codes, error};
}

}  // namespace
}  // namespace ptq::minifloat

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("minifloat_fit", TORCH_BOX(&ptq::minifloat::fit));
    m.impl("minifloat_nearest", TORCH_BOX(&ptq::minifloat::nearest));
    m.impl("minifloat_encode", TORCH_BOX(&ptq::minifloat::encode));
    m.impl("minifloat_decode", TORCH_BOX(&ptq::minifloat::decode));
    m.impl("minifloat_ldlq", TORCH_BOX(&ptq::minifloat::ldlq));
}
