// Weights as numbers: from the bytes of `Points::unpack` to floats and pairs of bfloat16, for one level: included once
// per level, into an anonymous namespace.
#pragma once

#include "e8p_tiled/books.h"
#include "integer/lanes.h"

namespace ptq::e8p_tiled {
namespace {

// Whether two products of bfloat16 numbers are one instruction.
#if defined(__AVX512BF16__)
constexpr bool in_pairs = true;
#else
constexpr bool in_pairs = false;
#endif

// Four columns of each row: bytes 0, 1, 2, 3 of the dwords.
inline void to_floats(Dwords weights, Dwords out[4]) {
    typedef int8_t SignedBytes __attribute__((vector_size(64)));
    const Dwords point = (Dwords)((SignedBytes)weights - static_cast<int8_t>(offset));
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        out[j] = (Dwords) __builtin_convertvector((integer::SignedInts)(point << (24 - 8 * j)) >> 24, integer::Lanes);
}

#if defined(__AVX512BF16__)
// Weights in the lower five bits of words to bfloat16.
inline __m512i exact_numbers() {
    alignas(64) static constexpr uint16_t words[32] = {
        0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000,
        0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110,
        0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x4180, 0x4188, 0x4190, 0x4198};  // -12 .. 19
    return _mm512_load_si512(words);
}

// Two pairs of columns of each row: bytes 0 and 2, 1 and 3.
inline void to_pairs(Dwords weights, Dwords out[2]) {
    const __m512i even = (__m512i)weights, odd = _mm512_srli_epi16(even, 8);
    out[0] = (Dwords)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, even, exact_numbers());
    out[1] = (Dwords)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, odd, exact_numbers());
}
#endif

// Place of a column of a block, which lies in byte `i` of `quad`, in the order of the steps.
constexpr int place_of(int quad, int i, bool pairs) {
    return 4 * quad + (pairs ? i % 2 * 2 + i / 2 : i);
}

}  // namespace
}  // namespace ptq::e8p_tiled
