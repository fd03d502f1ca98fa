// ptq::hadamard and ptq::hadamard_to for CUDA, and the transform with quantisation behind it. Schemas, fake kernels,
// references and gradients are in ptq/ops/hadamard.py, ptq/ops/input_steps.py and ptq/ops/activations.py.
#include <cmath>

#include "activations/checked.h"
#include "hadamard/hadamard_cuda.h"
#include "hadamard/transform_launch.cuh"

namespace ptq::hadamard {
namespace {

using cuda::ScalarType;
using torch::stable::Tensor;

Dtype dtype_of(const Tensor& x) {
    const ScalarType type = x.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Half ||
                        type == ScalarType::BFloat16,
                    "hadamard: x must be float16, bfloat16, float32 or float64");
    return type == ScalarType::Float    ? Dtype::float32
           : type == ScalarType::Double ? Dtype::float64
           : type == ScalarType::Half   ? Dtype::float16
                                        : Dtype::bfloat16;
}

// The sizes and matrices of a transform: x is contiguous.
Task task(const Tensor& x, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors, int64_t order,
          int64_t dim, bool transpose) {
    STD_TORCH_CHECK(x.dim() > 0 && dim >= -x.dim() && dim < x.dim(), "hadamard: no axis ", dim, " in a tensor of rank ",
                    x.dim());
    dim += dim < 0 ? x.dim() : 0;
    const int64_t size = x.size(dim);
    STD_TORCH_CHECK(order > 0 && size % order == 0, "hadamard: axis ", dim, " has size ", size,
                    ", not a multiple of the order ", order);
    Task t{};
    t.dtype = t.out_dtype = dtype_of(x);
    t.in = x.const_data_ptr();
    t.order = order;
    t.blocks = size / order;
    t.outer = t.inner = 1;
    for (int64_t d = 0; d < x.dim(); d++)
        if (d != dim) (d < dim ? t.outer : t.inner) *= x.size(d);
    t.transpose = transpose;
    t.doublings = order;
    for (const Tensor& f : factors) {
        cuda::check_tensor("hadamard", "a dense factor", f, x, ScalarType::Byte);
        STD_TORCH_CHECK(f.dim() == 3 && f.size(0) == 2 && f.size(2) > 0 && f.size(1) * 4 == f.size(2) &&
                            t.doublings % f.size(2) == 0,
                        "hadamard: a dense factor must be [2, K / 4, K] with K dividing the order");
        t.factor_order.push_back(static_cast<int>(f.size(2)));
        t.codes.push_back(static_cast<const uint8_t*>(f.const_data_ptr()) + (transpose ? f.size(1) * f.size(2) : 0));
        t.doublings /= f.size(2);
    }
    STD_TORCH_CHECK((t.doublings & (t.doublings - 1)) == 0, "hadamard: the factors leave ", t.doublings,
                    " of the order, not a power of two");
    t.scale = 1 / std::sqrt(static_cast<double>(order));
    if (signs) {
        const ScalarType computes = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
        cuda::check_tensor("hadamard", "signs", *signs, x, computes);
        STD_TORCH_CHECK(signs->numel() == size, "hadamard: signs must be one float per element of the axis, ", size);
        t.signs = signs->const_data_ptr();
    }
    return t;
}

// x and out are contiguous and of one type; they may be the same.
void run(const Tensor& x, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors, int64_t order,
         int64_t dim, bool transpose, const Tensor& out) {
    const Device& device = cuda::properties(x.get_device_index()).device;
    Task t = task(x, signs, factors, order, dim, transpose);
    if (x.numel() == 0) return;
    t.out = out.mutable_data_ptr();
    t.aligned = cuda::is_aligned(t.in) && cuda::is_aligned(t.out);
    const Stream stream = cuda::current_stream(x.get_device_index());
    Transform p;
    if (plan(t, device, p)) return cuda::check_launch("hadamard", run_fast(p, t, stream));
    const Tensor first = cuda::work_buffer(general_bytes(t), x), second = cuda::work_buffer(general_bytes(t), x);
    cuda::check_launch("hadamard", run_general(t, first.mutable_data_ptr(), second.mutable_data_ptr(), stream));
}

std::optional<Tensor> compact(const std::optional<Tensor>& signs) {
    return signs ? std::optional(torch::stable::contiguous(*signs)) : std::nullopt;
}

// Room for quantised tokens, in the task.
std::vector<Tensor> quantised(const char* op, Task& t, const Tensor& x, int64_t bits, double clip) {
    t.quantizer = activations::quantizer(op, bits, clip);
    const auto sizes = x.sizes();
    const Tensor q = cuda::empty_like_device(sizes, ScalarType::Char, x);
    const Tensor scale = cuda::empty_like_device({sizes.data(), sizes.size() - 1}, ScalarType::Float, x);
    t.out = q.mutable_data_ptr();
    t.token_scale = static_cast<float*>(scale.mutable_data_ptr());
    return {q, scale};
}

}  // namespace

Tensor hadamard(const Tensor& x, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors, int64_t order,
                int64_t dim, bool transpose) {
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const Tensor in = torch::stable::contiguous(x);
    const Tensor out = cuda::empty_like_device(in.sizes(), in.scalar_type(), in);
    run(in, compact(signs), factors, order, dim, transpose, out);
    return out;
}

