// Numbers as integers whose bytes are multiplied one by one: the same for every format. Included once per level, into
// an anonymous namespace; empty without AVX-512 VNNI.
#pragma once

#include <algorithm>
#include <bit>

#include "tiles/few_tokens.h"

namespace ptq::tiles {
namespace {

#if defined(__AVX512VNNI__)
// What some numbers are integers of: 2^-21 of the power of two below the largest for three bytes, 2^-29 for four (but
// at least 2^-126). The bytes of an integer have a sign each.
class ByteUnit {
  public:
    ByteUnit(const void* x, Number type, int64_t first, int64_t last, int bytes)
        : largest(largest_exponent(x, type, first, last)),
          places(8 * bytes - 3),
          exponent(std::max(largest, places + 1)) {}

    // Sixteen numbers as integers, + 128 in each byte, so that none borrows from the next one.
    Dwords integers(const Lanes& x) const {
        const Lanes scaled = x * std::bit_cast<float>((254 + places - exponent) << 23);
        return (Dwords)_mm512_maskz_cvtps_epi32(__mmask16{0xffff}, scaled) + 0x80808080u;
    }
    static __m128i byte_of(const Dwords& integers, int which) {
        const __m128i bytes = _mm512_maskz_cvtepi32_epi8(__mmask16{0xffff}, (__m512i)(integers >> 8 * which));
        return _mm_xor_si128(bytes, _mm_set1_epi8(-128));
    }
    static int32_t sum_of(__m128i bytes) {
        const __m128i sums = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), bytes);
        int32_t all[4];
        std::memcpy(all, &sums, sizeof all);
        return all[0] + all[1] + all[2] + all[3];
    }
    // Of a byte; NaN where a number is not finite.
    float factor(int which) const {
        return largest == 255 ? NAN : std::bit_cast<float>((exponent - places + 8 * which) << 23);
    }

  private:
    // As a float has it; 255 where a number is not finite.
    static uint32_t largest_exponent(const void* x, Number type, int64_t first, int64_t last) {
        Dwords found{};
        for (int64_t i = first; i < last; i += tile_rows) {
            const Dwords size = (Dwords)read(x, type, i, std::min(last - i, tile_rows)) & 0x7fffffffu;
            found = chosen(size > found, size, found);  // infinity and NaN are the largest
        }
        uint32_t all[tile_rows];
        store_vector(all, found);
        return *std::max_element(all, all + tile_rows) >> 23;
    }

    uint32_t largest, places, exponent;
};
#endif

}  // namespace
}  // namespace ptq::tiles
