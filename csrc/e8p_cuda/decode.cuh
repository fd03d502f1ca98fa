// Codes of E8P weights as operands of the tensor cores. quip_sharp/fragment_ops.py defines the layout: a block is 16
// rows x 128 columns, lane l of a warp owns 2 `bits` words of it, two for each byte of a code, with g = l / 4, t = l %
// 4: word h, byte 2 v + r is the code of row g + 8 r, columns 64 h + 32 v + 8 t + 0 .. 7. No torch here.
//
// A code's byte looks up a word of eight nibbles (points.h) in shared memory. Lanes of a warp ask for different words:
// so there are up to 32 copies of each table, lane after lane, and every lane has a bank of its own. The nibbles are
// multiplied as they are, the lower and the upper ones of a word (16 n) in sums of their own, and what turns nibbles
// into points, 2 n - 15, is done once, to the sums.
#pragma once

#include <type_traits>

#include "cuda/numbers.cuh"
#include "cuda/stream.cuh"
#include "e8p_cuda/points.h"

namespace ptq::e8p_cuda {

using namespace ptq::cuda;

PTQ_CONSTANT PointWords point_words = make_point_words();

constexpr int block_columns = 128, code_columns = 8;
PTQ_BOTH constexpr int block_bytes(int bits) {
    return 256 * bits;
}
PTQ_BOTH constexpr int books_of(int bits) {
    return bits == 2 ? 1 : 2;
}
PTQ_BOTH constexpr bool is_residual(int bits, int book) {
    return bits == 3 && book == 1;
}
// A point is times * n - minus.
PTQ_BOTH constexpr int times_of(int bits, int book) {
    return is_residual(bits, book) ? 1 : 2;
}
PTQ_BOTH constexpr int minus_of(int bits, int book) {
    return is_residual(bits, book) ? 4 : 15;
}

struct Weights {
    const uint8_t* fragments;  // [row tiles, blocks, 256 bits]
    const float* scale;        // [books]
    int n, k;
};

// --- tables in shared memory -----------------------------------------------------------------------------------------

// Entries, signs, and with 3 bits residual entries: [tables, 256, copies] words, at the beginning of shared memory.
PTQ_BOTH constexpr int tables_bytes(int bits, int log_copies) {
    return (bits == 3 ? 3 : 2) * 1024 << log_copies;
}

// In the order in which X is multiplied: int8_t that of points.h; Half nibbles 1, 5, 3, 7, 0, 4, 2, 6 from coordinate 0
// on, so that a mask gives two neighbours in the two halves of a register; Bfloat16 one bit lower, where its fraction
// is.
template <class X>
PTQ_DEVICE uint32_t arranged(uint32_t word) {
    if constexpr (sizeof(X) == 1) return word;
    word = (word & 0x0f0f0f0fu) << 4 | (word >> 4 & 0x0f0f0f0fu);
    word = byte_permute(word, 0, 0x3120);
    return std::is_same_v<X, Bfloat16> ? rotate_left(word, 31) : word;
}
template <class X, int bits, int threads>
PTQ_DEVICE void fill_tables(int log_copies) {
    constexpr int count = bits == 3 ? 3 : 2;
    const int copies = 1 << log_copies, quads = copies < 4 ? 1 : copies / 4;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&point_words);  // the tables follow each other
    for (int i = thread(); i < count * 256 * quads; i += threads) {
        const uint32_t word = arranged<X>(words[i / quads]);
        if (copies < 4) {
            for (int j = 0; j < copies; j++) store<uint32_t>(shared() + 4 * (copies * i + j), word);
        } else {
            store<Words4>(shared() + 16 * i, {word, word, word, word});
        }
    }
}

// This lane's copies of the tables. All is kept in registers: the compiler would rather compute it again.
template <int bits>
struct Tables {
    int turn[4];  // how far an index in a byte must be turned left
    uint32_t mask, at[bits == 3 ? 3 : 2];

    PTQ_DEVICE explicit Tables(int log_copies) {
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            turn[i] = log_copies + 2 + 32 - 8 * i;
            keep(turn[i]);
        }
        mask = 1020u << log_copies;
        keep(mask);
        PTQ_UNROLL
        for (int i = 0; i < (bits == 3 ? 3 : 2); i++) {
            at[i] = (lane() & ((1 << log_copies) - 1)) * 4 | i * 1024u << log_copies;
            keep(at[i]);
        }
    }
    PTQ_DEVICE uint32_t look_up(int table, uint32_t word, int byte) const {
        return load<uint32_t>(shared() + and_or(rotate_left(word, turn[byte]), mask, at[table]));
    }
    // Of code `byte` of half h, of a book: two words whose xor are its nibbles. `words` are the lane's of a block.
    struct Nibbles {
        uint32_t word, flips;
    };
    PTQ_DEVICE Nibbles nibbles(const uint32_t (&words)[2 * bits], int book, int h, int byte) const {
        if constexpr (bits == 3)
            if (book == 1) return {look_up(2, words[4 + h], byte), 0};
        return {look_up(0, words[4 * book + h], byte), look_up(1, words[4 * book + 2 + h], byte)};
    }
};

// --- operands --------------------------------------------------------------------------------------------------------

// What makes times * n - minus, over `times`, of a nibble in the fraction of 64 (float16) or 16 (bfloat16): exact.
template <class T>
PTQ_DEVICE uint32_t offset_of(int bits, int book) {
    const float base = std::is_same_v<T, Half> ? 64 : 16, number = -(base + (is_residual(bits, book) ? 4.0f : 7.5f));
    return pack<T>(number, number);
}
// Coordinates 2 q and 2 q + 1 of an arranged word.
template <class T>
PTQ_DEVICE uint32_t number_pair(uint32_t word, int q, uint32_t offset) {
    const uint32_t turned = q == 0 ? word : q == 1 ? word >> 8 : rotate_left(word, q == 2 ? 4 : 28);
    if constexpr (std::is_same_v<T, Half>)
        return fma2<T>(and_or(turned, 0x00f000f0u, 0x54005400u), 0x3c003c00u, offset);
    else
        return fma2<T>(and_or(turned, 0x00780078u, 0x41804180u), 0x3f803f80u, offset);
}

}  // namespace ptq::e8p_cuda
