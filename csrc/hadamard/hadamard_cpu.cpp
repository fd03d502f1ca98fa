// ptq::hadamard for the CPU, and the transform with quantisation behind it. Schemas, fake kernels, references and
// gradients are in ptq/ops/hadamard.py and ptq/ops/activations.py.
#include "hadamard/hadamard_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <tuple>
#include <vector>

#include "activations/checked.h"
#include "common/cpu_level.h"
#include "common/tensors.h"
#include "hadamard/transform.h"

namespace ptq::hadamard {

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Run* kernel() {
    return at_level<run_portable, run_avx2, run_avx2, run_avx512>();
}

// Whether all bytes of [2, K / 4, K] are codes of four signs, 8 times 0..15: kernels take them for addresses.
bool are_codes(const Tensor& factor) {
    const auto* codes = static_cast<const uint8_t*>(factor.const_data_ptr());
    uint64_t bits = 0, eight;
    for (int64_t i = 0, count = factor.numel(); i < count; i += sizeof eight) {
        std::memcpy(&eight, codes + i, sizeof eight);
        bits |= eight;
    }
    return (bits & 0x8787878787878787u) == 0;
}

// The sizes and matrices of a transform, without data: x is contiguous, of a type that the kernel knows.
Problem problem(const Tensor& x, const std::vector<Tensor>& factors, int64_t order, int64_t dim, bool transpose) {
    STD_TORCH_CHECK(x.dim() > 0 && dim >= -x.dim() && dim < x.dim(), "hadamard: no axis ", dim, " in a tensor of rank ",
                    x.dim());
    dim += dim < 0 ? x.dim() : 0;
    const int64_t size = x.size(dim);
    STD_TORCH_CHECK(order > 0 && size % order == 0, "hadamard: axis ", dim, " has size ", size,
                    ", not a multiple of the order ", order);
    const ScalarType type = x.scalar_type();
    Problem p{};
    p.storage = type == ScalarType::Float    ? Storage::float32
                : type == ScalarType::Double ? Storage::float64
                                             : Storage::bfloat16;
    p.order = order;
    p.blocks = size / order;
    p.outer = p.inner = 1;
    for (int64_t d = 0; d < dim; d++) p.outer *= x.size(d);
    for (int64_t d = dim + 1; d < x.dim(); d++) p.inner *= x.size(d);
    p.transpose = transpose;
    p.doublings = order;
    STD_TORCH_CHECK(factors.size() <= max_factors, "hadamard: more than ", max_factors, " dense factors");
    for (const Tensor& f : factors) {
        const bool shape = f.dim() == 3 && f.size(0) == 2 && f.size(2) > 0 && f.size(1) * 4 == f.size(2);
        STD_TORCH_CHECK(
            shape && f.scalar_type() == ScalarType::Byte && f.is_contiguous() && p.doublings % f.size(2) == 0,
            "hadamard: a dense factor must be contiguous uint8 [2, K / 4, K] with K dividing the order");
        STD_TORCH_CHECK(are_codes(f), "hadamard: a dense factor holds a byte that is not 8 times 0..15");
        p.factor_order[p.factors] = f.size(2);
        p.codes[p.factors++] =
            static_cast<const uint8_t*>(f.const_data_ptr()) + (transpose ? f.size(1) * f.size(2) : 0);
        p.doublings /= f.size(2);
    }
    STD_TORCH_CHECK((p.doublings & (p.doublings - 1)) == 0, "hadamard: the factors leave ", p.doublings,
                    " of the order, not a power of two");
    p.scale = 1 / std::sqrt(static_cast<double>(order));
    return p;
}

std::optional<Tensor> checked(const std::optional<Tensor>& signs, const Tensor& x, int64_t dim) {
    if (!signs) return std::nullopt;
    const ScalarType computes = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    const bool each = dim + 1 == x.dim() && signs->numel() == x.numel();
    STD_TORCH_CHECK((signs->numel() == x.size(dim) || each) && signs->scalar_type() == computes,
                    "hadamard: signs must be one float (float64 for float64) per element of the axis, ", x.size(dim));
    return compact(*signs);
}

void give(Problem& p, const std::optional<Tensor>& signs) {
    if (!signs) return;
    p.signs = signs->const_data_ptr();
    p.sign_vectors = signs->numel() / p.order;
}

// x and out: contiguous, of a type that the kernel knows.
void run(const Tensor& x, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors, int64_t order,
         int64_t dim, bool transpose, const Tensor& out) {
    Problem p = problem(x, factors, order, dim, transpose);
    p.in = x.const_data_ptr();
    p.out = out.mutable_data_ptr();
    const std::optional<Tensor> plain_signs = checked(signs, x, dim < 0 ? dim + x.dim() : dim);
    if (x.numel() == 0) return;
    give(p, plain_signs);
    Problem steps[2];
    const int count = split(p, steps);
    for (int s = 0; s < count; s++) {
        const int64_t total = units(steps[s]);
        // A thread is worth waking for about 32k elements.
        const int64_t grain = std::max(int64_t{1}, (int64_t{1} << 15) * total / x.numel());
        torch::stable::parallel_for(0, total, grain,
                                    [&, run = kernel()](int64_t first, int64_t last) { run(steps[s], first, last); });
    }
}

}  // namespace

Tensor hadamard(const Tensor& x, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors, int64_t order,
                int64_t dim, bool transpose) {
    const ScalarType type = x.scalar_type();
    Tensor in = compact(x);
    const bool direct = type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::BFloat16;
    if (!direct) in = torch::stable::to(in, ScalarType::Float);
    Tensor out = fresh(in.sizes(), in.scalar_type());
    run(in, signs, factors, order, dim, transpose, out);
    return direct ? out : torch::stable::to(out, type);
}

