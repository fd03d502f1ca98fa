// The product of quantized.cuh for more than a few tokens, on compute capability 9.0: the same numbers, but for the
// order in which groups are added. Codes minus their zeros must be signed bytes, so eight bits with zeros of their own
// are left to quantized.cuh. No torch here.
#pragma once

#include "fragments_cuda/quantized.cuh"
#include "fragments_cuda/wgmma.cuh"

namespace ptq::fragments {

// Four bytes of a Code minus the zero, which is the same in all of `zeros`. Bytes that use all eight bits: minus 128.
// Others have, beside their zero, one highest bit; it is kept out of the way, so that no byte borrows from the next.
template <class Code>
PTQ_DEVICE uint32_t signed_bytes(uint32_t bytes, uint32_t zeros) {
    constexpr uint32_t high = 0x80808080u;
    if constexpr (Code::whole_bytes) return bytes ^ high;
    return ((bytes | high) - (zeros & ~high)) ^ high;
}

template <class S>
struct WgmmaQuantized : WgmmaSums<S, int32_t, WgmmaQuantized<S>> {
    using Base = WgmmaSums<S, int32_t, WgmmaQuantized<S>>;
    uint32_t zeros[S::tiles][2];  // four times the same byte

    PTQ_DEVICE explicit WgmmaQuantized(const Scales<S>& first) : Base(first) {}
    static PTQ_DEVICE float combine(float total, float scale, int32_t sum) {
        return add(total, cuda::multiply(scale, static_cast<float>(sum)));
    }
    PTQ_DEVICE void next_group() {
        Base::take_scales([this](int r, int second) {
            zeros[r][second] = static_cast<uint32_t>(Base::scales.zero[r][second]) * 0x01010101u;
        });
    }
    template <int second>
    PTQ_DEVICE void decode(const uint32_t (&words)[S::Code::words], int r) {
        PTQ_UNROLL
        for (int h = 0; h < 2; h++) PTQ_UNROLL
        for (int j = 0; j < 4; j++) {
            Base::a[second][r][h][j] =
                signed_bytes<typename S::Code>(S::Code::bytes(words, 2 * h + j / 2, j % 2), zeros[r][j % 2]);
            keep(Base::a[second][r][h][j]);
        }
    }
    static PTQ_DEVICE void product(int32_t (&sum)[16][4], const uint32_t (&a)[4], uint64_t tokens, bool adds) {
        wgmma_s8(sum, a, tokens, adds);
    }
};

// p.q are arranged tokens.
template <class S>
PTQ_DEVICE void wgmma_quantized(const Quantized& p) {
    const Stages<S> stages;
    stages.prepare();
    BlockWork work = work_of<S>(p.tokens);
    const Range range{0, stages_of<int8_t>(p.w.k)};
    int tile = work.rows * S::across * S::tiles;
    if (warp() >= S::across) {
        leave_registers();
        const int64_t token_tile = work.first_token / wgmma_tokens;
        const uint8_t* tokens = reinterpret_cast<const uint8_t*>(p.q) + token_tile * range.last * wgmma_tile_bytes;
        if (warp() == S::across) feed(stages, p.w, tokens, range, tile);
        block_barrier();  // of `hand_out`
        return;
    }
    take_registers();
    tile += warp() * S::tiles;
    Weights w = p.w;
    if constexpr (S::Code::whole_bytes) w.zero = nullptr;
    WgmmaQuantized<S> product(Scales<S>(w, 0, tile));
    multiply(stages, p.w, range, product);
    int block = block_x();  // computed again: no register is left to keep it in
    keep(block);
    work = work_of<S>(p.tokens, block);
    tile = (work.rows * S::across + warp()) * S::tiles;
    hand_out<S>(product, [&](int r, int in_tile, float (&y)[tile_rows]) {
        const int token = work.first_token + in_tile, row = tile_rows * (tile + r);
        if (token >= p.tokens || row >= p.w.n) return;
        // As write_quantized: a function that both call makes nvcc's code of linear_kernel three times as long.
        const float factor = cuda::multiply(p.q_scale[token], 1.0f / (1 << S::Code::shift));
        PTQ_UNROLL
        for (int i = 0; i < tile_rows; i++) {
            y[i] = cuda::multiply(y[i], factor);
            if (p.bias_kind != Number::none)
                y[i] = add(y[i], number_at(p.bias, p.bias_kind, row + i < p.w.n ? row + i : p.w.n - 1));
        }
        store_rows(p.out, p.out_kind, p.w, token, row, y);
    });
}
template <class S>
PTQ_KERNEL(S::threads, 1)
void wgmma_quantized_kernel(const Quantized p) {
    follow_previous();
    if constexpr (has_wgmma) wgmma_quantized<S>(p);
}

}  // namespace ptq::fragments
