// Fragments as plain numbers W[n, k], for products of many tokens in torch's own matrix multiplication. No torch here.
#pragma once

#include "fragments_cuda/weights.cuh"

namespace ptq::fragments {

struct Dequantize {
    Weights w;
    void* out;  // [n, k]
    bool aligned;
};
constexpr int dequantize_warps = 8;

PTQ_DEVICE int group_of(const Weights& w, int half) {
    const int group = half / w.halves;
    return group < w.groups ? group : w.groups - 1;
}

// A warp makes one block of 16 x 64; number = scale * the code's value, rounded to T once.
template <class T, class Code>
PTQ_KERNEL(32 * dequantize_warps, 2)
void dequantize_kernel(const Dequantize p) {
    follow_previous();
    const int blocks = (p.w.k + block_columns - 1) / block_columns, tile = block_x();
    const int block = block_y() * dequantize_warps + warp();
    if (block >= blocks) return;
    uint32_t stored[Code::bits] = {}, words[Code::words];
    load_block<Code::bits, true>(p.w.fragments +
                                     (static_cast<int64_t>(tile) * blocks + block) * block_bytes(Code::bits) +
                                     lane_part<Code::bits>(),
                                 stored);
    PTQ_UNROLL
    for (int i = 0; i < Code::bits; i++) words[i] = stored[i];
    Code::complete(words);
    PTQ_UNROLL
    for (int h = 0; h < 2; h++) {
        const int column = block_columns * block + half_columns * h + 8 * (lane() % 4);
        const int64_t group = static_cast<int64_t>(tile) * p.w.groups + group_of(p.w, 2 * block + h);
        PTQ_UNROLL
        for (int second = 0; second < 2; second++) {
            const int in_tile = lane() / 4 + 8 * second, row = tile_rows * tile + in_tile;
            if (row >= p.w.n) continue;
            const float scale = widen(Bfloat16{p.w.scale[16 * group + in_tile]}) * Code::template factor<Bfloat16>;
            typename Code::template Offset<Bfloat16> offset;
            offset.set(p.w.zero ? p.w.zero[16 * group + in_tile] : Code::zero);
            alignas(16) T numbers[8];
            PTQ_UNROLL
            for (int i = 0; i < 8; i += 2) {
                const uint32_t pair =
                    Code::template numbers<Bfloat16>(words, 2 * h + i / 4, second + i % 4 / 2 * 2, offset);
                numbers[i] = convert<T>(scale * float_of(pair << 16));
                numbers[i + 1] = convert<T>(scale * float_of(pair & 0xffff0000u));
            }
            T* out = static_cast<T*>(p.out) + static_cast<int64_t>(row) * p.w.k + column;
            if (p.aligned && column + 8 <= p.w.k) {
                constexpr int each = 16 / sizeof(T);
                PTQ_UNROLL
                for (int i = 0; i < 8; i += each) store<Words4>(out + i, load<Words4>(numbers + i));
            } else {
                for (int i = 0; i < 8; i++)
                    if (column + i < p.w.k) out[i] = numbers[i];
            }
        }
    }
}

}  // namespace ptq::fragments
