// Many tokens: scratch memory and threads.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/cpu_level.h"
#include "e8p_tiled/gemm_kernels.h"
#include "e8p_tiled/layout.h"
#include "gemm/panels_kernels.h"
#include "gemm/sizes.h"

namespace ptq::e8p_tiled {

extern const gemm::PanelUnpack panels_amx;

namespace {

const GemmKernels& gemm_kernels() {
    return at_level<gemm_portable, gemm_avx2, gemm_avx512, gemm_avx512vnni, gemm_avx512bf16>();
}

const gemm::PanelUnpack& panel_unpack() {
    static constexpr gemm::PanelUnpack none;
    return at_level<none, none, none, none, none, panels_amx>();
}

void multiply_panels(const Gemm& g, gemm::Unpack unpack) {
    const int64_t columns = blocks_in(g.w.k) * block_columns;
    const gemm::Panels panels{.weight = &g.w,
                              .unpack = unpack,
                              .scale = nullptr,
                              .n = g.w.n,
                              .columns = columns,
                              .groups = 1,
                              .group_columns = columns,
                              .codes = g.w.tiles,
                              .tile_bytes = tile_bytes(g.w.k, g.w.bits),
                              .step_bytes = block_bytes(g.w.bits),
                              .factor = g.w.scale};
    gemm::multiply_panels({.w = panels,
                           .mode = g.kind == Kind::bytes ? gemm::Mode::quads : gemm::Mode::pairs,
                           .x = nullptr,
                           .x_type = Number::float32,
                           .t = g.t,
                           .k = columns,
                           .token_scale = g.q_scale,
                           .bias = g.bias,
                           .out = g.out,
                           .out_type = g.out_type,
                           .rows = reinterpret_cast<const uint32_t*>(g.rows),
                           .row_steps = g.row_steps});
}

}  // namespace

void many_tokens(Gemm g) {
    if (g.t == 0 || g.w.n == 0) return;
    if (const auto [bytes, pairs] = panel_unpack(); bytes && g.kind != Kind::floats)
        return multiply_panels(g, g.kind == Kind::bytes ? bytes : pairs);
    const int64_t steps = blocks_in(g.w.k) * block_columns / static_cast<int>(g.kind);
    const int64_t tokens = gemm::tokens_of_a_block(static_cast<int64_t>(g.kind)), blocks = (g.t + tokens - 1) / tokens;
    const int64_t strips = (row_tiles(g.w.n) + gemm::row_tiles_of_a_strip - 1) / gemm::row_tiles_of_a_strip;
    const torch::stable::Tensor x = torch::stable::empty({blocks * tokens, steps}, torch::headeronly::ScalarType::Int);
    g.x = static_cast<int32_t*>(x.mutable_data_ptr());
    g.tokens = gemm::tokens_of_a_unit(g.t, strips, torch::stable::get_num_threads());
    const auto run = [&](void (*kernel)(const Gemm&, int64_t, int64_t), int64_t units) {
        torch::stable::parallel_for(0, units, 1, [&](int64_t first, int64_t last) { kernel(g, first, last); });
    };
    run(gemm_kernels().pack, blocks);
    run(gemm_kernels().multiply, strips * ((g.t + g.tokens - 1) / g.tokens));
}

}  // namespace ptq::e8p_tiled
