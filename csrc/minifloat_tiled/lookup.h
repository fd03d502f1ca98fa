// From tiles to numbers. Included once per level, into an anonymous namespace.
//
// A look-up needs no mask: the tables are repeated, so that bits above a code change nothing. So two planes are joined
// by one bit select, and one permutation turns 64 codes into bytes, or 32 into bfloat16 numbers.
#pragma once

#include <bit>
#include <cmath>

#include "minifloat_tiled/kernels.h"
#include "tiles/few_tokens.h"

namespace ptq::minifloat_tiled {
namespace {

using tiles::block_bytes;
using tiles::block_columns;
using tiles::Dwords;
using tiles::quads;
using tiles::tile_rows;

inline const uint8_t* tile_of(const Weight& w, int64_t tile) {
    return w.tiles + tile * w.blocks * block_bytes(w.element->bits);
}

// --- codes -----------------------------------------------------------------------------------------------------------

// Bits of a where `mask` has them, else those of b.
inline Dwords select(uint32_t mask, Dwords a, Dwords b) {
#if defined(__AVX512F__)
    return (Dwords)_mm512_ternarylogic_epi32((__m512i)(Dwords{} + mask), (__m512i)a, (__m512i)b, 0xca);
#else
    return (a & mask) | (b & ~mask);
#endif
}

template <int by>
inline Dwords shifted(Dwords x) {
    return by >= 0 ? x << (by & 31) : x >> (-by & 31);
}

template <int bits>
inline void load_planes(const uint8_t* block, Dwords planes[bits]) {
#pragma GCC unroll 8
    for (int v = 0; v < bits; v++) planes[v] = tiles::load_dwords(block + 64 * v);
}

// The codes of quad i in the lowest bits of the bytes; above them is anything.
template <int bits, int i>
inline Dwords codes_of(const Dwords planes[bits]) {
    const Dwords low = shifted<-4 * (i % 2)>(planes[i / 2]);
    if constexpr (bits == 4) {
        return low;
    } else if constexpr (bits == 5) {
        return select(0x0f0f0f0fu, low, shifted<4 - i>(planes[4]));
    } else {
        const Dwords six = select(0x0f0f0f0fu, low, shifted<4 - 2 * (i % 4)>(planes[4 + i / 4]));
        if constexpr (bits == 6) return six;
        return select(0x3f3f3f3fu, six, shifted<6 - i>(planes[6]));
    }
}

// Calls f.operator()<i>(codes of quad i) for the quads of a super-block.
template <int bits, class F>
inline void over_quads(const uint8_t* block, const F& f) {
    Dwords planes[bits];
    load_planes<bits>(block, planes);
    [&]<int... i>(std::integer_sequence<int, i...>) {
        (f.template operator()<i>(codes_of<bits, i>(planes)), ...);
    }(std::make_integer_sequence<int, quads>{});
}

#if defined(__aarch64__)
// Bytes for the codes in the lowest bits of bytes.
template <int bits>
struct LongTable {
    static constexpr int parts = bits == 7 ? 2 : 1;
    uint8x16x4_t part[parts];
    explicit LongTable(const uint8_t* from) {
        for (int i = 0; i < parts; i++) part[i] = vld1q_u8_x4(from + 64 * i);
    }
    PTQ_INLINE Dwords at(const Dwords& codes) const {
        const auto find = [&](auto code) __attribute__((always_inline)) {
            const uint8x16_t index = vandq_u8((uint8x16_t)code, vdupq_n_u8((1 << bits) - 1));
            uint8x16_t found = vqtbl4q_u8(part[0], index);
            if constexpr (parts == 2) found = vqtbx4q_u8(found, part[1], vsubq_u8(index, vdupq_n_u8(64)));
            return (decltype(code))found;
        };
        return by_register(find, codes);
    }
};
#endif

// --- bytes -----------------------------------------------------------------------------------------------------------

// Codes to `ElementTable::byte`.
template <int bits>
struct Bytes {
#if defined(__AVX512VBMI__)
    __m512i low, high;
    explicit Bytes(const ElementTable& e) : low(_mm512_loadu_si512(e.byte)), high(_mm512_loadu_si512(e.byte + 64)) {}
    Dwords operator()(Dwords codes) const {
        // (gcc 12 warns of the form without a mask; it leaves a mask of ones out.)
        if constexpr (bits <= 6) return (Dwords)_mm512_maskz_permutexvar_epi8(~__mmask64{0}, (__m512i)codes, low);
        return (Dwords)_mm512_permutex2var_epi8(low, (__m512i)codes, high);
    }
#elif defined(__AVX2__)
    // Sixteen entries at a time; the bits above the fourth choose between them.
    static constexpr int parts = 1 << (bits - 4);
    uint8_t table[parts][16];
    explicit Bytes(const ElementTable& e) { std::memcpy(table, e.byte, sizeof table); }
    template <int count>  // of parts, from `first` on
    PTQ_INLINE __m256i find(__m256i code, __m256i low, int first) const {
        if constexpr (count == 1) {
            const __m128i entries = load_vector<__m128i>(table[first]);
            return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), low);
        } else {
            constexpr int bit = std::countr_zero(static_cast<unsigned>(count)) + 3;
            return _mm256_blendv_epi8(find<count / 2>(code, low, first), find<count / 2>(code, low, first + count / 2),
                                      _mm256_slli_epi16(code, 7 - bit));
        }
    }
    Dwords operator()(Dwords codes) const {
        const auto bytes = [&](__m256i code) __attribute__((always_inline)) {
            return find<parts>(code, _mm256_and_si256(code, _mm256_set1_epi8(15)), 0);
        };
        return joined(bytes(first_eight(codes)), bytes(last_eight(codes)));
    }
#elif defined(__aarch64__)
    LongTable<bits> table;
    explicit Bytes(const ElementTable& e) : table(e.byte) {}
    Dwords operator()(Dwords codes) const { return table.at(codes); }
#else
    const uint8_t* table;
    explicit Bytes(const ElementTable& e) : table(e.byte) {}
    Dwords operator()(Dwords codes) const {
        uint8_t bytes[64];
        std::memcpy(bytes, &codes, sizeof bytes);
        for (uint8_t& byte : bytes) byte = table[byte % most_codes];
        return tiles::load_dwords(bytes);
    }
#endif
};

