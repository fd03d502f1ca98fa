// ptq::rms_norm and ptq::rotary for the CPU. Schemas, fake kernels and references are in ptq/steps.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "common/cpu_level.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "steps/kernels.h"

namespace ptq::steps {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const Kernels& kernels() {
#if defined(__x86_64__)
    if (cpu_level() >= CpuLevel::avx512) return avx512;
    if (cpu_level() >= CpuLevel::avx2) return avx2;
#endif
    return portable;
}

Number number_of(const Tensor& x, const char* op) {
    const ScalarType type = x.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, op, ": x must be float32 or bfloat16");
    return type == ScalarType::Float ? Number::float32 : Number::bfloat16;
}

Tensor rms_norm(const Tensor& x, const Tensor& gain, double eps, double offset, bool round_first) {
    const Number type = number_of(x, "rms_norm");
    STD_TORCH_CHECK(
        x.dim() > 0 && gain.dim() == 1 && gain.size(0) == x.size(-1) && gain.scalar_type() == x.scalar_type(),
        "rms_norm: the gain must be [k] for x [*, k], in the same dtype");
    const Tensor in = compact(x), g = compact(gain), out = fresh(x.sizes(), x.scalar_type());
    const int64_t k = x.size(-1);
    const Norm p{type, in.const_data_ptr(),     g.const_data_ptr(),         out.mutable_data_ptr(),
                 k,    static_cast<float>(eps), static_cast<float>(offset), round_first};
    run(kernels().norm, p, k ? x.numel() / k : 0, k);
    return out;
}

// x [b, h, t, d], in rows of d neighbours, with cos and sin [b or 1, t, d].
Tensor rotated(const Tensor& given, const Tensor& cos, const Tensor& sin, Number type) {
    STD_TORCH_CHECK(given.dim() == 4 && given.size(3) % 2 == 0 && cos.size(0) > 0 && cos.size(1) == given.size(2) &&
                        cos.size(2) == given.size(3) && (cos.size(0) == 1 || cos.size(0) == given.size(0)),
                    "rotary: expected x [b, h, t, d] with even d, cos and sin [b or 1, t, d]");
    const Tensor x = given.stride(3) == 1 ? given : compact(given);
    const Tensor out = fresh(x.sizes(), x.scalar_type());
    const int64_t size = type == Number::float32 ? 4 : 2, heads = x.size(1), tokens = x.size(2), d = x.size(3);
    const auto* from = static_cast<const char*>(x.const_data_ptr());
    const auto* c = static_cast<const char*>(cos.const_data_ptr());
    const auto* s = static_cast<const char*>(sin.const_data_ptr());
    auto* to = static_cast<char*>(out.mutable_data_ptr());
    const auto kernel = kernels().rotary;
    for (int64_t b = 0; b < x.size(0); b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t t = 0; t < tokens; t++, to += d * size) {
                const int64_t at = b * x.stride(0) + h * x.stride(1) + t * x.stride(2);
                const int64_t row = ((cos.size(0) == 1 ? 0 : b) * tokens + t) * d;
                kernel({type, d}, from + at * size, c + row * size, s + row * size, to);
            }
    return out;
}

std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
    const Number type = number_of(q, "rotary");
    for (const Tensor* x : {&k, &cos, &sin})
        STD_TORCH_CHECK(x->scalar_type() == q.scalar_type(), "rotary: all tensors must have one dtype");
    STD_TORCH_CHECK(cos.dim() == 3 && sin.dim() == 3, "rotary: cos and sin must be [b or 1, t, d]");
    for (int64_t i = 0; i < 3; i++) STD_TORCH_CHECK(cos.size(i) == sin.size(i), "rotary: cos and sin differ in shape");
    const Tensor c = compact(cos), s = compact(sin);
    return {rotated(q, c, s, type), rotated(k, c, s, type)};
}

}  // namespace
}  // namespace ptq::steps

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("rms_norm", TORCH_BOX(&ptq::steps::rms_norm));
    m.impl("rotary", TORCH_BOX(&ptq::steps::rotary));
}
