// Numbers from the codes of small floats (a Code of fragments_cuda/weights.cuh). No torch here.
//
// The bits of a code, put where the float type has its sign, its lowest exponent bits and its highest fraction bits,
// are its value but for a power of two, subnormal ones included. In float16 that power is left to the result. bfloat16
// numbers would be so small that products vanish: they are multiplied with it. Bytes are the fraction of a bfloat16
// number to which the value was added: 1.5 x 2^(7 - shift) has a step of 2^-shift, and leaves room on both sides.
#pragma once

#include <type_traits>

#include "fragments_cuda/weights.cuh"
#include "minifloat_cuda/layouts.cuh"

namespace ptq::minifloat_cuda {

using namespace ptq::cuda;

PTQ_DEVICE uint32_t moved(uint32_t word, int by) {
    return by >= 0 ? word << by : word >> -by;
}

template <int exponent_, int mantissa_>
struct Minifloat {
    static constexpr int exponent = exponent_, mantissa = mantissa_, bits = 1 + exponent + mantissa;
    static constexpr int bias = (1 << (exponent - 1)) - 1;
    static constexpr int gathered = layout_of(exponent, mantissa).gathered, groups = gathered ? bits / gathered : 0;
    static constexpr int words = bits + groups;
    static constexpr int shift = bias - 1 + mantissa;
    static constexpr bool whole_bytes = false, has_zeros = false;
    // All values times 2^shift are integers; whether bytes hold them.
    static constexpr bool has_bytes = ((2 << mantissa) - 1) << ((1 << exponent) - 2) <= 127;
    static constexpr uint32_t middle = (static_cast<uint32_t>(127 + 7 - shift) << 7 | 0x40) * 0x00010001u;
    static constexpr int zero = middle & 0xff;
    template <class T>
    static constexpr float factor = std::is_same_v<T, Half> ? static_cast<float>(1 << (15 - bias)) : 1.0f;

    template <class T>
    struct Offset {
        PTQ_DEVICE void set(int) {}
    };

    // The words made of the bits that were left over, behind the stored ones.
    static PTQ_DEVICE void complete(uint32_t (&all)[words]) {
        constexpr Layout l = layout_of(exponent, mantissa);
        constexpr uint32_t spare = spare_of(l, bits);
        PTQ_UNROLL
        for (int g = 0; g < groups; g++) {
            uint32_t word = rotate_left(all[g * gathered], l.turn[0]);
            PTQ_UNROLL
            for (int i = 1; i < gathered; i++) {
                const uint32_t mask = turned(spare, l.turn[i]);
                word = (word & ~mask) | (rotate_left(all[g * gathered + i], l.turn[i]) & mask);
            }
            all[bits + g] = word;
        }
    }
    // Pair j of step s with its lowest mantissa bit at bit `to`.
    template <int to>
    static PTQ_DEVICE uint32_t placed(const uint32_t (&all)[words], int s, int j) {
        constexpr Layout l = layout_of(exponent, mantissa);
        constexpr int in_group = gathered ? gathered : 1, pairs = 16 * in_group / bits, direct = l.slots * in_group;
        constexpr uint32_t magnitude = ((1u << (bits - 1)) - 1) * 0x00010001u << to, sign = 0x80008000u;
        const int pair = 4 * s + j, group = pair / pairs, i = pair % pairs;
        const int slot = i < direct ? i % l.slots : i - direct;
        const uint32_t word = all[i < direct ? group * in_group + i / l.slots : bits + group];
        const int by = to - l.low[slot], sign_by = 15 - l.sign[slot];
        if (by == sign_by) return moved(word, by) & (sign | magnitude);
        return and_or(moved(word, sign_by), sign, moved(word, by) & magnitude);
    }
    // With the value added to `plus`.
    static PTQ_DEVICE uint32_t scaled(const uint32_t (&all)[words], int s, int j, uint32_t plus) {
        constexpr uint32_t power = static_cast<uint32_t>(254 - bias) << 7;  // 2^(127 - bias)
        return fma2<Bfloat16>(placed<7 - mantissa>(all, s, j), power * 0x00010001u, plus);
    }
    template <class T>
    static PTQ_DEVICE uint32_t numbers(const uint32_t (&all)[words], int s, int j, const Offset<T>&) {
        if constexpr (std::is_same_v<T, Half>)
            return placed<10 - mantissa>(all, s, j);
        else
            return scaled(all, s, j, 0x80008000u);  // plus -0
    }
    // What numbers<Bfloat16> multiplies is left to tokens and results.
    static constexpr bool has_raw = true;
    static constexpr uint32_t raw_one = 0;
    template <class T>
    static PTQ_DEVICE uint32_t raw(const uint32_t (&all)[words], int s, int j) {
        return placed<(std::is_same_v<T, Half> ? 10 : 7) - mantissa>(all, s, j);
    }
    template <class T>
    static PTQ_DEVICE constexpr float raw_factor(int) {
        return std::is_same_v<T, Half> ? factor<Half> : fragments::power_of_two(127 - bias - fragments::lift);
    }
    static PTQ_DEVICE uint32_t bytes(const uint32_t (&all)[words], int s, int second) {
        static_assert(has_bytes);
        return byte_permute(scaled(all, s, second, middle), scaled(all, s, second + 2, middle), 0x6240);
    }
};

}  // namespace ptq::minifloat_cuda
