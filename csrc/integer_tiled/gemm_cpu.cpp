// Many tokens: scratch memory and threads.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "common/cpu_level.h"
#include "integer_tiled/gemm_kernels.h"
#include "integer_tiled/layout.h"

namespace ptq::integer_tiled {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::empty;
using torch::stable::Tensor;

constexpr int64_t most_tokens = 512;  // of a unit: their sums stay in the second-level cache
constexpr int64_t least_tokens = 64;  // below, unpacking would cost too large a share

const GemmKernels& gemm_kernels() {
#if defined(__x86_64__)
    if (cpu_level() >= CpuLevel::avx512vnni) return gemm_avx512vnni;
    if (cpu_level() >= CpuLevel::avx512) return gemm_avx512;
    if (cpu_level() >= CpuLevel::avx2) return gemm_avx2;
#endif
    return gemm_portable;
}

// As many as possible, as long as every thread gets several units.
int64_t tokens_of_a_unit(int64_t t, int64_t strips) {
    const int64_t threads = torch::stable::get_num_threads();
    int64_t tokens = most_tokens;
    while (tokens > least_tokens && strips * ((t + tokens - 1) / tokens) < 8 * threads) tokens /= 2;
    return tokens;
}

}  // namespace

void many_tokens(const Quantized& p) {
    if (p.t == 0 || p.w.n == 0) return;
    const int64_t blocks = (p.t + gemm_tokens - 1) / gemm_tokens, columns = blocks_in(p.w.k) * block_columns;
    const int64_t strips = (row_tiles(p.w.n) + gemm_tiles - 1) / gemm_tiles;
    const Tensor x = empty({blocks, columns}, ScalarType::Int);
    const Tensor offset = empty({blocks, p.w.groups, gemm_tokens}, ScalarType::Int);
    const Gemm g{p, static_cast<int32_t*>(x.mutable_data_ptr()), static_cast<int32_t*>(offset.mutable_data_ptr()),
                 tokens_of_a_unit(p.t, strips)};
    const auto run = [&](void (*kernel)(const Gemm&, int64_t, int64_t), int64_t units) {
        torch::stable::parallel_for(0, units, 1, [&](int64_t first, int64_t last) { kernel(g, first, last); });
    };
    run(gemm_kernels().pack, blocks);
    run(gemm_kernels().multiply, strips * ((p.t + g.tokens - 1) / g.tokens));
}

}  // namespace ptq::integer_tiled
