// Many tokens: scratch memory and threads.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/cpu_level.h"
#include "common/parallel.h"
#include "gemm/panels_kernels.h"
#include "gemm/sizes.h"
#include "integer_tiled/gemm_kernels.h"
#include "integer_tiled/held.h"

namespace ptq::integer_tiled {

extern const gemm::Unpack signed_bytes_amx;

namespace {

using torch::stable::empty;

const GemmKernels& gemm_kernels() {
    return at_level<gemm_portable, gemm_avx2, gemm_avx512, gemm_avx512vnni>();
}

gemm::Unpack signed_bytes() {
    static constexpr gemm::Unpack none = nullptr;
    return at_level<none, none, none, none, none, signed_bytes_amx>();
}

gemm::Panels panels_of(const Weight& w, gemm::Unpack unpack) {
    const int64_t step = block_bytes(w.bits), columns = blocks_in(w.k) * block_columns;
    return {.weight = &w,
            .unpack = unpack,
            .scale = w.scale,
            .n = w.n,
            .columns = columns,
            .groups = w.groups,
            .group_columns = w.group_blocks * block_columns,
            .codes = w.tiles,
            .tile_bytes = tile_bytes(w.k, w.bits),
            .step_bytes = step,
            .byte_offset = 1 << (w.bits - 1),
            .zero = w.zero};
}

}  // namespace

void many_floats(const Floats& p) {
    const Kernels& level = kernels();
    const bool pairs = level.unpack_pairs && p.x_type == Number::bfloat16;
    gemm::multiply_panels({panels_of(p.w, pairs ? level.unpack_pairs : level.unpack_floats),
                           pairs ? gemm::Mode::pairs : gemm::Mode::floats, p.x, p.x_type, p.t, p.w.k, nullptr, p.bias,
                           p.out, p.out_type});
}

void many_tokens(const Quantized& p, const gemm::Tokens& from) {
    if (p.t == 0 || p.w.n == 0) return;
    if (const gemm::Unpack bytes = signed_bytes())
        return gemm::multiply_panels({panels_of(p.w, bytes), gemm::Mode::quads, nullptr, Number::float32, p.t, p.w.k,
                                      p.q_scale, p.bias, p.out, p.out_type, from});
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
