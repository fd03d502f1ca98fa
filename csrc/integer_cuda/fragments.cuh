// Codes of 2 to 8 bits in the order of the tensor cores' operand A, and numbers from them. ptq/fragments.py defines the
// layout: a block is 16 rows x 64 columns, lane l of a warp owns `bits` words of it, with g = l / 4, t = l % 4:
// rows g and g + 8, columns 32 h + 8 t + 4 u + 0 .. 3 (h, u in {0, 1}), which are step s = 2 h + u of four mma steps.
// A code's bits lie in planes of 4, 2 and 1 bits, the widest first. No torch here.
#pragma once

#include <type_traits>

#include "cuda/device.h"

namespace ptq::integer_cuda {

using namespace ptq::cuda;

constexpr int tile_rows = 16, block_columns = 64, half_columns = 32;
PTQ_BOTH constexpr int block_bytes(int bits) {
    return 128 * bits;
}
// Width of the plane that begins at bit `low` of a code.
PTQ_BOTH constexpr int plane_width(int bits, int low) {
    return bits - low >= 4 ? 4 : bits - low >= 2 ? 2 : 1;
}

struct Weights {
    const uint8_t* fragments;  // [row tiles, blocks, 128 bits]
    const uint16_t* scale;     // [row tiles, groups, 16], bits of bfloat16
    const uint8_t* zero;       // likewise, or null: 2^(bits - 1)
    int n, k, groups;
    int halves;  // of 32 columns, in a group (rounded up, where a row is one group)
};
inline int halves_of(int k, int groups) {
    return k > groups ? (k / groups + half_columns - 1) / half_columns : 1;
}

// One block: its planes into shared memory, and a lane's words out of it. `from` is this lane's part of the first
// plane.
template <int bits, int low = 0>
PTQ_DEVICE void copy_block(uint8_t* to, const uint8_t* from) {
    constexpr int width = plane_width(bits, low), first = plane_width(bits, 0);
    copy_async<4 * width>(to + 128 * low + 4 * width * lane(), from + 128 * low + 4 * (width - first) * lane());
    if constexpr (low + width < bits) copy_block<bits, low + width>(to, from);
}
template <int bits, int low = 0>
PTQ_DEVICE void load_block(const uint8_t* from, uint32_t (&words)[bits]) {
    constexpr int width = plane_width(bits, low);
    const uint8_t* at = from + 128 * low + 4 * width * lane();
    if constexpr (width == 4) {
        const Words4 v = load<Words4>(at);
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) words[low + i] = v.word[i];
    } else if constexpr (width == 2) {
        const Words2 v = load<Words2>(at);
        words[low] = v.word[0];
        words[low + 1] = v.word[1];
    } else {
        words[low] = load<uint32_t>(at);
    }
    if constexpr (low + width < bits) load_block<bits, low + width>(from, words);
}

// Pair j of step s: j = 0: row g, columns 0 and 1 of the step's four; 1: row g + 8; 2: row g, columns 2 and 3; 3: row
// g + 8. The first column in the low 16 bits, the other one in the high.
// `base` is or-ed to it.
template <int bits, int low = 0>
PTQ_DEVICE uint32_t code_pair(const uint32_t (&words)[bits], int s, int j, uint32_t base = 0) {
    constexpr int width = plane_width(bits, low);
    constexpr uint32_t mask = ((1u << width) - 1) * 0x00010001u << low;
    const uint32_t word = words[low + (width == 4 ? s : width == 2 ? s / 2 : 0)];
    const int bit = width == 4 ? 4 * j : width == 2 ? 2 * (4 * (s % 2) + j) : 4 * s + j;
    const uint32_t codes = and_or(bit >= low ? word >> (bit - low) : word << (low - bit), mask, base);
    if constexpr (low + width < bits)
        return code_pair<bits, low + width>(words, s, j, codes);
    else
        return codes;
}

// What turns codes into code - zero, exactly, in packed halves. The bits of a code are put into the fraction of 1024
// (float16) or 128 (bfloat16), and that number and the zero subtracted. Eight bits do not fit behind 128: there the
// highest bit is a number of its own. Four bits in float16 may stay 4 places higher, which saves a shift.
template <class T, int bits>
struct Offset {
    uint32_t offset, raised;

    PTQ_DEVICE void set(int zero) {
        constexpr int base = std::is_same_v<T, Half> ? 1024 : bits == 8 ? 0 : 128;
        offset = pack<T>(-static_cast<float>(base + zero), -static_cast<float>(base + zero));
        raised = pack<T>(-static_cast<float>(64 + zero), -static_cast<float>(64 + zero));
    }
};
// Pair j of step s as numbers.
template <class T, int bits>
PTQ_DEVICE uint32_t number_pair(const uint32_t (&words)[bits], int s, int j, const Offset<T, bits>& o) {
    if constexpr (std::is_same_v<T, Half> && bits == 4) {
        const uint32_t word = j < 2 ? words[s] : words[s] >> 8;
        if (j % 2) return fma2<T>(and_or(word, 0x00f000f0u, 0x64006400u), 0x2c002c00u, o.raised);  // / 16
        return fma2<T>(and_or(word, 0x000f000fu, 0x64006400u), 0x3c003c00u, o.offset);
    } else if constexpr (std::is_same_v<T, Half>) {
        return fma2<T>(code_pair(words, s, j, 0x64006400u), 0x3c003c00u, o.offset);
    } else if constexpr (bits < 8) {
        return fma2<T>(code_pair(words, s, j, 0x43004300u), 0x3f803f80u, o.offset);
    } else {
        const uint32_t codes = code_pair(words, s, j);
        const uint32_t low = fma2<T>((codes & 0x007f007fu) | 0x43004300u, 0x3f803f80u, 0xc300c300u);  // - 128
        const uint32_t high = (codes & 0x00800080u) * 0x86u;                                          // 0x4300 is 128
        return fma2<T>(low, 0x3f803f80u, fma2<T>(high, 0x3f803f80u, o.offset));
    }
}

// Step s of row g (second = 0) or g + 8 as four bytes, in the order of columns 0, 2, 1, 3.
template <int bits>
PTQ_DEVICE uint32_t code_bytes(const uint32_t (&words)[bits], int s, int second) {
    if constexpr (bits == 4)
        return (second ? words[s] >> 4 : words[s]) & 0x0f0f0f0fu;
    else
        return code_pair(words, s, second) | code_pair(words, s, second + 2) << 8;
}

// Numbers of a type that is known at run time: a bias, a result.
enum class Number { none, float32, float16, bfloat16 };
PTQ_DEVICE float number_at(const void* from, Number kind, int64_t i) {
    if (kind == Number::none) return 0;
    if (kind == Number::float32) return static_cast<const float*>(from)[i];
    if (kind == Number::float16) return widen(static_cast<const Half*>(from)[i]);
    return widen(static_cast<const Bfloat16*>(from)[i]);
}
PTQ_DEVICE void store_number(void* to, Number kind, int64_t i, float x) {
    if (kind == Number::float32) static_cast<float*>(to)[i] = x;
    if (kind == Number::float16) static_cast<Half*>(to)[i] = narrow<Half>(x);
    if (kind == Number::bfloat16) static_cast<Bfloat16*>(to)[i] = narrow<Bfloat16>(x);
}

}  // namespace ptq::integer_cuda