namespace {

void hadamard_(const Tensor& x, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors, int64_t order,
               int64_t dim, bool transpose) {
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    if (x.is_contiguous()) return run(x, compact(signs), factors, order, dim, transpose, x);
    Tensor to = x;
    torch::stable::copy_(to, hadamard(x, signs, factors, order, dim, transpose));
}

// The transform of float32 numbers, rounded to another type once.
Tensor hadamard_to(const Tensor& x, const std::optional<Tensor>& signs, const std::vector<Tensor>& factors,
                   int64_t order, bool transpose, ScalarType type) {
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const bool narrow = type == ScalarType::Half || type == ScalarType::BFloat16;
    const Device& device = cuda::properties(x.get_device_index()).device;
    if (x.scalar_type() == ScalarType::Float && narrow && x.numel()) {
        const Tensor in = torch::stable::contiguous(x);
        const std::optional<Tensor> plain = compact(signs);
        Task t = task(in, plain, factors, order, -1, transpose);
        const Tensor out = cuda::empty_like_device(in.sizes(), type, in);
        t.out = out.mutable_data_ptr();
        t.out_dtype = dtype_of(out);
        t.aligned = cuda::is_aligned(t.in);
        Transform p;
        if (plan(t, device, p)) {
            cuda::check_launch("hadamard_to", run_fast(p, t, cuda::current_stream(x.get_device_index())));
            return out;
        }
    }
    const Tensor y = hadamard(x, signs, factors, order, -1, transpose);
    return y.scalar_type() == type ? y : torch::stable::to(y, type);
}

}  // namespace

std::vector<Tensor> of_input(const Tensor& x, const inputs::Input& input, bool aligned,
                             const std::optional<Tensor>& signs, const std::vector<Tensor>& factors, int64_t order,
                             int64_t bits, double clip) {
    constexpr const char* op = "the Hadamard transform of an input";
    const std::optional<Tensor> plain = compact(signs);
    Task t = task(x, plain, factors, order, -1, false);
    t.input = input;
    t.aligned = aligned && cuda::is_aligned(t.in);
    std::vector<Tensor> out;
    if (bits) {
        out = quantised(op, t, x, bits, clip);
    } else {
        out.push_back(cuda::empty_like_device(x.sizes(), x.scalar_type(), x));
        t.out = out[0].mutable_data_ptr();
    }
    Transform p;
    if (!plan(t, cuda::properties(x.get_device_index()).device, p)) return {};
    cuda::check_launch(op, run_fast(p, t, cuda::current_stream(x.get_device_index())));
    return out;
}

std::tuple<Tensor, Tensor> hadamard_quantize(const Tensor& x, const std::optional<Tensor>& signs,
                                             const std::vector<Tensor>& factors, int64_t order, int64_t bits,
                                             double clip) {
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const Device& device = cuda::properties(x.get_device_index()).device;
    STD_TORCH_CHECK(x.dim() > 0 && x.size(-1) < int64_t{1} << 31, "hadamard_quantize: tokens are too long");
    const bool wide = x.scalar_type() == ScalarType::Double;
    const Tensor in = torch::stable::contiguous(wide ? torch::stable::to(x, ScalarType::Float) : x);
    const std::optional<Tensor> plain = compact(signs);
    Task t = task(in, plain, factors, order, -1, false);
    const std::vector<Tensor> out = quantised("hadamard_quantize", t, in, bits, clip);
    const Tensor &q = out[0], &scale = out[1];
    t.aligned = cuda::is_aligned(t.in);
    if (scale.numel() == 0) return {q, scale};
    const Stream stream = cuda::current_stream(x.get_device_index());
    const auto quantize = [&](const void* numbers) {
        const activations::Tokens tokens{numbers,
                                         static_cast<int8_t*>(t.out),
                                         t.token_scale,
                                         scale.numel(),
                                         static_cast<int>(in.size(-1)),
                                         0,
                                         true,
                                         t.quantizer};
        cuda::check_launch("hadamard_quantize", activations::quantize(tokens, 4, false, stream));
    };
    if (in.numel() == 0) {  // tokens of nothing have a scale too
        quantize(nullptr);
        return {q, scale};
    }
    Transform p;
    if (plan(t, device, p)) {
        cuda::check_launch("hadamard_quantize", run_fast(p, t, stream));
        return {q, scale};
    }
    const Tensor first = cuda::work_buffer(general_bytes(t), x), second = cuda::work_buffer(general_bytes(t), x);
    const Tensor number = cuda::work_buffer(general_bytes(t), x);
    cuda::check_launch("hadamard_quantize", run_general(t, first.mutable_data_ptr(), second.mutable_data_ptr(), stream,
                                                        number.mutable_data_ptr()));
    quantize(number.const_data_ptr());
    return {q, scale};
}

}  // namespace ptq::hadamard

STABLE_TORCH_LIBRARY_IMPL(ptq, CUDA, m) {
    m.impl("hadamard", TORCH_BOX(&ptq::hadamard::hadamard));
    m.impl("hadamard_quantize", TORCH_BOX(&ptq::hadamard::hadamard_quantize));
    m.impl("hadamard_to", TORCH_BOX(&ptq::hadamard::hadamard_to));
    m.impl("hadamard_", TORCH_BOX(&ptq::hadamard::hadamard_));
}
