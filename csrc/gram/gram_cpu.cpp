// ptq::add_gram_ for the CPU. Schema, fake kernel and reference are in ptq/ops/gram.py.
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

// sum [rows, end] += the products of the channels in front of `end`, the last ones with all.
void add_panel(const Channels& c, const Tensor& sum) {
    const int64_t rows = sum.size(0), end = sum.size(1), columns = c.steps * (c.pairs ? 2 : 1);
    gemm::Product p{};
    p.w.weight = &c, p.w.unpack = kernels().unpack, p.w.n = end;
    p.w.columns = p.w.group_columns = columns, p.w.groups = 1;
    p.mode = c.pairs ? gemm::Mode::pairs : gemm::Mode::floats;
    p.x = c.x + end - rows, p.t = rows;
    p.out = sum.mutable_data_ptr(), p.out_type = Number::float32;
    p.pack = kernels().pack, p.add = true, p.diagonal = end - rows;
    gemm::multiply_panels(p);
}

void add_gram(const std::vector<Tensor>& sums, const Tensor& x, bool bfloat16) {
    STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float, "add_gram_: x must be float32 [t, k]");
    for (const Tensor& sum : sums)
        STD_TORCH_CHECK(sum.dim() == 2 && sum.scalar_type() == ScalarType::Float && sum.is_contiguous() &&
                            sum.size(0) <= sum.size(1) && sum.size(1) <= x.size(1),
                        "add_gram_: sums must be contiguous float32 [rows, end], rows <= end <= k");
    const Tensor in = compact(x);
    const int64_t t = in.size(0), k = in.size(1);
    if (t == 0 || k == 0) return;
    const bool pairs = bfloat16 && kernels().has_pairs;
    const int64_t columns = (t + gemm::column_step - 1) / gemm::column_step * gemm::column_step;
    const int64_t steps = columns / (pairs ? 2 : 1), tiles = (k + tile_rows - 1) / tile_rows;
    const Tensor room = torch::stable::empty({tiles, steps, tile_rows}, ScalarType::Int);
    const Channels c{static_cast<const float*>(in.const_data_ptr()),  t,    k, bfloat16, pairs,
                     static_cast<uint32_t*>(room.mutable_data_ptr()), steps};
    torch::stable::parallel_for(0, steps, 1, [&](int64_t first, int64_t last) { kernels().arrange(c, first, last); });
    for (const Tensor& sum : sums) add_panel(c, sum);
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
    if (vectors && ptq::cpu_level() >= ptq::CpuLevel::avx2) m.impl("add_gram_", TORCH_BOX(&ptq::gram::add_gram));
}
