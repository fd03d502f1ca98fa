// Numbers from codes of 2 to 8 bits (a Code of fragments_cuda/weights.cuh). A code's bits lie in planes of 4, 2 and 1
// bits, the widest first (ptq/ops/fragments.py). No torch here.
#pragma once

#include <type_traits>

#include "fragments_cuda/weights.cuh"

namespace ptq::integer_cuda {

using namespace ptq::cuda;

// A pair of codes: the first column in the low 16 bits, the other one in the high. `base` is or-ed to it.
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

template <int bits_, bool has_zeros_ = true>
struct Integer {
    static constexpr int bits = bits_, words = bits, shift = 0, zero = 1 << (bits - 1);
    static constexpr bool whole_bytes = bits == 8, has_zeros = has_zeros_;
    // Four bits in bfloat16: see below.
    template <class T>
    static constexpr float factor = bits == 4 && std::is_same_v<T, Bfloat16> ? 64 : 1;

    // What turns codes into code - zero, exactly, in packed halves. The bits of a code are put into the fraction of
    // 1024 (float16) or 128 (bfloat16), and that number and the zero subtracted. Eight bits do not fit behind 128:
    // there the highest bit is a number of its own. Four bits in float16 may stay 4 places higher, which saves a shift.
    // So they may in bfloat16, and nothing need be put before them: as bits of a subnormal number they are code *
    // 2^-133 or code * 2^-129, and a factor of 2^127 or 2^123 makes code / 64 of either.
    template <class T>
    struct Offset {
        uint32_t offset, raised;

        PTQ_DEVICE void set(int zero) {
            if constexpr (factor<T> != 1) {
                offset = pack<T>(-static_cast<float>(zero) / factor<T>, -static_cast<float>(zero) / factor<T>);
                return;
            }
            constexpr int base = std::is_same_v<T, Half> ? 1024 : bits == 8 ? 0 : 128;
            offset = pack<T>(-static_cast<float>(base + zero), -static_cast<float>(base + zero));
            raised = pack<T>(-static_cast<float>(64 + zero), -static_cast<float>(64 + zero));
        }
    };

    // Subnormal numbers are multiplied as exactly: code * 2^-24 or 2^-20 in float16, 2^-133 or 2^-129 in bfloat16.
    static constexpr bool has_raw = bits == 4;
    static constexpr uint32_t raw_one = 0x00010001u;
    template <class T>
    static PTQ_DEVICE uint32_t raw(const uint32_t (&all)[words], int s, int j) {
        const uint32_t word = j < 2 ? all[s] : all[s] >> 8;
        return word & (j % 2 ? 0x00f000f0u : 0x000f000fu);
    }
    template <class T>
    static PTQ_DEVICE constexpr float raw_factor(int second) {
        constexpr int power = std::is_same_v<T, Half> ? 24 : 133 - fragments::lift;
        return second ? fragments::power_of_two(power - 4) : fragments::power_of_two(power);
    }

    static PTQ_DEVICE void complete(uint32_t (&)[words]) {}
    template <class T>
    static PTQ_DEVICE uint32_t numbers(const uint32_t (&all)[words], int s, int j, const Offset<T>& o) {
        if constexpr (bits == 4) {
            const uint32_t word = j < 2 ? all[s] : all[s] >> 8;
            if constexpr (std::is_same_v<T, Bfloat16>)
                return j % 2 ? fma2<T>(word & 0x00f000f0u, 0x7d007d00u, o.offset)
                             : fma2<T>(word & 0x000f000fu, 0x7f007f00u, o.offset);
            if (j % 2) return fma2<T>(and_or(word, 0x00f000f0u, 0x64006400u), 0x2c002c00u, o.raised);  // / 16
            return fma2<T>(and_or(word, 0x000f000fu, 0x64006400u), 0x3c003c00u, o.offset);
        } else if constexpr (std::is_same_v<T, Half>) {
            return fma2<T>(code_pair(all, s, j, 0x64006400u), 0x3c003c00u, o.offset);
        } else if constexpr (bits < 8) {
            return fma2<T>(code_pair(all, s, j, 0x43004300u), 0x3f803f80u, o.offset);
        } else {
            const uint32_t codes = code_pair(all, s, j);
            const uint32_t low = fma2<T>((codes & 0x007f007fu) | 0x43004300u, 0x3f803f80u, 0xc300c300u);  // - 128
            const uint32_t high = (codes & 0x00800080u) * 0x86u;                                          // 0x4300: 128
            return fma2<T>(low, 0x3f803f80u, fma2<T>(high, 0x3f803f80u, o.offset));
        }
    }
    static PTQ_DEVICE uint32_t bytes(const uint32_t (&all)[words], int s, int second) {
        if constexpr (bits == 4)
            return (second ? all[s] >> 4 : all[s]) & 0x0f0f0f0fu;
        else
            return code_pair(all, s, second) | code_pair(all, s, second + 2) << 8;
    }
};

}  // namespace ptq::integer_cuda
