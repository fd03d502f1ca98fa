// ptq::integer_layer_start and ptq::integer_layer_end for the CPU: what a decoder layer does to a decoded token before
// and after its attention, each as one op. Schemas, fake kernels and references are in quarot/layer_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "activations/activations_cpu.h"
#include "hadamard/hadamard_cpu.h"
#include "integer_tiled/tiled_cpu.h"
#include "steps/steps_cpu.h"

namespace ptq::integer_tiled {
namespace {

using torch::stable::Tensor;

// Several weights, and what is done to the input of some of them. `zero` and `bias` are empty, or one for each.
struct Weights {
    const Tensors &tiles, &scale, &zero, &bias;
    const std::vector<int64_t>& n;
    int64_t bits, group_size;
};

struct Input {
    int64_t bits;  // of its integers; 0: it stays as it is
    double clip;
    const Tensors& factors;
    int64_t order;  // of the Hadamard transform before that; 0: none
};

// x times weights [first, last).
Tensors products(const Tensor& x, const Input& input, const Weights& w, size_t first, size_t last) {
    const auto some = [&](const auto& all) {
        using List = std::remove_cvref_t<decltype(all)>;
        return all.empty() ? List() : List(all.begin() + first, all.begin() + last);
    };
    const Tensors tiles = some(w.tiles), scale = some(w.scale), zero = some(w.zero), bias = some(w.bias);
    const std::vector<int64_t> n = some(w.n);
    if (!input.bits) {
        const Tensor in = input.order ? hadamard::hadamard(x, std::nullopt, input.factors, input.order, -1, false) : x;
        return linears_tiled(in, tiles, scale, zero, bias, n, w.bits, w.group_size);
    }
    const auto [q, q_scale] =
        input.order ? hadamard::hadamard_quantize(x, std::nullopt, input.factors, input.order, input.bits, input.clip)
                    : activations::quantize_tokens(x, input.bits, input.clip);
    return linears_quantized(q, q_scale, tiles, scale, zero, bias, n, w.bits, w.group_size, x.scalar_type());
}

void check(const Weights& w, size_t count) {
    for (const Tensors* list : {&w.tiles, &w.scale})
        STD_TORCH_CHECK(list->size() == count && w.n.size() == count, "integer layer: expected ", count, " weights");
    for (const Tensors* list : {&w.zero, &w.bias})
        STD_TORCH_CHECK(list->empty() || list->size() == count, "integer layer: lists of different lengths");
}

Tensors start(const Tensor& x, const Tensor& gain, double eps, double offset, bool round_first, const Tensors& tiles,
              const Tensors& scale, const Tensors& zero, const Tensors& bias, const std::vector<int64_t>& n,
              int64_t bits, int64_t group_size, int64_t input_bits, double clip) {
    const Weights w{tiles, scale, zero, bias, n, bits, group_size};
    check(w, n.size());
    const Tensor normed = steps::rms_norm(x, gain, eps, offset, round_first);
    const Tensors none;
    return products(normed, {input_bits, clip, none, 0}, w, 0, n.size());
}

Tensor end(const Tensor& attended, const Tensor& x, const Tensor& gain, double eps, double offset, bool round_first,
           const Tensors& tiles, const Tensors& scale, const Tensors& zero, const Tensors& bias,
           const std::vector<int64_t>& n, int64_t bits, int64_t group_size, int64_t input_bits, double clip,
           const Tensors& factors, int64_t order, int64_t down_bits, double down_clip) {
    const Weights w{tiles, scale, zero, bias, n, bits, group_size};
    check(w, 4);  // o_proj, gate_proj, up_proj, down_proj
    const Tensors none;
    const Input plain{input_bits, clip, none, 0}, down{down_bits, down_clip, factors, order};
    const Tensor y = steps::sum(x, products(attended, plain, w, 0, 1).front());
    const Tensors gated = products(steps::rms_norm(y, gain, eps, offset, round_first), plain, w, 1, 3);
    return steps::sum(y, products(steps::silu_mul(gated[0], gated[1]), down, w, 3, 4).front());
}

}  // namespace
}  // namespace ptq::integer_tiled

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("integer_layer_start", TORCH_BOX(&ptq::integer_tiled::start));
    m.impl("integer_layer_end", TORCH_BOX(&ptq::integer_tiled::end));
}
