// Many tokens times a weight in panels: scratch memory and threads.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/cpu_level.h"
#include "common/parallel.h"
#include "gemm/panels_kernels.h"

namespace ptq::gemm {
namespace {

const PanelKernels& kernels([[maybe_unused]] const Product& p) {
#if defined(__aarch64__)
    return at_arm_level<panels_portable, panels_dotprod>();
#else
#if defined(__x86_64__)
    if (cpu_level() == CpuLevel::amx && p.mode != Mode::floats && !p.pack && !p.by_vectors) return panels_amx;
    if (has_slow_pairs()) return panels_avx512vnni;
#endif
    return at_level<panels_portable, panels_avx2, panels_avxvnni, panels_avx512, panels_avx512vnni,
                    panels_avx512bf16>();
#endif
}

constexpr int64_t most_tokens = 512;  // of a unit: their sums stay in the second-level cache

// Tokens of a unit of work, which takes a strip: as many as possible, as long as every thread gets several units. Below
// 64, unpacking would cost too large a share. They are whole blocks.
int64_t tokens_of_a_unit(int64_t tokens, int64_t most, int64_t strips, int64_t threads, int64_t block) {
    int64_t unit = most;
    while (unit > 64 && strips * ((tokens + unit - 1) / unit) < 8 * threads) unit /= 2;
    return (unit + block - 1) / block * block;
}

}  // namespace

void multiply_panels(Product p) {
    if (p.t == 0 || p.w.n == 0) return;
    const PanelKernels& level = kernels(p);
    const PanelKernels::Shape shape = are_integers(p.mode) ? level.integers : level.numbers;
    p.block_tokens = shape.tokens, p.strip_tiles = p.is_direct() ? direct_tiles : shape.tiles;
    const int64_t blocks = p.blocks(), strips = p.strips();
    const auto dwords = [](int64_t rows, int64_t columns) {
        return torch::stable::empty({rows, columns}, torch::headeronly::ScalarType::Int);
    };
    const auto packed = dwords(blocks * p.block_tokens, p.w.columns / columns_of(p.mode));
    const auto offset = dwords(are_integers(p.mode) ? blocks * p.block_tokens : 0, p.w.groups);
    p.packed = static_cast<uint32_t*>(packed.mutable_data_ptr());
    p.offset = static_cast<int32_t*>(offset.mutable_data_ptr());
    const int64_t most = p.diagonal < 0 ? most_tokens : most_tokens / 2;  // less is right of the diagonal
    p.tokens = tokens_of_a_unit(p.t, most, strips, torch::stable::get_num_threads(), p.block_tokens);
    const Pack pack = p.pack ? p.pack : level.pack;
    torch::stable::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) { pack(p, first, last); });
    share(strips * ((p.t + p.tokens - 1) / p.tokens), [&](Units& units) { level.multiply(p, units); });
}

}  // namespace ptq::gemm
