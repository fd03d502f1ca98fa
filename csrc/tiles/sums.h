// Sums of the products of a tile's rows with a few tokens, the same for every format. A sum is several, which take
// turns
// (`number` counts the calls), so that an addition need not wait for the one before it. Included once per level, into
// an anonymous namespace.
#pragma once

#include "tiles/few_tokens.h"

namespace ptq::tiles {
namespace {

// Of codes with quantised tokens.
template <int tokens>
class IntegerSums {
  public:
    // Four columns of the rows times q's, which are at `q` for the first token. `wide`: see `dot`.
    template <bool wide>
    PTQ_INLINE void add(int number, const Dwords& codes, const int8_t* q, int64_t stride) {
#pragma GCC unroll 16
        for (int t = 0; t < tokens; t++) {
            SignedInts& to = acc[t][number % turns];
            to = dot<wide>(to, codes, load_int(q + t * stride));
        }
    }

    PTQ_INLINE void total(SignedInts total[tokens]) const {
#pragma GCC unroll 16
        for (int t = 0; t < tokens; t++) {
            total[t] = acc[t][0];
            for (int c = 1; c < turns; c++) total[t] += acc[t][c];
        }
    }

  private:
    static constexpr int turns = chains<tokens>;
    SignedInts acc[tokens][turns] = {};
};

// Of numbers in float32.
template <int tokens>
class FloatSums {
  public:
    // A column of the rows times x's, which is at `x` for the first token.
    PTQ_INLINE void add(int number, const Lanes& column, const uint8_t* x, int64_t stride) {
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            float value;
            std::memcpy(&value, x + t * stride, sizeof value);
            Lanes& to = acc[t][number % turns];
            to = fma(column, fill(value), to);
        }
    }

    PTQ_INLINE void total(Lanes total[tokens]) const {
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            total[t] = acc[t][0];
            for (int c = 1; c < turns; c++) total[t] += acc[t][c];
        }
    }

  private:
    static constexpr int turns = tokens > 2 ? 1 : 4 / tokens;
    Lanes acc[tokens][turns] = {};
};

#if defined(__AVX512BF16__)
inline __m512bh two(const uint8_t* pair) {
    int32_t x;
    std::memcpy(&x, pair, sizeof x);
    return (__m512bh)_mm512_set1_epi32(x);
}

// Of pairs of bfloat16. `parts`: those that an x of float32 is the sum of, largest first; 1 where x is bfloat16.
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

    // Two columns of the rows times x's, which are at `x` for the first token and part.
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
}  // namespace ptq::tiles
