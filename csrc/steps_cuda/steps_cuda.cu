// The small steps between the products of a layer for CUDA. Schemas, fake kernels and references are in
// ptq/ops/steps.py and ptq/ops/input_steps.py.
#include <tuple>

#include "activations/checked.h"
#include "hadamard/hadamard_cuda.h"
#include "steps_cuda/input_kernel.cuh"
#include "steps_cuda/rotary.cuh"

namespace ptq::steps_cuda {
namespace {

using cuda::ScalarType;
using torch::stable::Tensor;

// Runs run.operator()<T>() for the type of x.
template <class Run>
auto with_type(const char* op, const Tensor& x, Run run) {
    const ScalarType type = x.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16, op,
                    ": x must be float16, bfloat16 or float32");
    if (type == ScalarType::Float) return run.template operator()<float>();
    if (type == ScalarType::Half) return run.template operator()<Half>();
    return run.template operator()<Bfloat16>();
}

// A tensor beside x, of its device and type, contiguous.
Tensor beside(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
    const Tensor plain = torch::stable::contiguous(tensor);
    cuda::check_tensor(op, name, plain, x, x.scalar_type());
    return plain;
}
void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
    const auto a = tensor.sizes(), b = x.sizes();
    STD_TORCH_CHECK(a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin()), op, ": ", name,
                    " and x differ in shape");
}

// What stands before the transform, and the tensors that it points to.
struct Source {
    const char* op;
    Tensor x;
    Input input{};
    bool aligned = true;
    std::vector<Tensor> held{};

    const void* hold(const Tensor& tensor) {
        held.push_back(tensor);
        aligned = aligned && cuda::is_aligned(tensor.const_data_ptr());
        return tensor.const_data_ptr();
    }
};

// The input without a transform.
std::vector<Tensor> plain_input(Source& s, int64_t bits, double clip) {
    const int64_t k = s.x.size(-1);
    const auto sizes = s.x.sizes();
    int64_t tokens = 1;
    for (size_t d = 0; d + 1 < sizes.size(); d++) tokens *= sizes[d];
    STD_TORCH_CHECK(k < int64_t{1} << 30 && tokens < int64_t{1} << 31, s.op,
                    ": x is too large: at most 2^31 - 1 tokens of 2^30 - 1 numbers");
    std::vector<Tensor> out{cuda::empty_like_device(sizes, bits ? ScalarType::Char : s.x.scalar_type(), s.x)};
    Tokens p{s.input, s.x.const_data_ptr(), out[0].mutable_data_ptr(), nullptr, tokens, static_cast<int>(k)};
    const bool is_aligned = s.aligned && cuda::is_aligned(p.x);
    p.aligned = is_aligned && k % unit == 0;
    if (bits) {
        p.grid = activations::quantizer(s.op, bits, clip);
        out.push_back(cuda::empty_like_device({sizes.data(), sizes.size() - 1}, ScalarType::Float, s.x));
        p.scale = static_cast<float*>(out[1].mutable_data_ptr());
    }
    const Stream stream = cuda::current_stream(s.x.get_device_index());
    with_type(s.op, s.x, [&]<class T>() {
        if (s.input.up && !bits)
            cuda::check_launch(s.op, run_gate<T>({p.x, s.input.up, p.out, tokens * k, is_aligned}, stream));
        else
            cuda::check_launch(s.op, run_input<T>(p, stream));
    });
    return out;
}

// As a product takes it: transformed where order is not 0, then with bits as integers and their scales.
std::vector<Tensor> finished(Source& s, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors,
                             int64_t order, int64_t bits, double clip) {
    if (order == 0) return plain_input(s, bits, clip);
    if (s.x.numel() && !s.input.up) {  // a gate is faster by itself: one token's makes work for the whole device
        std::vector<Tensor> out = hadamard::of_input(s.x, s.input, s.aligned, signs, factors, order, bits, clip);
        if (!out.empty()) return out;
    }
    const Tensor y = plain_input(s, 0, 1)[0];
    if (bits == 0) return {hadamard::hadamard(y, signs, factors, order, -1, false)};
    const auto [q, scale] = hadamard::hadamard_quantize(y, signs, factors, order, bits, clip);
    return {q, scale};
}

Source norm_source(const char* op, const Tensor& x, const std::optional<Tensor>& added, const Tensor& gain, double eps,
                   double offset, bool round_first) {
    cuda::properties(x.get_device_index());
    STD_TORCH_CHECK(x.dim() > 0 && gain.dim() == 1 && gain.size(0) == x.size(-1), op,
                    ": the gain must be [k] for x [*, k]");
    Source s{op, torch::stable::contiguous(x)};
    s.input.gain = s.hold(beside(op, "the gain", gain, x));
    if (added) {
        check_like(op, "what is added", *added, x);
        s.input.added = s.hold(beside(op, "what is added", *added, x));
        s.input.sum = const_cast<void*>(s.hold(cuda::empty_like_device(x.sizes(), x.scalar_type(), x)));
    }
    s.input.eps = static_cast<float>(eps), s.input.offset = static_cast<float>(offset);
    s.input.round_first = round_first;
    return s;
}

