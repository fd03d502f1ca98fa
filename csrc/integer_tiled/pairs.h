// Codes to pairs of bfloat16 numbers. Included once per level, into an anonymous namespace.
#pragma once

#include <cstring>

#include "common/sixteen.h"

#if defined(__AVX512BF16__)
namespace ptq::integer_tiled {
namespace {

// Codes to bfloat16. Only the lowest five bits of an index count (six bits wide: six); where a code has fewer, the
// table repeats, so that what lies above the code does not matter.
template <int bits>
struct Table {
    __m512i low, high;
    static __m512i of(int from, int size, int factor, int offset) {
        uint16_t words[32];
        for (int i = 0; i < 32; i++) {
            const float value = static_cast<float>((from + i) % size * factor - offset);
            uint32_t pattern;
            std::memcpy(&pattern, &value, sizeof pattern);
            words[i] = static_cast<uint16_t>(pattern >> 16);
        }
        return _mm512_loadu_si512(words);
    }
    Table() {
        constexpr int size = 1 << bits;
        low = bits <= 6 ? of(0, size, 1, size / 2) : of(0, 16, 1, 0);
        high = bits == 6 ? of(32, size, 1, size / 2) : of(0, 16, 16, size / 2);
    }
    // The codes in the lower bytes of the words of x.
    __m512bh pairs(__m512i x) const {
        return (__m512bh)(bits <= 5 ? _mm512_permutexvar_epi16(x, low) : _mm512_permutex2var_epi16(low, x, high));
    }
    __m512bh low_half(__m512i x) const { return (__m512bh)_mm512_permutexvar_epi16(x, low); }
    __m512bh high_half(__m512i x) const { return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4), high); }
};

}  // namespace
}  // namespace ptq::integer_tiled
#endif
