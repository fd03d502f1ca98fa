// How weights come out of the blocks of a tile, for one level: included once per level, into an anonymous namespace.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "e8p_tiled/layout.h"
#include "e8p_tiled/tables.h"

namespace ptq::e8p_tiled {
namespace {

using tiles::Dwords;
using tiles::quads;

// A block as eight vectors of four weights (bytes) for each of sixteen rows. Which columns lie in byte `i` of the rows
// of vector `quad`: activations have to be in the same order.
constexpr int column_of(int quad, int i) {
#if defined(__AVX512VBMI__)
    return 8 * i + quad;  // the coordinate `quad` of four codes
#else
    return quad / 2 * 8 + 2 * i + quad % 2;  // the even, or the odd coordinates of one code
#endif
}

// (gcc 12 warns of the forms without a mask; it leaves masks of ones out.)
#if defined(__AVX512F__)
constexpr __mmask16 every_lane = 0xffff;
constexpr __mmask64 every_byte = ~__mmask64{0};
#endif

#if defined(__AVX512VBMI__)

inline __m512i load_table(const uint8_t* from) {
    return _mm512_loadu_si512(from);
}
// 0x0f in `mask`: the lower four bits of a, the upper ones of b. Whole words are shifted: what moves into a byte from
// its neighbour ends where it is not looked at.
inline __m512i join(__m512i mask, __m512i a, __m512i b) {
    return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
}

// Bytes among 256: a look-up takes seven bits of the index, the eighth chooses.
struct LongTable {
    __m512i part[4];
    explicit LongTable(const uint8_t* from) {
        for (int i = 0; i < 4; i++) part[i] = load_table(from + 64 * i);
    }
    __m512i at(__m512i index, __mmask64 upper) const {
        return _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(part[0], index, part[1]),
                                      _mm512_permutex2var_epi8(part[2], index, part[3]));
    }
};

// Nibbles of the pairs of coordinates, and where to find the pairs: an index has six bits, a nibble and two more bits.
struct Pairs {
    LongTable low, high;
    explicit Pairs(const uint8_t (&from)[2][256]) : low(from[0]), high(from[1]) {}
    void indices(__m512i entry, const __m512i (&more)[4], __m512i index[4]) const {
        const __mmask64 upper = _mm512_movepi8_mask(entry);
        const __m512i a = low.at(entry, upper), b = high.at(entry, upper), nibble = _mm512_set1_epi8(15);
        index[0] = join(nibble, a, more[0]), index[1] = join(nibble, _mm512_srli_epi16(a, 4), more[1]);
        index[2] = join(nibble, b, more[2]), index[3] = join(nibble, _mm512_srli_epi16(b, 4), more[3]);
    }
};
struct Nothing {
    explicit Nothing(const uint8_t (&)[2][256]) {}
};

template <int bits>
struct Points {
    Pairs e8p;
    [[no_unique_address]] std::conditional_t<bits == 3, Pairs, Nothing> residual;
    __m512i values[stages(bits)][2], last[2];
    explicit Points(const Tables& t)
        : e8p(t.pairs[e8p_book]),
          residual(t.pairs[residual_book]),
          last{load_table(t.last_signs), load_table(t.last_signs + 64)} {
        for (int i = 0; i < 2 * stages(bits); i++)
            values[i / 2][i % 2] = load_table(t.values[bits - 2].pairs[i / 2][i % 2]);
    }

    // The weights of a block come in two steps, so that a loop can begin a block before it ends the one before it.
    struct Begun {
        __m512i index[stages(bits)][4], minus;
    };
    __mmask64 begin_e8p(const uint8_t* block, __m512i index[4]) const {  // returns where p is 1
        const __m512i s = _mm512_loadu_si512(block + 64);
        e8p.indices(
            _mm512_loadu_si512(block),
            {s, _mm512_slli_epi16(s, 2), _mm512_slli_epi16(s, 4), _mm512_permutex2var_epi8(last[0], s, last[1])},
            index);
        return _mm512_movepi8_mask(s);
    }
    Begun begin(const uint8_t* block) const {
        Begun begun;
        const __mmask64 p = begin_e8p(block, begun.index[0]);
        begun.minus = _mm512_maskz_mov_epi8(p, _mm512_set1_epi8(2 * multiplier(bits, 0)));
        if constexpr (bits == 3) {
            const __m512i entry = _mm512_loadu_si512(block + 128);
            residual.indices(entry, {entry, entry, entry, entry}, begun.index[1]);
        }
        if constexpr (bits == 4) {
            const __mmask64 second = begin_e8p(block + 128, begun.index[1]);
            begun.minus =
                _mm512_mask_add_epi8(begun.minus, second, begun.minus, _mm512_set1_epi8(2 * multiplier(bits, 1)));
        }
        return begun;
    }
    void end(const Begun& begun, Dwords out[quads]) const {
#pragma GCC unroll 8
        for (int i = 0; i < quads; i++) {
            __m512i w = _mm512_maskz_permutexvar_epi8(every_byte, begun.index[0][i / 2], values[0][i % 2]);
            if constexpr (stages(bits) == 2)
                w = _mm512_add_epi8(w,
                                    _mm512_maskz_permutexvar_epi8(every_byte, begun.index[1][i / 2], values[1][i % 2]));
            out[i] = (Dwords)_mm512_sub_epi8(w, begun.minus);
        }
    }
    void unpack(const uint8_t* block, Dwords out[quads]) const { end(begin(block), out); }
};

#else

inline Dwords look_up(const uint32_t* table, Dwords index) {
    Dwords found;
#if defined(__AVX512F__)
    found = (Dwords)_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), every_lane, (__m512i)index, table, 4);
