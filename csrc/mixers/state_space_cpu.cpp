// ptq::mamba2_step for the CPU. Schema, fake kernel and reference are in ptq/ops/mixer_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <limits>
#include <optional>

#include "common/tensors.h"
#include "mixers/mixers_cpu.h"

namespace ptq::mixers {
namespace {

using torch::headeronly::ScalarType;
using Sizes = std::vector<int64_t>;

// -exp(a_log), in float32.
Tensor decays(const Tensor& a_log) {
    const Tensor in = as_float(a_log), out = fresh(in.sizes(), ScalarType::Float);
    const auto* from = static_cast<const float*>(in.const_data_ptr());
    auto* to = static_cast<float*>(out.mutable_data_ptr());
    const int64_t count = in.numel();
    for (int64_t i = 0; i < count; i++) to[i] = -std::exp(from[i]);
    return out;
}

Tensor step(const Tensor& product, const Tensor& conv_state, const Tensor& state, const Tensor& conv,
            const std::optional<Tensor>& conv_bias, const Tensor& a_log, const Tensor& skip, const Tensor& dt_bias,
            const Tensor& gain, double eps, int64_t norm_groups) {
    return mamba2_step(product, conv_state, state, {conv, conv_bias, a_log, skip, dt_bias, gain, eps, norm_groups});
}

}  // namespace

Tensor mamba2_step(const Tensor& product, const Tensor& conv_state, const Tensor& state, const StateSpace& space) {
    STD_TORCH_CHECK(
        product.dim() == 3 && product.size(1) == 1 && state.dim() == 4 && space.conv.dim() == 3 &&
            space.conv.size(1) == 1,
        "mamba2_step: expected a product [b, 1, *], a state [b, heads, d, n] and conv [channels, 1, kernel]");
    const int64_t rows = product.size(0), heads = state.size(1), d = state.size(2), n = state.size(3);
    const int64_t width = heads * d, channels = space.conv.size(0), both = channels - width;
    const int64_t groups = n > 0 ? both / (2 * n) : 0;
    STD_TORCH_CHECK(groups > 0 && both == 2 * groups * n && product.size(2) == width + channels + heads,
                    "mamba2_step: ", product.size(2), " rows and ", channels, " channels do not fit this state");
    for (const Tensor* each : {&space.a_log, &space.skip, &space.dt_bias}) {
        const ScalarType found = each->scalar_type();
        STD_TORCH_CHECK(found == ScalarType::Float || found == ScalarType::BFloat16,
                        "mamba2_step: a_log, D and dt_bias must be float32 or bfloat16");
        check_tensor("mamba2_step", "a_log, D or dt_bias", *each, found, {heads});
    }
    check_tensor("mamba2_step", "state", state, ScalarType::Float, {rows, heads, d, n});
    STD_TORCH_CHECK(state.is_contiguous() && space.norm_groups > 0 && width % space.norm_groups == 0,
                    "mamba2_step: expected a contiguous state, and groups of the norm that divide ", width);
    check_tensor("mamba2_step", "gain", space.gain, product.scalar_type(), {width});
    const Tensor in = compact(product);
    const auto part = [&](const Tensor& of, int64_t from, int64_t count, int64_t size) {
        return seen_as(of, {rows, 1, count, size}, {of.size(1) * of.size(2), of.size(1) * of.size(2), size, 1}, from);
    };
    const Tensor kernel = reshaped(compact(space.conv), Sizes{channels, space.conv.size(2)});
    const Tensor seen = reshaped(compact(part(in, width, 1, channels)), Sizes{rows, channels, 1});
    const Tensor mixed = conv_step(seen, conv_state, kernel, space.conv_bias, true);
    const Tensor dt = seen_as(in, {rows, 1, heads}, {in.size(2), in.size(2), 1}, width + channels);
    const Tensor y = mamba2_scan(part(mixed, 0, heads, d), dt, decays(space.a_log), part(mixed, width, groups, n),
                                 part(mixed, width + groups * n, groups, n), space.skip, space.dt_bias, state, 0.0,
                                 std::numeric_limits<float>::infinity());
    const Tensor gate = seen_as(in, {rows, 1, width}, {in.size(2), in.size(2), 1}, 0);
    const Tensor flat = reshaped(y, Sizes{rows, 1, width});
    return from_float(gated_rms_norm(flat, gate, space.gain, space.eps, space.norm_groups, true),
                      product.scalar_type());
}

}  // namespace ptq::mixers

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("mamba2_step", TORCH_BOX(&ptq::mixers::step));
}
