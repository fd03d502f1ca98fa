// Sums of the products of a tile's rows with a few tokens, over pairs of bfloat16: the same for every format.
// Included once per level, into an anonymous namespace; empty without AVX-512 BF16.
#pragma once

#include "integer_tiled/decode_lanes.h"

namespace ptq::integer_tiled {
namespace {

#if defined(__AVX512BF16__)
inline __m512bh two(const uint8_t* pair) {
    int32_t x;
    std::memcpy(&x, pair, sizeof x);
    return (__m512bh)_mm512_set1_epi32(x);
}

// `parts`: those that an x of float32 is the sum of, largest first; 1 where x is bfloat16.
template <int tokens, int parts>
class PairSums {
  public:
    PTQ_INLINE PairSums() {
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 3
            for (int c = 0; c < parts; c++)
#pragma GCC unroll 8
                for (int i = 0; i < chains; i++) acc[t][c][i] = _mm512_setzero_ps();
    }

    // Two columns of the rows times x's, which are at `x` for the first token and part; `number` counts the calls.
    PTQ_INLINE void add(int number, __m512bh pair, const uint8_t* x, int64_t stride) {
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 3
            for (int c = 0; c < parts; c++) {
                __m512& to = acc[t][c][number % chains];
                to = _mm512_dpbf16_ps(to, pair, two(x + t * stride + c * part_bytes));
            }
    }

    PTQ_INLINE void total(Lanes total[tokens]) const {
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            total[t] = Lanes{};
#pragma GCC unroll 3
            for (int c = parts - 1; c >= 0; c--)
#pragma GCC unroll 8
                for (int i = 0; i < chains; i++) total[t] += (Lanes)acc[t][c][i];
        }
    }

  private:
    // A product takes six cycles, and two begin in each: about twelve independent sums.
    static constexpr int most = 16 / (tokens * parts), chains = most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
    __m512 acc[tokens][parts][chains];
};
#endif

}  // namespace
}  // namespace ptq::integer_tiled
