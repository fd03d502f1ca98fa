// Many tokens times a weight in panels: scratch memory and threads.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "common/cpu_level.h"
#include "gemm/panels_kernels.h"

namespace ptq::gemm {
namespace {

constexpr int64_t most_tokens = 512;  // of a unit: their sums stay in the second-level cache
constexpr int64_t least_tokens = 64;  // below, unpacking would cost too large a share

const PanelKernels& kernels() {
#if defined(__x86_64__)
    if (cpu_level() >= CpuLevel::avx512bf16) return panels_avx512bf16;
    if (cpu_level() >= CpuLevel::avx512vnni) return panels_avx512vnni;
    if (cpu_level() >= CpuLevel::avx512) return panels_avx512;
    if (cpu_level() >= CpuLevel::avx2) return panels_avx2;
#endif
    return panels_portable;
}

// As many as possible, as long as every thread gets several units.
int64_t tokens_of_a_unit(int64_t t, int64_t strips) {
    const int64_t threads = torch::stable::get_num_threads();
    int64_t tokens = most_tokens;
    while (tokens > least_tokens && strips * ((t + tokens - 1) / tokens) < 8 * threads) tokens /= 2;
    return tokens;
}

}  // namespace

void multiply_panels(Product p) {
    if (p.t == 0 || p.w.n == 0) return;
    const int64_t block_tokens = tokens_of(p.mode), blocks = (p.t + block_tokens - 1) / block_tokens;
    const int64_t strips = (p.w.n + panel_tiles * tile_rows - 1) / (panel_tiles * tile_rows);
    const auto dwords = [](int64_t rows, int64_t columns) {
        return torch::stable::empty({rows, columns}, torch::headeronly::ScalarType::Int);
    };
    const auto packed = dwords(blocks * block_tokens, p.w.columns / columns_of(p.mode));
    const auto offset = dwords(p.mode == Mode::quads ? blocks * block_tokens : 0, p.w.groups);
    p.packed = static_cast<uint32_t*>(packed.mutable_data_ptr());
    p.offset = static_cast<int32_t*>(offset.mutable_data_ptr());
    p.tokens = tokens_of_a_unit(p.t, strips);
    const auto run = [&](void (*kernel)(const Product&, int64_t, int64_t), int64_t units) {
        torch::stable::parallel_for(0, units, 1, [&](int64_t first, int64_t last) { kernel(p, first, last); });
    };
    run(kernels().pack, blocks);
    run(kernels().multiply, strips * ((p.t + p.tokens - 1) / p.tokens));
}

}  // namespace ptq::gemm
