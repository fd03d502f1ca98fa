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
#include "e8p/multipliers.h"
#include "e8p_cuda/points.h"

namespace ptq::e8p_cuda {

using namespace ptq::cuda;

PTQ_CONSTANT PointWords point_words = make_point_words();

constexpr int block_columns = 128, code_columns = 8;
PTQ_BOTH constexpr int block_bytes(int bits) {
    return 256 * bits;
}

// What a nibble of a stage is worth: P is the sum of times * n - minus over the stages.
template <int bits, int stage>
struct Worth {
    static constexpr bool residual = bits == 3 && stage == 1;
    static constexpr int times = e8p::multiplier(bits, stage) * (residual ? 1 : 2);
    static constexpr int minus = e8p::multiplier(bits, stage) * (residual ? 4 : 15);
};
template <int bits>
constexpr int stages_of = e8p::stages(bits);

struct Weights {
    const uint8_t* fragments;  // [row tiles, blocks, 256 bits]
    const float* scale;        // one
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
    // Of code `byte` of half h, of a stage: two words whose xor are its nibbles. `words` are the lane's of a block.
    struct Nibbles {
        uint32_t word, flips;
    };
    PTQ_DEVICE Nibbles nibbles(const uint32_t (&words)[2 * bits], int stage, int h, int byte) const {
        if constexpr (bits == 3)
            if (stage == 1) return {look_up(2, words[4 + h], byte), 0};
        return {look_up(0, words[4 * stage + h], byte), look_up(1, words[4 * stage + 2 + h], byte)};
    }
};

// --- operands --------------------------------------------------------------------------------------------------------

// Coordinates 2 q and 2 q + 1 of an arranged word, as the nibble n in the fraction of 64 (float16) or 16 (bfloat16).
template <class T>
constexpr int base_of = std::is_same_v<T, Half> ? 64 : 16;
template <class T>
PTQ_DEVICE uint32_t nibble_pair(uint32_t word, int q) {
    const uint32_t turned = q == 0 ? word : q == 1 ? word >> 8 : rotate_left(word, q == 2 ? 4 : 28);
    return std::is_same_v<T, Half> ? and_or(turned, 0x00f000f0u, 0x54005400u)
                                   : and_or(turned, 0x00780078u, 0x41804180u);
}
// Half of P, exactly: every result along the way is a number of the type.
template <class T, int bits>
struct HalfPoints {
    // With float16 the second stage brings what is to be taken off the first; with bfloat16 it would be rounded.
    static constexpr bool fused = bits > 2 && std::is_same_v<T, Half>;
    uint32_t times[2], minus[2];  // of the stages

    PTQ_DEVICE HalfPoints() {
        const auto set = [&]<int stage>(float more) {
            constexpr float factor = 0.5f * Worth<bits, stage>::times, off = 0.5f * Worth<bits, stage>::minus;
            const float whole = factor * base_of<T> + off;
            times[stage] = pack<T>(factor, factor);
            minus[stage] = pack<T>(-(whole + more), -(whole + more));
            return whole;
        };
        const float first = set.template operator()<0>(0);
        if constexpr (bits > 2) set.template operator()<1>(fused ? first : 0);
        if (!fused) minus[0] = pack<T>(-(base_of<T> + 7.5f), -(base_of<T> + 7.5f));  // before it is multiplied
    }
    PTQ_DEVICE uint32_t pair(uint32_t word, uint32_t second, int q) const {
        uint32_t x = nibble_pair<T>(word, q);
        if constexpr (!fused) x = fma2<T>(x, pack<T>(1.0f, 1.0f), minus[0]);
        if constexpr (bits == 2) return x;
        return fma2<T>(x, times[0], fma2<T>(nibble_pair<T>(second, q), times[1], minus[1]));
    }
};

}  // namespace ptq::e8p_cuda
