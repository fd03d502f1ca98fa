// Weights as numbers: from the bytes of `Points::unpack` to floats and pairs of bfloat16, for one level: included once
// per level, into an anonymous namespace.
#pragma once

#include <bit>

#include "common/lanes.h"
#include "e8p_tiled/points.h"

namespace ptq::e8p_tiled {
namespace {

// Four columns of each row: bytes 0, 1, 2, 3 of the dwords.
template <int bits>
inline void to_floats(Dwords weights, Dwords out[4]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        out[j] = (Dwords)converted<Lanes>((SignedInts)(weights >> 8 * j & 255u) - offset_of(bits));
}

#if defined(__AVX512BF16__)
constexpr uint32_t bfloat16_bits(int exact) {
    return std::bit_cast<uint32_t>(static_cast<float>(exact)) >> 16;
}

// 2 bits: a weight has five bits, which look up a word.
struct alignas(64) WordTable {
    uint16_t words[32];
};
constexpr WordTable word_table() {
    WordTable t{};
    for (int i = 0; i < 32; i++) t.words[i] = static_cast<uint16_t>(bfloat16_bits(i - offset_of(2)));
    return t;
}
// 3 and 4 bits: all points are odd, so seven bits of eight say which. They look up both bytes of the word.
struct alignas(64) ByteTables {
    uint8_t low[128], high[128];
};
constexpr ByteTables byte_tables() {
    ByteTables t{};
    for (int i = 0; i < 128; i++) {
        const uint32_t word = bfloat16_bits(2 * i + 1 - offset_of(4));
        t.low[i] = static_cast<uint8_t>(word & 255), t.high[i] = static_cast<uint8_t>(word >> 8);
    }
    return t;
}
constexpr WordTable word_numbers = word_table();
constexpr ByteTables byte_numbers = byte_tables();

// Two pairs of columns of each row: bytes 0 and 2, 1 and 3.
template <int bits>
inline void to_pairs(Dwords weights, Dwords out[2]) {
    const __m512i w = (__m512i)weights;
    if constexpr (bits == 2) {
        const __m512i table = _mm512_load_si512(word_numbers.words);
        out[0] = (Dwords)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, w, table);
        out[1] = (Dwords)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, _mm512_srli_epi16(w, 8), table);
    } else {
        const auto look_up = [&](const uint8_t* table) {
            return _mm512_permutex2var_epi8(load_table(table), _mm512_srli_epi16(w, 1), load_table(table + 64));
        };
        const __m512i low = look_up(byte_numbers.low), high = look_up(byte_numbers.high);
        const __m512i lower = _mm512_set1_epi16(0x00ff);
        out[0] = (Dwords)_mm512_ternarylogic_epi32(lower, low, _mm512_slli_epi16(high, 8), 0xca);
        out[1] = (Dwords)_mm512_ternarylogic_epi32(lower, _mm512_srli_epi16(low, 8), high, 0xca);
    }
}
#endif

// Place of a column of a block, which lies in byte `i` of `quad`, in the order of the steps.
constexpr int place_of(int quad, int i, bool pairs) {
    return 4 * quad + (pairs ? i % 2 * 2 + i / 2 : i);
}

}  // namespace
}  // namespace ptq::e8p_tiled