namespace {

void hadamard_(const Tensor& x, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors, int64_t order,
               int64_t dim, bool transpose) {
    const ScalarType type = x.scalar_type();
    const bool direct = type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::BFloat16;
    if (direct && x.is_contiguous()) return run(x, signs, factors, order, dim, transpose, x);
    Tensor to = x;
    torch::stable::copy_(to, hadamard(x, signs, factors, order, dim, transpose));
}

}  // namespace

// The float32 transform of some tokens at a time stays in the cache: only integers and scales are written.
std::tuple<Tensor, Tensor> hadamard_quantize(const Tensor& x, const std::optional<Tensor>& signs,
                                             const std::vector<Tensor>& factors, int64_t order, int64_t bits,
                                             double clip) {
    constexpr int64_t scratch_bytes = 1 << 15;
    const activations::Quantizer quantizer = activations::quantizer("hadamard_quantize", bits, clip);
    const bool direct = x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16;
    const Tensor in = compact(direct ? x : torch::stable::to(x, ScalarType::Float));
    Problem p = problem(in, factors, order, -1, false);
    const std::optional<Tensor> plain_signs = checked(signs, in, in.dim() - 1);
    const bool narrow = p.storage == Storage::bfloat16;
    if (narrow) p.storage = Storage::bfloat16_to_float32;
    const auto sizes = in.sizes();
    const Tensor q = fresh(sizes, ScalarType::Char), scale = fresh(sizes.slice(0, sizes.size() - 1), ScalarType::Float);
    const int64_t t = p.outer, k = p.blocks * p.order;
    const char* from = static_cast<const char*>(in.const_data_ptr());
    int8_t* to = static_cast<int8_t*>(q.mutable_data_ptr());
    float* scales = static_cast<float*>(scale.mutable_data_ptr());
    if (in.numel() == 0) {  // tokens of nothing have a scale too
        std::fill(scales, scales + scale.numel(), 1.0f);
        return {q, scale};
    }
    give(p, plain_signs);
    const int64_t own_signs = plain_signs && plain_signs->numel() == in.numel() && t > 1 ? k : 0;  // of each token
    // Tokens that share a unit stay together; a thread is worth waking for about 32k elements.
    p.outer = 1;
    const int64_t unit = tokens_per_unit(p);
    const int64_t most = std::max(unit, scratch_bytes / (4 * k * unit) * unit);
    const int64_t grain = std::max(int64_t{1}, (int64_t{1} << 15) / (k * unit));
    const auto work = [&, transform = kernel(), quantize = activations::kernels().float32](int64_t first,
                                                                                           int64_t last) {
        const int64_t end = std::min(t, last * unit);
        const int64_t elements = (std::min(most, end - first * unit) * k + 15) / 16 * 16;
        const std::unique_ptr<float, decltype(&std::free)> memory(
            static_cast<float*>(std::aligned_alloc(64, 4 * elements)), &std::free);
        if (!memory) throw std::bad_alloc();
        float* scratch = memory.get();
        for (int64_t token = first * unit; token < end; token += most) {
            Problem some = p;
            some.outer = std::min(most, end - token);
            some.in = from + token * k * (narrow ? 2 : 4);
            if (own_signs) some.signs = static_cast<const float*>(p.signs) + token * own_signs;
            some.out = scratch;
            transform(some, 0, units(some));
            for (int64_t i = 0; i < some.outer; i++)
                quantize(quantizer, scratch + i * k, k, to + (token + i) * k, scales + token + i);
        }
    };
    torch::stable::parallel_for(0, (t + unit - 1) / unit, grain, work);
    return {q, scale};
}

}  // namespace ptq::hadamard

// The ops have the same signs for all vectors.
namespace ptq::hadamard {
namespace {

void check_op(const Tensor& x, const std::optional<Tensor>& signs, int64_t dim) {
    STD_TORCH_CHECK(x.dim() > 0 && dim >= -x.dim() && dim < x.dim(), "hadamard: no axis ", dim, " in a tensor of rank ",
                    x.dim());
    const int64_t size = x.size(dim < 0 ? dim + x.dim() : dim);
    STD_TORCH_CHECK(!signs || signs->numel() == size, "hadamard: signs must be one for each element of the axis, ",
                    size);
}

Tensor op(const Tensor& x, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors, int64_t order,
          int64_t dim, bool transpose) {
    check_op(x, signs, dim);
    return hadamard(x, signs, factors, order, dim, transpose);
}

void op_(const Tensor& x, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors, int64_t order,
         int64_t dim, bool transpose) {
    check_op(x, signs, dim);
    hadamard_(x, signs, factors, order, dim, transpose);
}

std::tuple<Tensor, Tensor> op_quantize(const Tensor& x, const std::optional<Tensor>& signs,
                                       const std::vector<Tensor>& factors, int64_t order, int64_t bits, double clip) {
    check_op(x, signs, -1);
    return hadamard_quantize(x, signs, factors, order, bits, clip);
}

}  // namespace
}  // namespace ptq::hadamard

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("hadamard", TORCH_BOX(&ptq::hadamard::op));
    m.impl("hadamard_quantize", TORCH_BOX(&ptq::hadamard::op_quantize));
    m.impl("hadamard_", TORCH_BOX(&ptq::hadamard::op_));
}
