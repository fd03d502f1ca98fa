// ptq::causal_conv and mamba2_scan for the CPU. Schemas, fake kernels and references are in ptq/ops/mixer_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/parallel.h"
#include "common/subnormal.h"
#include "common/tensors.h"
#include "mixers/inputs.h"
#include "mixers/kernels.h"
#include "mixers/mixers_cpu.h"

namespace ptq::mixers {
namespace {

using torch::headeronly::ScalarType;
using Sizes = std::vector<int64_t>;

// [channels, width] as [width, channels], in float32.
std::vector<float> turned(const Tensor& weight) {
    const Tensor numbers = as_float(weight);
    const auto* from = static_cast<const float*>(numbers.const_data_ptr());
    const int64_t channels = weight.size(0), width = weight.size(1);
    std::vector<float> made(channels * width);
    for (int64_t c = 0; c < channels; c++)
        for (int64_t w = 0; w < width; w++) made[w * channels + c] = from[c * width + w];
    return made;
}

}  // namespace

// x [b, channels, t]; the memory of what is returned is [b, t, channels]
Tensor causal_conv(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool silu) {
    constexpr auto op = "causal_conv";
    const Number type = checked(op, x);
    STD_TORCH_CHECK(x.dim() == 3 && weight.dim() == 2 && weight.size(1) > 0,
                    "causal_conv: expected x [b, c, t] and weight [c, width]");
    const int64_t b = x.size(0), c = x.size(1), tokens = x.size(2);
    check_tensor(op, "weight", weight, x.scalar_type(), {c, weight.size(1)});
    if (bias) check_tensor(op, "bias", *bias, x.scalar_type(), {c});
    const StridedRows in = rows_of(seen_as(x, {b, tokens, c}, {x.stride(0), x.stride(2), x.stride(1)}, 0), 1);
    const Tensor out = fresh(Sizes{b, tokens, c}, x.scalar_type());
    const std::vector<float> kernel = turned(weight);
    std::optional<Tensor> added;
    if (bias) added = as_float(*bias);
    const Window p{type,
                   in.data(),
                   kernel.data(),
                   added ? static_cast<const float*>(added->const_data_ptr()) : nullptr,
                   out.mutable_data_ptr(),
                   in.apart,
                   tokens,
                   c,
                   weight.size(1),
                   silu};
    run<FlushedSubnormals>(kernels().window, p, b * tokens, 8 * c);
    return seen_as(out, {b, c, tokens}, {tokens * c, 1, c}, 0);
}

// x [b, t, heads, d], dt [b, t, heads], B and C [b, t, groups, n]
Tensor mamba2_scan(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c,
                   const std::optional<Tensor>& skip, const std::optional<Tensor>& dt_bias, const Tensor& state,
                   double low, double high) {
    constexpr auto op = "mamba2_scan";
    const Number type = checked(op, x);
    STD_TORCH_CHECK(x.dim() == 4 && b.dim() == 4 && b.size(2) > 0 && x.size(2) % b.size(2) == 0,
                    "mamba2_scan: expected x [b, t, heads, d], B and C [b, t, groups, n]");
    const int64_t batch = x.size(0), tokens = x.size(1), heads = x.size(2), d = x.size(3), groups = b.size(2),
                  n = b.size(3);
    check_tensor(op, "dt", dt, x.scalar_type(), {batch, tokens, heads});
    for (const Tensor* each : {&b, &c}) check_tensor(op, "B or C", *each, x.scalar_type(), {batch, tokens, groups, n});
    check_tensor(op, "A", a, ScalarType::Float, {heads});
    check_tensor(op, "state", state, ScalarType::Float, {batch, heads, d, n});
    STD_TORCH_CHECK(state.is_contiguous(), "mamba2_scan: the state must be contiguous");
    const Tensor decays = compact(a);
    std::optional<Tensor> others[2] = {skip, dt_bias};
    const float* numbers[2] = {};
    for (int i = 0; i < 2; i++) {
        if (!others[i]) continue;
        const ScalarType found = others[i]->scalar_type();
        STD_TORCH_CHECK(found == ScalarType::Float || found == ScalarType::BFloat16,
                        "mamba2_scan: D and dt_bias must be float32 or bfloat16");
        check_tensor(op, "D or dt_bias", *others[i], found, {heads});
        others[i] = as_float(*others[i]);
        numbers[i] = static_cast<const float*>(others[i]->const_data_ptr());
    }
    const StridedRows rows[] = {rows_of(x, 2), rows_of(b, 2), rows_of(c, 2), rows_of(dt, 1)};
    const Tensor out = fresh(x.sizes(), ScalarType::Float);
    const Scan p{type,
                 rows[0].data(),
                 rows[1].data(),
                 rows[2].data(),
                 rows[3].data(),
                 static_cast<const float*>(decays.const_data_ptr()),
                 numbers[0],
                 numbers[1],
                 static_cast<float*>(state.mutable_data_ptr()),
                 static_cast<float*>(out.mutable_data_ptr()),
                 rows[0].apart,
                 rows[1].apart,
                 rows[2].apart,
                 rows[3].apart,
                 tokens,
                 heads,
                 heads / groups,
                 d,
                 n,
                 static_cast<float>(low),
                 static_cast<float>(high)};
    run<FlushedSubnormals>(kernels().scan, p, batch * heads, tokens * d * n);
    return out;
}

}  // namespace ptq::mixers

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("causal_conv", TORCH_BOX(&ptq::mixers::causal_conv));
    m.impl("mamba2_scan", TORCH_BOX(&ptq::mixers::mamba2_scan));
}
