// ptq::add_gram_ and ptq::add_cross_ for the CPU. Schemas, fake kernels and references are in ptq/ops/gram.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "common/cpu_level.h"
#include "common/tensors.h"
#include "gram/kernels.h"

namespace ptq::gram {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const Kernels& kernels() {
    return at_level<portable, avx2, avx2, avx512, avx512, avx512bf16>();
}

// The channels of x [t, k] as a weight, in `room`, which is made here.
Channels arranged(const Tensor& x, bool bfloat16, Tensor& room) {
    Channels c{};
    c.x = static_cast<const float*>(x.const_data_ptr()), c.t = x.size(0), c.k = x.size(1);
    c.rounded = bfloat16, c.pairs = bfloat16 && kernels().has_pairs && gemm::are_pairs(Number::bfloat16);
    const int64_t columns = (c.t + gemm::column_step - 1) / gemm::column_step * gemm::column_step;
    c.steps = columns / (c.pairs ? 2 : 1);
    room = torch::stable::empty({(c.k + tile_rows - 1) / tile_rows, c.steps, tile_rows}, ScalarType::Int);
    c.tiles = static_cast<uint32_t*>(room.mutable_data_ptr());
    torch::stable::parallel_for(0, c.steps, 1, [&](int64_t first, int64_t last) { kernels().arrange(c, first, last); });
    return c;
}

// sum [rows, end] += the products of `rows` channels of some [t, k], from `others` on, with those in front of `end`.
void add_products(Channels c, const float* others, const Tensor& sum, int64_t diagonal) {
    const int64_t rows = sum.size(0), end = sum.size(1), columns = c.steps * (c.pairs ? 2 : 1);
    gemm::Product p{};
    p.w.weight = &c, p.w.unpack = kernels().unpack, p.w.n = end;
    p.w.columns = p.w.group_columns = columns, p.w.groups = 1;
    p.mode = c.pairs ? gemm::Mode::pairs : gemm::Mode::floats;
    p.x = others, p.t = rows;
    p.out = sum.mutable_data_ptr(), p.out_type = Number::float32;
    p.add = true, p.diagonal = diagonal;
    Tensor turned;
    if (c.pairs && gemm::on_amx(Number::bfloat16)) {
        const int64_t blocks = (rows + tile_rows - 1) / tile_rows;
        turned = torch::stable::empty({blocks * tile_rows, c.steps}, ScalarType::Int);
        auto* to = static_cast<uint32_t*>(turned.mutable_data_ptr());
        c.x = others;
        torch::stable::parallel_for(0, blocks, 1,
                                    [&](int64_t first, int64_t last) { kernels().turn(c, rows, first, last, to); });
        p.rows = to, p.row_steps = c.steps;
    } else {
        p.pack = kernels().pack;
    }
    gemm::multiply_panels(p);
}

bool is_sum(const Tensor& sum) {
    return sum.dim() == 2 && sum.scalar_type() == ScalarType::Float && sum.is_contiguous();
}

void add_gram(const std::vector<Tensor>& sums, const Tensor& x, bool bfloat16) {
    STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float, "add_gram_: x must be float32 [t, k]");
    for (const Tensor& sum : sums)
        STD_TORCH_CHECK(is_sum(sum) && sum.size(0) <= sum.size(1) && sum.size(1) <= x.size(1),
                        "add_gram_: sums must be contiguous float32 [rows, end], rows <= end <= k");
    if (x.numel() == 0) return;
    const Tensor in = compact(x);
    Tensor room;
    const Channels c = arranged(in, bfloat16, room);
    for (const Tensor& sum : sums) {
        const int64_t first = sum.size(1) - sum.size(0);
        add_products(c, c.x + first, sum, first);
    }
}

void add_cross(const Tensor& sum, const Tensor& d, const Tensor& x, bool bfloat16) {
    for (const Tensor* in : {&d, &x})
        STD_TORCH_CHECK(in->dim() == 2 && in->scalar_type() == ScalarType::Float && in->size(0) == x.size(0) &&
                            in->size(1) == x.size(1),
                        "add_cross_: d and x must be float32 [t, k]");
    STD_TORCH_CHECK(is_sum(sum) && sum.size(0) == x.size(1) && sum.size(1) == x.size(1),
                    "add_cross_: the sum must be contiguous float32 [k, k]");
    if (x.numel() == 0) return;
    const Tensor in = compact(x), others = compact(d);
    Tensor room;
    const Channels c = arranged(in, bfloat16, room);
    add_products(c, static_cast<const float*>(others.const_data_ptr()), sum, -1);
}

}  // namespace
}  // namespace ptq::gram

// Without AVX2, and on Arm, torch's own products serve: those of `portable` are there to be tested.
STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
#if defined(__x86_64__)
    constexpr bool vectors = true;
#else
    constexpr bool vectors = false;
#endif
    if (!vectors || ptq::cpu_level() < ptq::CpuLevel::avx2) return;
    m.impl("add_gram_", TORCH_BOX(&ptq::gram::add_gram));
    m.impl("add_cross_", TORCH_BOX(&ptq::gram::add_cross));
}
