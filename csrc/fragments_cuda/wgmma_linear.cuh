// The product of linear.cuh for more than a few tokens, on compute capability 9.0. No torch here.
#pragma once

#include "fragments_cuda/linear.cuh"
#include "fragments_cuda/wgmma.cuh"

namespace ptq::fragments {

template <class S>
struct WgmmaLinear : WgmmaSums<S, float, WgmmaLinear<S>> {
    using Base = WgmmaSums<S, float, WgmmaLinear<S>>;
    using T = typename S::X;
    typename S::Code::template Offset<T> offset[S::tiles][2];

    PTQ_DEVICE explicit WgmmaLinear(const Scales<S>& first) : Base(first) {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) offset[r][second].set(S::Code::zero);
    }
    static PTQ_DEVICE float combine(float total, float scale, float sum) { return total + scale * sum; }
    PTQ_DEVICE void next_group() {
        Base::take_scales([this](int r, int second) {
            if (Base::scales.zero_from) offset[r][second].set(Base::scales.zero[r][second]);
        });
    }
    template <int second>
    PTQ_DEVICE void decode(const uint32_t (&words)[S::Code::words], int r) {
        PTQ_UNROLL
        for (int u = 0; u < 2; u++) PTQ_UNROLL
        for (int j = 0; j < 4; j++) {
            Base::a[second][r][u][j] = S::Code::template numbers<T>(words, 2 * second + u, j, offset[r][j % 2]);
            keep(Base::a[second][r][u][j]);
        }
    }
    static PTQ_DEVICE void product(float (&sum)[16][4], const uint32_t (&a)[4], uint64_t tokens, bool adds) {
        wgmma<T>(sum, a, tokens, adds);
    }
};

// p.x are arranged tokens.
template <class S>
PTQ_DEVICE void wgmma_linear(const Linear& p) {
    using T = typename S::X;
    const Stages<S> stages;
    stages.prepare();
    BlockWork work = work_of<S>(p.tokens);
    const Range range = range_of<S>(p.w.k, block_y(), p.splits);
    int tile = work.rows * S::across * S::tiles;
    if (warp() >= S::across) {
        leave_registers();
        const int64_t token_tile = work.first_token / wgmma_tokens;
        const uint8_t* tokens = static_cast<const uint8_t*>(p.x) + token_tile * stages_of<T>(p.w.k) * wgmma_tile_bytes;
        if (warp() == S::across) feed(stages, p.w, tokens, range, tile);
        block_barrier();  // of `hand_out`
        return;
    }
    take_registers();
    tile += warp() * S::tiles;
    WgmmaLinear<S> product(Scales<S>(p.w, S::columns / half_columns * range.first, tile));
    multiply(stages, p.w, range, product);
    int block = block_x();  // computed again: no register is left to keep it in
    keep(block);
    work = work_of<S>(p.tokens, block);
    tile = (work.rows * S::across + warp()) * S::tiles;
    hand_out<S>(product, [&](int r, int in_tile, float (&y)[tile_rows]) {
        const int token = work.first_token + in_tile, row = tile_rows * (tile + r);
        if (token >= p.tokens || row >= p.w.n) return;
        PTQ_UNROLL
        for (int i = 0; i < tile_rows; i++) y[i] *= S::Code::template factor<T>;
        if (p.splits > 1) {
            float* partial = p.partial + static_cast<int64_t>(block_y()) * p.tokens * p.w.n;
            return store_rows(partial, Number::float32, p.w, token, row, y);
        }
        const float factor = p.token_scale ? p.token_scale[token] : 1.0f;
        PTQ_UNROLL
        for (int i = 0; i < tile_rows; i++)
            y[i] = y[i] * factor + number_at(p.bias, p.bias_kind, row + i < p.w.n ? row + i : p.w.n - 1);
        store_rows(p.out, p.out_kind, p.w, token, row, y);
    });
}
template <class S>
PTQ_KERNEL(S::threads, 1)
void wgmma_linear_kernel(const Linear p) {
    follow_previous();
    if constexpr (has_wgmma) wgmma_linear<S>(p);
}

}  // namespace ptq::fragments
