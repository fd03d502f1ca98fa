// Many tokens: scratch memory and threads.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/cpu_level.h"
#include "common/parallel.h"
#include "gemm/sizes.h"
#include "integer_tiled/gemm_kernels.h"
#include "integer_tiled/layout.h"

namespace ptq::integer_tiled {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::empty;
using torch::stable::Tensor;

const GemmKernels& gemm_kernels() {
    return at_level<gemm_portable, gemm_avx2, gemm_avx512, gemm_avx512vnni>();
}

}  // namespace

void many_tokens(const Quantized& p, const gemm::Tokens& from) {
    if (p.t == 0 || p.w.n == 0) return;
    const int64_t blocks = (p.t + gemm_tokens - 1) / gemm_tokens, columns = blocks_in(p.w.k) * block_columns;
    const int64_t strips = (row_tiles(p.w.n) + gemm_tiles - 1) / gemm_tiles;
    const Tensor x = empty({blocks, columns}, ScalarType::Int);
    const Tensor offset = empty({blocks, p.w.groups, gemm_tokens}, ScalarType::Int);
    const Gemm g{p, from, static_cast<int32_t*>(x.mutable_data_ptr()), static_cast<int32_t*>(offset.mutable_data_ptr()),
                 gemm::tokens_of_a_unit(p.t, strips, torch::stable::get_num_threads())};
    const GemmKernels& level = gemm_kernels();
    torch::stable::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) { level.pack(g, first, last); });
    share(strips * ((p.t + g.tokens - 1) / g.tokens), [&](Units& units) { level.multiply(g, units); });
}

}  // namespace ptq::integer_tiled
