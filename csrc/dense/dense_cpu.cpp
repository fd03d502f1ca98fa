// ptq::dense_linear for the CPU. Schema, fake kernel and reference are in ptq/ops/matmul.py.
#include "dense/dense_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <memory>
#include <optional>

#include "common/cpu_level.h"
#include "common/linear.h"
#include "common/parallel.h"
#include "dense/kernels.h"

namespace ptq::dense {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const Kernels& kernels() {
    return at_level<portable, avx2, avx2, avx512, avx512, avx512bf16>();
}

constexpr int64_t few_tokens = 16;  // as in ptq/ops/matmul.py: for more, torch's own product is the faster one

Tensor torch_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
    using torch::stable::detail::from;
    const Tensor alike = weight.scalar_type() == x.scalar_type() ? weight : torch::stable::to(weight, x.scalar_type());
    std::array<StableIValue, 3> stack{from(x), from(alike), from(bias)};
    const auto failed = torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION);
    STD_TORCH_CHECK(failed == 0, "aten::linear failed");
    return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
    const ScalarType type = x.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                    "dense_linear: x must be float32 or bfloat16");
    const ScalarType weight_type = weight.scalar_type();
    STD_TORCH_CHECK(weight.dim() == 2 && x.dim() > 0 && x.size(-1) == weight.size(1) &&
                        (weight_type == type || weight_type == ScalarType::BFloat16),
                    "dense_linear: the weight must be [n, k] for x [*, k], in the same dtype or bfloat16");
    const int64_t n = weight.size(0), k = weight.size(1);
    STD_TORCH_CHECK(!bias || (bias->numel() == n && bias->scalar_type() == type), "dense_linear: bias must have ", n,
                    " elements of the dtype of x");
    const int64_t t = tokens_of(x);
    const Tensor in = compact(x), w = compact(weight);
    std::optional<Tensor> b;
    if (bias) b = compact(*bias);
    const Tensor out = empty_result(x, n, type);
    const std::unique_ptr<float[]> arranged(new float[t * arranged_size(k)]);
    const Linear p{number_of(type),
                   number_of(weight_type),
                   in.const_data_ptr(),
                   arranged.get(),
                   w.const_data_ptr(),
                   b ? b->const_data_ptr() : nullptr,
                   out.mutable_data_ptr(),
                   t,
                   n,
                   k};
    kernels().arrange(p);
    in_shares(n, n * k, 16, [&](int64_t first, int64_t last) { kernels().rows(p, first, last); });
    return out;
}

Tensor few_tokens_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
    const bool few = weight.dim() == 2 && x.numel() <= few_tokens * weight.size(1);
    return few ? linear(x, weight, bias) : torch_linear(x, weight, bias);
}

Tensor linear_of_heads(const Tensor& x, const Tensor& weights) {
    const ScalarType type = x.scalar_type();
    const Number number = number_of(type);
    STD_TORCH_CHECK((type == ScalarType::Float || type == ScalarType::BFloat16) && weights.scalar_type() == type &&
                        x.dim() == 3 && weights.dim() == 3 && x.size(0) == weights.size(0) &&
                        x.size(2) == weights.size(2),
                    "linear_of_heads: expected x [heads, t, k] and weights [heads, n, k], of one dtype");
    const int64_t heads = x.size(0), t = x.size(1), k = x.size(2), n = weights.size(1), each = t * arranged_size(k);
    const int64_t size = number == Number::float32 ? 4 : 2;
    const Tensor in = compact(x), w = compact(weights), out = fresh(std::vector<int64_t>{heads, t, n}, type);
    const std::unique_ptr<float[]> arranged(new float[heads * each]);
    const auto* from = static_cast<const char*>(in.const_data_ptr());
    const auto* matrix = static_cast<const char*>(w.const_data_ptr());
    auto* to = static_cast<char*>(out.mutable_data_ptr());
    const auto head = [&](int64_t h) {
        return Linear{number,
                      number,
                      from + h * t * k * size,
                      arranged.get() + h * each,
                      matrix + h * n * k * size,
                      nullptr,
                      to + h * t * n * size,
                      t,
                      n,
                      k};
    };
    for (int64_t h = 0; h < heads; h++) kernels().arrange(head(h));
    in_shares(heads * n, heads * n * k, 16, [&](int64_t first, int64_t last) {
        for (int64_t row = first, end; row < last; row = end) {
            const int64_t h = row / n;
            end = std::min(last, (h + 1) * n);
            kernels().rows(head(h), row - h * n, end - h * n);
        }
    });
    return out;
}

}  // namespace ptq::dense

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("dense_linear", TORCH_BOX(&ptq::dense::linear));
}
