// Fragments as plain numbers W[n, k], or as integer points, for products of many tokens in torch's own matrix
// multiplication. No torch here.
#pragma once

#include "e8p_cuda/decode.cuh"

namespace ptq::e8p_cuda {

struct Dequantize {
    Weights w;
    void* out;     // [n, k]
    bool aligned;  // rows of `out` are multiples of 16 bytes (8 of int8)
};
constexpr int dequantize_threads = 256, codes_of_block = tile_rows * block_columns / code_columns;

// The byte of plane `plane` of code `code` of a block: codes are numbered lane by lane, 8 for each.
PTQ_DEVICE uint8_t code_byte(const uint8_t* block, int bits, int plane, int code) {
    const int at = code / 8, byte = code % 8;
    if (plane < 2) return block[16 * at + 8 * plane + byte];
    return block[512 + 8 * (bits - 2) * at + 8 * (plane - 2) + byte];
}
template <int bits, int stage>
PTQ_DEVICE uint32_t nibbles_of(const uint8_t* block, int code) {
    if constexpr (Worth<bits, stage>::residual) return point_words.residual[code_byte(block, bits, 2, code)];
    return point_words.e8p[code_byte(block, bits, 2 * stage, code)] ^
           point_words.signs[code_byte(block, bits, 2 * stage + 1, code)];
}
// Of the nibble in some bits of the words of both stages.
template <int bits>
PTQ_DEVICE int point_of(uint32_t word, uint32_t second, int bit) {
    int point = Worth<bits, 0>::times * static_cast<int>(word >> bit & 15) - Worth<bits, 0>::minus;
    if constexpr (bits > 2)
        point += Worth<bits, 1>::times * static_cast<int>(second >> bit & 15) - Worth<bits, 1>::minus;
    return point;
}

// A thread makes the eight numbers of one code: scale * P, rounded to Out; or, with Out int8_t, P.
template <class Out, int bits>
PTQ_KERNEL(dequantize_threads, 2)
void dequantize_kernel(const Dequantize p) {
    follow_previous();
    const int blocks = (p.w.k + block_columns - 1) / block_columns;
    const int block = block_y() * (dequantize_threads / codes_of_block) + thread() / codes_of_block;
    const int code = thread() % codes_of_block, at = code / 8, byte = code % 8;
    const int row = tile_rows * block_x() + at / 4 + 8 * (byte % 2);
    const int column = block_columns * block + 32 * (byte / 2) + 8 * (at % 4);
    if (block >= blocks || row >= p.w.n || column >= p.w.k) return;
    const uint8_t* from = p.w.fragments + (static_cast<int64_t>(block_x()) * blocks + block) * block_bytes(bits);
    alignas(16) Out numbers[8];
    const uint32_t word = nibbles_of<bits, 0>(from, code);
    uint32_t second = 0;
    if constexpr (bits > 2) second = nibbles_of<bits, 1>(from, code);
    PTQ_UNROLL
    for (int j = 0; j < 8; j++) {
        const int point = point_of<bits>(word, second, 8 * (j % 4) + 4 * (j / 4));
        if constexpr (sizeof(Out) == 1)
            numbers[j] = static_cast<Out>(point);
        else
            numbers[j] = convert<Out>(multiply(*p.w.scale, static_cast<float>(point)));
    }
    Out* out = static_cast<Out*>(p.out) + static_cast<int64_t>(row) * p.w.k + column;
    if (p.aligned && column + 8 <= p.w.k) {
        if constexpr (sizeof(Out) == 1) {
            store(out, load<Words2>(numbers));
        } else {
            constexpr int each = 16 / sizeof(Out);
            PTQ_UNROLL
            for (int j = 0; j < 8; j += each) store(out + j, load<Words4>(numbers + j));
        }
    } else {
        for (int j = 0; j < 8; j++)
            if (column + j < p.w.k) out[j] = numbers[j];
    }
}

}  // namespace ptq::e8p_cuda