// --- floats ----------------------------------------------------------------------------------------------------------

// The codes of a quad to numbers, times a power of two, 1 / factor: calls f.operator()<j>(column j), all four of them.
template <int bits>
struct Values {
#if defined(__AVX512F__)
    __m512 table[bits == 7 ? 4 : 2];  // with six and seven bits: of the positive codes
    explicit Values(const ElementTable& e) {
        for (int i = 0; i < (bits == 7 ? 4 : 2); i++) table[i] = _mm512_loadu_ps(e.value + 16 * i);
    }
    template <int j>
    Lanes column(Dwords codes) const {
        const __m512i code = (__m512i)(codes >> 8 * j);
        if constexpr (bits == 4) return (Lanes)_mm512_maskz_permutexvar_ps(0xffff, code, table[0]);
        __m512 x = _mm512_permutex2var_ps(table[0], code, table[1]);
        if constexpr (bits == 5) return (Lanes)x;
        if constexpr (bits == 7) {
            const __mmask16 upper = _mm512_test_epi32_mask(code, _mm512_set1_epi32(32));
            x = _mm512_mask_mov_ps(x, upper, _mm512_permutex2var_ps(table[2], code, table[3]));
        }
        const __m512i sign = (__m512i)((Dwords)code << (32 - bits)), mask = _mm512_set1_epi32(INT32_MIN);
        return (Lanes)_mm512_ternarylogic_epi32(_mm512_castps_si512(x), sign, mask, 0xf8);  // x | (sign & mask)
    }
#elif defined(__AVX2__)
    // The float16 numbers with the same bits: they have another bias, and their subnormal numbers are ours.
    __m128i left, up;
    __m256i sign, rest;
    float factor;
    explicit Values(const ElementTable& e)
        : left(_mm_cvtsi32_si128(10 - e.mantissa)),
          up(_mm_cvtsi32_si128(16 - bits)),
          sign(_mm256_set1_epi16(1 << (bits - 1))),
          rest(_mm256_set1_epi16((1 << (bits - 1)) - 1)),
          factor(std::ldexp(1.0f, 16 - (1 << (e.exponent - 1)))) {}
    // The codes in the lower bytes of the words, of eight rows: of one column in the lower half, of the other above.
    PTQ_INLINE __m256i words(__m256i codes) const {
        const __m256i bits_of = _mm256_or_si256(_mm256_sll_epi16(_mm256_and_si256(codes, rest), left),
                                                _mm256_sll_epi16(_mm256_and_si256(codes, sign), up));
        const __m256i order =
            _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
        return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bits_of, order), 0xd8);
    }
    template <int half>
    PTQ_INLINE static Lanes numbers(__m256i a, __m256i b) {
        const auto eight = [](__m256i x) { return (Lanes::Half)_mm256_cvtph_ps(_mm256_extracti128_si256(x, half)); };
        return {eight(a), eight(b)};
    }
    template <class F>
    PTQ_INLINE void columns(Dwords codes, const F& f) const {
        const __m256i a = first_eight(codes), b = last_eight(codes);
        const __m256i even_a = words(a), even_b = words(b);
        const __m256i odd_a = words(_mm256_srli_epi16(a, 8)), odd_b = words(_mm256_srli_epi16(b, 8));
        f.template operator()<0>(numbers<0>(even_a, even_b)), f.template operator()<1>(numbers<0>(odd_a, odd_b));
        f.template operator()<2>(numbers<1>(even_a, even_b)), f.template operator()<3>(numbers<1>(odd_a, odd_b));
    }