Tensor rms_norm(const Tensor& x, const Tensor& gain, double eps, double offset, bool round_first) {
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Source s = norm_source("rms_norm", x, std::nullopt, gain, eps, offset, round_first);
    return plain_input(s, 0, 1)[0];
}

std::vector<Tensor> norm_input(const Tensor& x, const std::optional<Tensor>& added, const Tensor& gain, double eps,
                               double offset, bool round_first, const std::optional<Tensor>& signs,
                               const std::vector<Tensor>& factors, int64_t order, int64_t bits, double clip) {
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Source s = norm_source("norm_input", x, added, gain, eps, offset, round_first);
    std::vector<Tensor> out = finished(s, signs, factors, order, bits, clip);
    if (added) out.insert(out.begin(), s.held.back());
    return out;
}

Source gate_source(const char* op, const Tensor& gate, const Tensor& up) {
    cuda::properties(gate.get_device_index());
    STD_TORCH_CHECK(gate.dim() > 0, op, ": x has no axis");
    check_like(op, "up", up, gate);
    Source s{op, torch::stable::contiguous(gate)};
    s.input.up = s.hold(beside(op, "up", up, gate));
    return s;
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
    const torch::stable::accelerator::DeviceGuard guard(gate.get_device_index());
    Source s = gate_source("silu_mul", gate, up);
    return plain_input(s, 0, 1)[0];
}

std::vector<Tensor> gate_input(const Tensor& gate, const Tensor& up, const std::optional<Tensor>& signs,
                               const std::vector<Tensor>& factors, int64_t order, int64_t bits, double clip) {
    const torch::stable::accelerator::DeviceGuard guard(gate.get_device_index());
    Source s = gate_source("gate_input", gate, up);
    return finished(s, signs, factors, order, bits, clip);
}

// One of queries and keys.
Side side(const char* op, Tensor& x, const Tensor& out) {
    if (x.stride(3) != 1) x = torch::stable::contiguous(x);
    return {x.const_data_ptr(), out.mutable_data_ptr(),     x.stride(0), x.stride(1),
            x.stride(2),        static_cast<int>(x.size(1))};
}

std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
    constexpr const char* op = "rotary";
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    cuda::properties(q.get_device_index());
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && q.size(3) % 2 == 0 && k.size(0) == q.size(0) &&
                        k.size(2) == q.size(2) && k.size(3) == q.size(3),
                    op, ": expected q and k [b, h, t, d] with even d");
    STD_TORCH_CHECK(k.is_cuda() && k.get_device_index() == q.get_device_index() && k.scalar_type() == q.scalar_type(),
                    op, ": q and k must be on one device and of one dtype");
    check_like(op, "sin", sin, cos);
    STD_TORCH_CHECK(cos.dim() == 3 && (cos.size(0) == 1 || cos.size(0) == q.size(0)) && cos.size(1) == q.size(2) &&
                        cos.size(2) == q.size(3),
                    op, ": cos and sin must be [b or 1, t, d]");
    const Tensor c = beside(op, "cos", cos, q), s = beside(op, "sin", sin, q);
    const Tensor outs[2] = {cuda::empty_like_device(q.sizes(), q.scalar_type(), q),
                            cuda::empty_like_device(k.sizes(), k.scalar_type(), q)};
    Tensor in[2] = {q, k};
    Rotary p{{side(op, in[0], outs[0]), side(op, in[1], outs[1])}, c.const_data_ptr(), s.const_data_ptr()};
    STD_TORCH_CHECK(q.size(0) < int64_t{1} << 31 && q.size(2) < int64_t{1} << 31 && q.size(3) < int64_t{1} << 30 &&
                        q.numel() + k.numel() < int64_t{1} << 38,
                    op, ": too many tokens at once");
    p.batch = static_cast<int>(q.size(0)), p.tokens = static_cast<int>(q.size(2)), p.d = static_cast<int>(q.size(3));
    p.angle_stride = c.size(0) == 1 ? 0 : c.size(1) * c.size(2);
    p.aligned = p.d % (2 * rotated_at_once) == 0 && cuda::is_aligned(p.cos) && cuda::is_aligned(p.sin);
    for (const Side& x : p.side)
        p.aligned = p.aligned && cuda::is_aligned(x.x) && cuda::is_aligned(x.out) &&
                    (x.batch_stride | x.head_stride | x.token_stride) % rotated_at_once == 0;
    with_type(op, q,
              [&]<class T>() { cuda::check_launch(op, run_rotary<T>(p, cuda::current_stream(q.get_device_index()))); });
    return {outs[0], outs[1]};
}

}  // namespace
}  // namespace ptq::steps_cuda

STABLE_TORCH_LIBRARY_IMPL(ptq, CUDA, m) {
    m.impl("rms_norm", TORCH_BOX(&ptq::steps_cuda::rms_norm));
    m.impl("silu_mul", TORCH_BOX(&ptq::steps_cuda::silu_mul));
    m.impl("rotary", TORCH_BOX(&ptq::steps_cuda::rotary));
    m.impl("norm_input", TORCH_BOX(&ptq::steps_cuda::norm_input));
    m.impl("gate_input", TORCH_BOX(&ptq::steps_cuda::gate_input));
}
