// Fragments as plain numbers W[n, k], for products of many tokens in torch's own matrix multiplication. No torch here.
#pragma once

#include "integer_cuda/fragments.cuh"

namespace ptq::integer_cuda {

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

// A warp makes one block of 16 x 64; number = scale * (code - zero), rounded to T once.
template <class T, int bits>
PTQ_KERNEL(32 * dequantize_warps, 2)
void dequantize_kernel(const Dequantize p) {
    const int blocks = (p.w.k + block_columns - 1) / block_columns, tile = block_y();
    const int block = block_x() * dequantize_warps + warp();
    if (block >= blocks) return;
    uint32_t words[bits];
    load_block<bits>(p.w.fragments + (static_cast<int64_t>(tile) * blocks + block) * block_bytes(bits), words);
    PTQ_UNROLL
    for (int h = 0; h < 2; h++) {
        const int column = block_columns * block + half_columns * h + 8 * (lane() % 4);
        const int64_t group = static_cast<int64_t>(tile) * p.w.groups + group_of(p.w, 2 * block + h);
        PTQ_UNROLL
        for (int second = 0; second < 2; second++) {
            const int in_tile = lane() / 4 + 8 * second, row = tile_rows * tile + in_tile;
            if (row >= p.w.n) continue;
            const float scale = widen(Bfloat16{p.w.scale[16 * group + in_tile]});
            const int zero = p.w.zero ? p.w.zero[16 * group + in_tile] : 1 << (bits - 1);
            alignas(16) T numbers[8];
            PTQ_UNROLL
            for (int i = 0; i < 8; i++) {
                const uint32_t pair = code_pair(words, 2 * h + i / 4, second + i % 4 / 2 * 2);
                const int code = static_cast<int>(pair >> (16 * (i % 2)) & 0xffff);
                numbers[i] = convert<T>(scale * static_cast<float>(code - zero));
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

}  // namespace ptq::integer_cuda
