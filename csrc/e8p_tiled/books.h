// How weights come out of the blocks of a book, for one level: included once per level, into an anonymous namespace.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "e8p_tiled/layout.h"
#include "e8p_tiled/tables.h"

namespace ptq::e8p_tiled {
namespace {

using integer_tiled::Dwords;
using integer_tiled::quads;

// A block as eight vectors of four weights (+ `offset`) for each of sixteen rows. Which columns lie in byte `i` of the
// rows of vector `quad`: activations have to be in the same order.
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

// Nibbles of the pairs of coordinates, then the weights: an index has six bits, which is a nibble and two more bits.
template <Book book>
struct Points {
    static constexpr int number = static_cast<int>(book);
    LongTable low, high;
    __m512i even, odd, last[2], nibble, shift;
    explicit Points(const Tables& t)
        : low(t.pairs[number][0]),
          high(t.pairs[number][1]),
          even(load_table(t.values[number][0])),
          odd(load_table(t.values[number][1])),
          last{load_table(t.last_signs), load_table(t.last_signs + 64)},
          nibble(_mm512_set1_epi8(15)),
          shift(_mm512_set1_epi8(2)) {}

    // The weights of a block come in two steps, so that a loop can begin a block before it ends the one before it.
    struct Begun {
        __m512i index[4], p;
    };
    Begun begin(const uint8_t* block) const {
        const __m512i entry = _mm512_loadu_si512(block);
        const __mmask64 upper = _mm512_movepi8_mask(entry);
        const __m512i a = low.at(entry, upper), b = high.at(entry, upper);
        const __m512i pair[4] = {a, _mm512_srli_epi16(a, 4), b, _mm512_srli_epi16(b, 4)};
        __m512i signs[4] = {entry, entry, entry, entry}, p = entry;
        if constexpr (book == Book::e8p) {
            const __m512i s = _mm512_loadu_si512(block + 64);
            signs[0] = s, signs[1] = _mm512_slli_epi16(s, 2), signs[2] = _mm512_slli_epi16(s, 4);
            signs[3] = _mm512_permutex2var_epi8(last[0], s, last[1]);
            p = _mm512_and_si512(_mm512_srli_epi16(s, 6), shift);
        }
        Begun begun;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) begun.index[i] = join(nibble, pair[i], signs[i]);
        begun.p = p;
        return begun;
    }
    void end(const Begun& begun, Dwords out[quads]) const {
#pragma GCC unroll 8
        for (int i = 0; i < quads; i++) {
            const __m512i w = _mm512_maskz_permutexvar_epi8(every_byte, begun.index[i / 2], i % 2 ? odd : even);
            out[i] = (Dwords)(book == Book::e8p ? _mm512_sub_epi8(w, begun.p) : w);
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
    __m256i half[2];
    std::memcpy(half, &index, sizeof half);
    for (int i = 0; i < 2; i++) half[i] = _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), half[i], 4);
    std::memcpy(&found, half, sizeof found);
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
    __m256i half[2];
    std::memcpy(half, &index, sizeof half);
    for (int i = 0; i < 2; i++) half[i] = _mm256_shuffle_epi8(row, half[i]);
    std::memcpy(&found, half, sizeof found);
#else
    uint8_t bytes[64];
    std::memcpy(bytes, &index, sizeof bytes);
    for (uint8_t& byte : bytes) byte = table[byte];
    std::memcpy(&found, bytes, sizeof found);
#endif
    return found;
}

// A dword for each code: the nibbles of its coordinates.
template <Book book>
struct Points {
    const Tables& t;
    explicit Points(const Tables& tables) : t(tables) {}

    using Begun = const uint8_t*;
    Begun begin(const uint8_t* block) const { return block; }
    void end(Begun block, Dwords out[quads]) const { unpack(block, out); }
    void unpack(const uint8_t* block, Dwords out[quads]) const {
        constexpr int number = static_cast<int>(book);
        Dwords entry, signs;
        std::memcpy(&entry, block, sizeof entry);
        if constexpr (book == Book::e8p) std::memcpy(&signs, block + 64, sizeof signs);
        for (int i = 0; i < 4; i++) {
            Dwords code = look_up(t.nibbles[number], entry >> 8 * i & 255u);
            if constexpr (book == Book::e8p) code ^= look_up(t.sign_nibbles, signs >> 8 * i & 255u);
            out[2 * i] = look_up_bytes(t.nibble_values[number], code & 0x0f0f0f0fu);
            out[2 * i + 1] = look_up_bytes(t.nibble_values[number], code >> 4 & 0x0f0f0f0fu);
        }
    }
};

#endif

}  // namespace
}  // namespace ptq::e8p_tiled
