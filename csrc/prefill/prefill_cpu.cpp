// ptq::prefill_attention for CPUs with AVX2; others run the reference. Schema, fake kernel and reference are in
// ptq/ops/prefill_attention.py.
#if defined(__x86_64__)
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "common/cpu_level.h"
#include "common/linear.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "prefill/kernels.h"

namespace ptq::prefill {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t few_tokens = 256;       // as floats, which are twice as long, panels are made in more time
constexpr int64_t most_panels = 4 << 20;  // dwords, for as many heads of keys at a time; one head in any case

// The same with neighbours in the last dimension.
Tensor with_rows(const Tensor& x) {
    return x.stride(3) == 1 ? x : compact(x);
}

Heads heads_of(const Tensor& x) {
    return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

Mode mode_of(const Tensor& q) {
    if (q.scalar_type() != ScalarType::BFloat16 || cpu_level() < CpuLevel::avx512bf16) return Mode::floats;
    if (cpu_level() == CpuLevel::amx) return Mode::tiles;
    return has_slow_pairs() && q.size(2) >= few_tokens ? Mode::floats : Mode::pairs;
}

void check(const Tensor& q, const Tensor& keys, const Tensor& values, double scaling) {
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::Float || q.scalar_type() == ScalarType::BFloat16,
                    "prefill_attention: q must be float32 or bfloat16");
    STD_TORCH_CHECK(q.dim() == 4 && keys.dim() == 4 && keys.size(0) == q.size(0) && keys.size(1) > 0 &&
                        q.size(1) % keys.size(1) == 0 && keys.size(3) == q.size(3) && q.size(3) > 0,
                    "prefill_attention: expected q [b, heads * groups, t, d] and keys [b, heads, s, d]");
    STD_TORCH_CHECK(values.dim() == 4 && values.size(0) == q.size(0) && values.size(1) == keys.size(1) &&
                        values.size(2) == keys.size(2) && values.size(3) > 0,
                    "prefill_attention: values must be [b, heads, s, value_d] for keys [b, heads, s, d]");
    STD_TORCH_CHECK(keys.scalar_type() == q.scalar_type() && values.scalar_type() == q.scalar_type(),
                    "prefill_attention: q, keys and values must have one dtype");
    STD_TORCH_CHECK(static_cast<float>(scaling) > 0, "prefill_attention: scaling must be positive, as a float32 too");
}

void set_mask(Attention& p, const Tensor& mask) {
    STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool && mask.dim() == 4 && mask.size(1) == 1 &&
                        (mask.size(0) == 1 || mask.size(0) == p.batch) && mask.size(2) == p.tokens &&
                        mask.size(3) == p.length && (mask.stride(3) == 1 || p.length <= 1),
                    "prefill_attention: the mask must be bool [b or 1, 1, t, s], without gaps between keys");
    p.mask = static_cast<const uint8_t*>(mask.const_data_ptr());
    p.mask_batch = mask.size(0) == 1 ? 0 : mask.stride(0);
    p.mask_token = mask.stride(2);
}

Tensor prefill_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const std::optional<Tensor>& mask,
                         bool causal, double scaling, const std::optional<Tensor>& sinks) {
    check(q, keys, values, scaling);
    const Kernels& kernels = at_level<avx2, avx2, avx2, avx512, avx512, avx512bf16, amx>();
    const Tensor a = with_rows(q), k = with_rows(keys), v = with_rows(values);
    Attention p{};
    p.mode = mode_of(q), p.type = number_of(q.scalar_type());
    p.q = heads_of(a), p.keys = heads_of(k), p.values = heads_of(v);
    p.batch = q.size(0), p.heads = keys.size(1), p.groups = q.size(1) / keys.size(1), p.tokens = q.size(2);
    p.length = keys.size(2), p.d = q.size(3), p.value_d = values.size(3);
    p.scaling = static_cast<float>(scaling), p.causal = causal;
    if (mask) set_mask(p, *mask);
    const std::vector<float> own = sinks_of("prefill_attention", sinks, q.size(1), 1);
    p.sinks = sinks ? own.data() : nullptr;
    const Tensor out = fresh(std::vector<int64_t>{p.batch, p.tokens, q.size(1), p.value_d}, q.scalar_type());
    p.out = out.mutable_data_ptr();
    const int64_t heads = p.batch * p.heads, keys_size = p.chunks() * chunk * p.key_steps();
    const int64_t size = keys_size + p.chunks() * p.value_steps() * p.value_width();
    const int64_t most = std::clamp(most_panels / std::max(size, int64_t{1}), int64_t{1}, std::max(heads, int64_t{1}));
    const Tensor panels = fresh(std::vector<int64_t>{most * size}, ScalarType::Int);
    p.to_keys = static_cast<uint32_t*>(panels.mutable_data_ptr()), p.to_values = p.to_keys + most * keys_size;
    for (; p.first < heads; p.first += most) {
        const int64_t count = std::min(most, heads - p.first);
        run(kernels.pack, p, count * p.chunks(), chunk * p.d);
        share(count * p.blocks(), [&](Units& units) { kernels.attend(p, units); });
    }
    return out;
}

}  // namespace
}  // namespace ptq::prefill

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    if (ptq::cpu_level() >= ptq::CpuLevel::avx2)
        m.impl("prefill_attention", TORCH_BOX(&ptq::prefill::prefill_attention));
}
#endif
