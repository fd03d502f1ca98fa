// Many tokens: scratch memory and threads.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/cpu_level.h"
#include "e8p_tiled/gemm_kernels.h"
#include "e8p_tiled/layout.h"

namespace ptq::e8p_tiled {
namespace {

const GemmKernels& gemm_kernels() {
#if defined(__x86_64__)
    if (cpu_level() >= CpuLevel::avx512vnni) return gemm_avx512vnni;
    if (cpu_level() >= CpuLevel::avx512) return gemm_avx512;
    if (cpu_level() >= CpuLevel::avx2) return gemm_avx2;
#endif
    return gemm_portable;
}

}  // namespace

void many_quantized(const Quantized& p) {
    if (p.t == 0 || p.w.n == 0) return;
    const int64_t blocks = gemm::token_blocks(p.t);
    const int64_t strips = (row_tiles(p.w.n) + gemm::row_tiles_of_a_strip - 1) / gemm::row_tiles_of_a_strip;
    const torch::stable::Tensor x =
        torch::stable::empty({blocks, blocks_in(p.w.k) * block_columns}, torch::headeronly::ScalarType::Int);
    const Gemm g{p, static_cast<int32_t*>(x.mutable_data_ptr()),
                 gemm::tokens_of_a_unit(p.t, strips, torch::stable::get_num_threads())};
    const auto run = [&](void (*kernel)(const Gemm&, int64_t, int64_t), int64_t units) {
        torch::stable::parallel_for(0, units, 1, [&](int64_t first, int64_t last) { kernel(g, first, last); });
    };
    run(gemm_kernels().pack, blocks);
    run(gemm_kernels().multiply, strips * ((p.t + g.tokens - 1) / g.tokens));
}

}  // namespace ptq::e8p_tiled
