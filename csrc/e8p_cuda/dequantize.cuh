// Fragments as plain numbers W[n, k], or as the integer points of one book, for products of many tokens in torch's own
// matrix multiplication. No torch here.
#pragma once

#include "e8p_cuda/decode.cuh"

namespace ptq::e8p_cuda {

struct Dequantize {
    Weights w;
    void* out;  // [n, k]
    int bits, book;
    bool aligned;  // rows of `out` are multiples of 16 bytes (8 of int8)
};
constexpr int dequantize_threads = 256, codes_of_block = tile_rows * block_columns / code_columns;

// The byte of plane `plane` of code `code` of a block: codes are numbered lane by lane, 8 for each.
PTQ_DEVICE uint8_t code_byte(const uint8_t* block, int bits, int plane, int code) {
    const int at = code / 8, byte = code % 8;
    if (plane < 2) return block[16 * at + 8 * plane + byte];
    return block[512 + 8 * (bits - 2) * at + 8 * (plane - 2) + byte];
}
PTQ_DEVICE uint32_t nibbles_of(const uint8_t* block, int bits, int book, int code) {
    if (is_residual(bits, book)) return point_words.residual[code_byte(block, bits, 2, code)];
    return point_words.e8p[code_byte(block, bits, 2 * book, code)] ^
           point_words.signs[code_byte(block, bits, 2 * book + 1, code)];
}

// A thread makes the eight numbers of one code: scale[0] P0 + scale[1] P1, each operation rounded, then rounded to Out;
// or, with Out int8_t, the points of `book`.
template <class Out>
PTQ_KERNEL(dequantize_threads, 2)
void dequantize_kernel(const Dequantize p) {
    const int blocks = (p.w.k + block_columns - 1) / block_columns;
    const int block = block_x() * (dequantize_threads / codes_of_block) + thread() / codes_of_block;
    const int code = thread() % codes_of_block, at = code / 8, byte = code % 8;
    const int row = tile_rows * block_y() + at / 4 + 8 * (byte % 2);
    const int column = block_columns * block + 32 * (byte / 2) + 8 * (at % 4);
    if (block >= blocks || row >= p.w.n || column >= p.w.k) return;
    const uint8_t* from = p.w.fragments + (static_cast<int64_t>(block_y()) * blocks + block) * block_bytes(p.bits);
    alignas(16) Out numbers[8];
    const int books = books_of(p.bits), first = sizeof(Out) == 1 ? p.book : 0;
    const uint32_t word = nibbles_of(from, p.bits, first, code);
    const uint32_t other = sizeof(Out) > 1 && books == 2 ? nibbles_of(from, p.bits, 1, code) : 0;
    PTQ_UNROLL
    for (int j = 0; j < 8; j++) {
        const int bit = 8 * (j % 4) + 4 * (j / 4);
        const auto point = [&](uint32_t w, int book) {
            return times_of(p.bits, book) * static_cast<int>(w >> bit & 15) - minus_of(p.bits, book);
        };
        if constexpr (sizeof(Out) == 1) {
            numbers[j] = static_cast<Out>(point(word, first));
        } else {
            float w = multiply(p.w.scale[0], static_cast<float>(point(word, 0)));
            if (books == 2) w = add(w, multiply(p.w.scale[1], static_cast<float>(point(other, 1))));
            numbers[j] = convert<Out>(w);
        }
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