#elif defined(__aarch64__)
    LongTable<bits> high, low;  // bytes of bfloat16
    static constexpr float factor = 1;
    template <int at>
    static LongTable<bits> bytes_of(const ElementTable& e) {
        uint8_t bytes[most_codes];
        for (int i = 0; i < most_codes; i++) bytes[i] = std::bit_cast<uint32_t>(e.value[i]) >> at & 255;
        return LongTable<bits>(bytes);
    }
    explicit Values(const ElementTable& e) : high(bytes_of<24>(e)), low(bytes_of<16>(e)) {}
    // Byte j of every dword of both, as floats.
    template <int j>
    PTQ_INLINE static Lanes column(const Dwords& upper, const Dwords& lower) {
        constexpr uint8_t none = 255, u = 16 + j, l = j;
        static constexpr uint8_t order[] = {none, none, l,     u,     none, none, l + 4,  u + 4,
                                            none, none, l + 8, u + 8, none, none, l + 12, u + 12};
        const uint8x16_t index = vld1q_u8(order);
        const auto join = [&](auto a, auto b) __attribute__((always_inline)) {
            return (decltype(a))vqtbl2q_u8({{(uint8x16_t)a, (uint8x16_t)b}}, index);
        };
        return (Lanes)by_register(join, lower, upper);
    }
    template <class F>
    PTQ_INLINE void columns(Dwords codes, const F& f) const {
        const Dwords upper = high.at(codes), lower = low.at(codes);
        f.template operator()<0>(column<0>(upper, lower)), f.template operator()<1>(column<1>(upper, lower));
        f.template operator()<2>(column<2>(upper, lower)), f.template operator()<3>(column<3>(upper, lower));
    }
#else
    const float* table;
    explicit Values(const ElementTable& e) : table(e.value) {}
    template <int j>
    Lanes column(Dwords codes) const {
        Lanes x;
        for (int r = 0; r < tile_rows; r++) x[r] = table[codes[r] >> 8 * j & (most_codes - 1)];
        return x;
    }
#endif
#if defined(__AVX512F__) || !(defined(__AVX2__) || defined(__aarch64__))
    static constexpr float factor = 1;
    template <class F>
    PTQ_INLINE void columns(Dwords codes, const F& f) const {
        f.template operator()<0>(column<0>(codes)), f.template operator()<1>(column<1>(codes));
        f.template operator()<2>(column<2>(codes)), f.template operator()<3>(column<3>(codes));
    }
#endif
};

#if defined(__AVX512BF16__)
// Bytes 0 and 2, or 1 and 3, of the dwords of codes to pairs of bfloat16 numbers.
template <int bits>
struct Pairs {
    __m512i low, high;  // with seven bits: of the positive codes
    static __m512i words(const float* from) {
        return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
    }
    explicit Pairs(const ElementTable& e) : low(words(e.value)), high(words(e.value + 32)) {}
    template <bool odd>
    __m512bh at(Dwords codes) const {
        const __m512i code = odd ? _mm512_srli_epi16((__m512i)codes, 8) : (__m512i)codes;
        if constexpr (bits <= 5) return (__m512bh)_mm512_permutexvar_epi16(code, low);
        const __m512i x = _mm512_permutex2var_epi16(low, code, high);
        if constexpr (bits == 6) return (__m512bh)x;
        const __m512i sign = _mm512_slli_epi16(code, 9), mask = _mm512_set1_epi16(INT16_MIN);
        return (__m512bh)_mm512_ternarylogic_epi32(x, sign, mask, 0xf8);
    }
};
#endif

}  // namespace
}  // namespace ptq::minifloat_tiled