#elif defined(__AVX2__)
    const auto find = [&](__m256i at) { return _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), at, 4); };
    found = joined(find(first_eight(index)), find(last_eight(index)));
#else
    for (int r = 0; r < tile_rows; r++) found[r] = table[index[r]];
#endif
    return found;
}

// A byte among 16 for each byte, all of which are below 16.
inline Dwords look_up_bytes(const uint8_t* table, Dwords index) {
    Dwords found;
#if defined(__AVX512BW__)
    const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    found = (Dwords)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(every_lane, row), (__m512i)index);
#elif defined(__AVX2__)
    const __m256i row = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    found = joined(_mm256_shuffle_epi8(row, first_eight(index)), _mm256_shuffle_epi8(row, last_eight(index)));
#elif defined(__aarch64__)
    const uint8x16_t row = vld1q_u8(table);
    const auto find = [&](auto i)
                          __attribute__((always_inline)) { return (decltype(i))vqtbl1q_u8(row, (uint8x16_t)i); };
    found = by_register(find, index);
#else
    uint8_t bytes[64];
    store_vector(bytes, index);
    for (uint8_t& byte : bytes) byte = table[byte];
    found = load_vector<Dwords>(bytes);
#endif
    return found;
}

// Sums of bytes, which wrap around.
inline Dwords add_bytes(Dwords a, Dwords b) {
#if defined(__AVX512BW__)
    return (Dwords)_mm512_add_epi8((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return joined(_mm256_add_epi8(first_eight(a), first_eight(b)), _mm256_add_epi8(last_eight(a), last_eight(b)));
#elif defined(__aarch64__)
    const auto add = [](auto x, auto y)
                         __attribute__((always_inline)) { return (decltype(x))((uint8x16_t)x + (uint8x16_t)y); };
    return by_register(add, a, b);
#else
    return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u);
#endif
}

// A dword for each code: the nibbles of its coordinates.
template <int bits>
struct Points {
    const Tables& t;
    explicit Points(const Tables& tables) : t(tables) {}

    using Begun = const uint8_t*;
    Begun begin(const uint8_t* block) const { return block; }
    void end(Begun block, Dwords out[quads]) const { unpack(block, out); }
    void unpack(const uint8_t* block, Dwords out[quads]) const {
        const Values& values = t.values[bits - 2];
        Dwords part[bits];
        for (int i = 0; i < bits; i++) part[i] = tiles::load_dwords(block + 64 * i);
        for (int i = 0; i < 4; i++) {
            const auto find = [&](const uint32_t* table, int p) { return look_up(table, part[p] >> 8 * i & 255u); };
            const Dwords code = find(t.nibbles[e8p_book], 0) ^ find(t.sign_nibbles, 1);
            Dwords even = look_up_bytes(values.nibbles[0], code & 0x0f0f0f0fu);
            Dwords odd = look_up_bytes(values.nibbles[0], code >> 4 & 0x0f0f0f0fu);
            if constexpr (bits > 2) {
                Dwords second = find(t.nibbles[bits == 3 ? residual_book : e8p_book], 2);
                if constexpr (bits == 4) second ^= find(t.sign_nibbles, 3);
                even = add_bytes(even, look_up_bytes(values.nibbles[1], second & 0x0f0f0f0fu));
                odd = add_bytes(odd, look_up_bytes(values.nibbles[1], second >> 4 & 0x0f0f0f0fu));
            }
            out[2 * i] = even, out[2 * i + 1] = odd;
        }
    }
};

#endif

}  // namespace
}  // namespace ptq::e8p_tiled
