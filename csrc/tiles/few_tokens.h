// What the kernels for few tokens have in common, whatever the codes stand for: sixteen rows lie in the sixteen lanes
// of a vector. Included once per level, into an anonymous namespace.
#pragma once

#include <algorithm>
#include <bit>

#include "common/fetch.h"
#include "common/lanes.h"
#include "common/number.h"
#include "tiles/layout.h"

namespace ptq::tiles {
namespace {

constexpr int64_t ahead = 8192;           // bytes that are fetched before they are needed: measured on Zen 5
constexpr int64_t segment_blocks = 2048;  // 65536 columns: 255 * 128 * 65536 is below 2^31

template <Load load = Load::heavy>
inline void fetch(const uint8_t* block, int bytes) {
    fetch_ahead<load>(block, bytes, ahead);
}

// Of codes of so many bits times so many rows of bytes.
template <int bits, int tokens>
constexpr Load load_of = tokens > 1                 ? Load::heavy
                         : plane_of(bits, 0) < bits ? Load::uneven
                                                    : Load::light;

inline int32_t load_int(const int8_t* from) {
    int32_t x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// Whether an instruction adds four products of bytes of any size to 32 bits (AVX-512 VNNI, AVX-VNNI); and if not,
// whether products are first added up in 16 bits (AVX2).
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define PTQ_VNNI
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define PTQ_SUMS_OF_16_BITS
#endif

// Sums of so many tokens that registers hold beside all else: independent ones hide the latency of `dot`.
template <int tokens>
#if defined(__AVX512F__)
constexpr int chains = std::clamp(std::bit_floor(12u / tokens), 1u, 4u);
#else
constexpr int chains = 4 / tokens;
#endif

// acc + the products of four codes of each row with four activations. `wide`: codes may have eight bits.
template <bool wide>
inline SignedInts dot(SignedInts acc, Dwords codes, int32_t activations) {
#if defined(__AVX512VNNI__)
    return (SignedInts)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(activations));
#elif defined(__AVXVNNI__)
    const __m256i q = _mm256_set1_epi32(activations);
    const auto add = [&](auto sum, auto c) __attribute__((always_inline)) {
        return (decltype(sum))_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)c, q);
    };
    return by_register(add, acc, codes);
#elif defined(__AVX512BW__)
    const __m512i q = _mm512_set1_epi32(activations), c = (__m512i)codes, ones = _mm512_set1_epi16(1);
    if constexpr (!wide) {  // 2 * 127 * 128 fits into the int16 sums
        return acc + (SignedInts)_mm512_madd_epi16(_mm512_maddubs_epi16(c, q), ones);
    } else {
        const __m512i mask = _mm512_set1_epi8(15), high = _mm512_and_si512(_mm512_srli_epi16(c, 4), mask);
        const __m512i low = _mm512_maddubs_epi16(_mm512_and_si512(c, mask), q);
        return acc + (SignedInts)_mm512_madd_epi16(low, ones) +
               (SignedInts)_mm512_madd_epi16(_mm512_maddubs_epi16(high, q), _mm512_set1_epi16(16));
    }
#elif defined(__AVX2__)
    const __m256i q = _mm256_set1_epi32(activations), ones = _mm256_set1_epi16(1);
    const auto products = [&](__m256i c) __attribute__((always_inline)) {
        if constexpr (!wide) return _mm256_madd_epi16(_mm256_maddubs_epi16(c, q), ones);
        const __m256i mask = _mm256_set1_epi8(15), high = _mm256_and_si256(_mm256_srli_epi16(c, 4), mask);
        const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(c, mask), q);
        return _mm256_add_epi32(_mm256_madd_epi16(low, ones),
                                _mm256_madd_epi16(_mm256_maddubs_epi16(high, q), _mm256_set1_epi16(16)));
    };
    return acc + (SignedInts)joined(products(first_eight(codes)), products(last_eight(codes)));
#elif defined(__ARM_FEATURE_DOTPROD)
    const int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(activations));
    // Codes of eight bits less 128, which are signed; -128 times the activations is taken away again.
    const int32x4_t offset = wide ? vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-128), q) : vdupq_n_s32(0);
    const uint8x16_t highest = vdupq_n_u8(wide ? 128 : 0);
    const auto add = [&](auto sum, auto c) __attribute__((always_inline)) {
        const int8x16_t bytes = vreinterpretq_s8_u8(veorq_u8((uint8x16_t)c, highest));
        return (decltype(sum))vdotq_s32(vsubq_s32((int32x4_t)sum, offset), bytes, q);
    };
    return by_register(add, acc, codes);
#else
    for (int j = 0; j < 4; j++) {
        const int32_t q = static_cast<int8_t>(static_cast<uint32_t>(activations) >> 8 * j);
        acc += (SignedInts)(codes >> 8 * j & 255u) * q;
    }
    return acc;
#endif
}

#if defined(PTQ_SUMS_OF_16_BITS)
// What is added to a sum is added here and now: gcc would put it off, and keep all products in memory until then.
template <class V>
PTQ_INLINE void keep(V& sum) {
    asm("" : "+x"(sum.low), "+x"(sum.high));
}
// Products of four codes with four activations, in pairs, in 16 bits: added to `sum`, or the first of it.
PTQ_INLINE void add_pairs(Dwords& sum, const Dwords& codes, __m256i q, bool begins) {
    const __m256i low = _mm256_maddubs_epi16(first_eight(codes), q), high = _mm256_maddubs_epi16(last_eight(codes), q);
    sum = begins ? joined(low, high)
                 : joined(_mm256_add_epi16(first_eight(sum), low), _mm256_add_epi16(last_eight(sum), high));
}
// Both of a pair, times a factor.
PTQ_INLINE SignedInts pair_sums(const Dwords& sum, int factor) {
    const __m256i factors = _mm256_set1_epi16(static_cast<int16_t>(factor));
    return (SignedInts)joined(_mm256_madd_epi16(first_eight(sum), factors),
                              _mm256_madd_epi16(last_eight(sum), factors));
}
#endif

// Sums over the quads of a super-block, of codes of so many bits: quad after quad, from 0 on, `add`s to `acc`. With
// AVX2 alone, the products of small codes, and of the halves of large ones, are first added up in 16 bits, as many as
// fit.
template <int bits>
struct BlockSum {
#if defined(PTQ_SUMS_OF_16_BITS)
    static constexpr bool halves = bits > 7;
    static constexpr int together = bits <= 4 || halves ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
    static_assert(together * 2 * 128 * ((1 << (halves ? 4 : bits)) - 1) <= 32767);
    Dwords part, high;

    template <int i>
    PTQ_INLINE void add(SignedInts& acc, const Dwords& codes, int32_t activations) {
        const __m256i q = _mm256_set1_epi32(activations);
        constexpr bool begins = i % together == 0, ends = i % together == together - 1;
        add_pairs(part, halves ? codes & 0x0f0f0f0fu : codes, q, begins);
        if constexpr (halves) add_pairs(high, codes >> 4 & 0x0f0f0f0fu, q, begins);
        if constexpr (ends) {
            acc += pair_sums(part, 1);
            if constexpr (halves) acc += pair_sums(high, 16);
            keep(acc);
        } else {
            keep(part);
            if constexpr (halves) keep(high);
        }
    }
#else
    static constexpr int together = 1;

    template <int i>
    PTQ_INLINE void add(SignedInts& acc, const Dwords& codes, int32_t activations) {
        acc = dot<(bits > 7)>(acc, codes, activations);
    }
#endif
};

// Tokens whose sums over a super-block fit into sixteen registers.
#if defined(PTQ_SUMS_OF_16_BITS)
template <int bits>
constexpr int block_tokens = BlockSum<bits>::halves ? 2 : 4;
#else
template <int bits>
constexpr int block_tokens = 8;
#endif

// sum[token][tile] += the products of a super-block: codes.operator()<i>(tile) is quad i of one, x [quad, `x_step`]
// holds four activations of a token in a dword.
template <int bits, int tiles, int tokens, class Codes>
PTQ_INLINE void multiply_quads(const Codes& codes, const uint32_t* x, int64_t x_step, SignedInts sum[tokens][tiles]) {
    constexpr int each = std::min(tokens, block_tokens<bits>);
    BlockSum<bits> part[each][tiles];
    const auto quad = [&]<int i>(int first) __attribute__((always_inline)) {
        Dwords c[tiles];
#pragma GCC unroll 4
        for (int r = 0; r < tiles; r++) c[r] = codes.template operator()<i>(r);
#pragma GCC unroll 8
        for (int t = 0; t < each; t++)
#pragma GCC unroll 4
            for (int r = 0; r < tiles; r++)
                part[t][r].template add<i>(sum[first + t][r], c[r], static_cast<int32_t>(x[i * x_step + first + t]));
    };
#pragma GCC unroll 4
    for (int first = 0; first < tokens; first += each)
        [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
            (quad.template operator()<i>(first), ...);
        }(std::make_integer_sequence<int, quads>{});
}

// --- results ---------------------------------------------------------------------------------------------------------

// The zeros of the rows of a tile.
inline SignedInts load_zero(const uint8_t* from) {
    return (SignedInts)widened(from);
}

// Integer scales, [row tile, 1 + groups, 16]: exponents of steps, then multiples of these.
inline Lanes load_steps(const uint8_t* scales, int64_t groups, int64_t tile) {
    return (Lanes)(widened(scales + tile * (1 + groups) * tile_rows) << 23);
}
inline SignedInts load_multiples(const uint8_t* scales, int64_t groups, int64_t tile, int64_t group) {
    return (SignedInts)(widened(scales + (tile * (1 + groups) + 1 + group) * tile_rows) << 24) >> 24;
}
// The scales of a group of either kind: bits of bfloat16 [row tile, groups, 16], or where there are none, integer ones.
inline Lanes load_scales(const uint16_t* words, const uint8_t* scales, int64_t groups, int64_t tile, int64_t group) {
    if (words) return load(words + (tile * groups + group) * tile_rows);
    return converted<Lanes>(load_multiples(scales, groups, tile, group)) * load_steps(scales, groups, tile);
}

// The first `count` of sixteen results, from element `at` on.
inline void store_result(void* out, Number type, int64_t at, Lanes y, int64_t count) {
    if (type == Number::float32) return store(static_cast<float*>(out) + at, y, count);
    store_words(static_cast<uint16_t*>(out) + at, bfloat16_bits(y), count);
}

inline Lanes load_bias(const float* bias, int64_t row, int64_t count) {
    return bias ? load(bias + row, count) : Lanes{};
}

// Calls kernel.operator()<tokens>(tile, token) for tiles [first, last) and all tokens, four at a time.
template <class Kernel>
inline void over_tokens(int64_t tokens, int64_t first, int64_t last, const Kernel& kernel) {
    for (int64_t tile = first; tile < last; tile++) {
        int64_t t = 0;
        for (; t + 4 <= tokens; t += 4) kernel.template operator()<4>(tile, t);
        if (t + 2 <= tokens) kernel.template operator()<2>(tile, t), t += 2;
        if (t < tokens) kernel.template operator()<1>(tile, t);
    }
}

// --- x ---------------------------------------------------------------------------------------------------------------

// The first `count` of sixteen numbers, from element `at` of x on, then zeros.
inline Lanes read(const void* x, Number type, int64_t at, int64_t count) {
    if (type == Number::float32) return load(static_cast<const float*>(x) + at, count);
    return load(static_cast<const uint16_t*>(x) + at, count);
}

// The 32 columns of a super-block as bfloat16: bytes of one part. The parts of a super-block follow each other.
constexpr int64_t part_bytes = block_columns * 2;

typedef uint16_t Words __attribute__((vector_size(32), may_alias));

// Sixteen columns as bfloat16: quad c of four becomes the pairs (c, c + 2), (c + 1, c + 3), as codes lie in a dword.
inline void store_pairs(uint8_t* to, Lanes x, int parts) {
    for (int i = 0; i < parts; i++) {
        const Dwords high = (Dwords)x & 0xffff0000u;
        Words words;
        store_words(reinterpret_cast<uint16_t*>(&words), high >> 16);
        words = __builtin_shufflevector(words, words, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        std::memcpy(to + i * part_bytes, &words, sizeof words);
        x -= (Lanes)high;  // exact
    }
}

// Whether numbers are multiplied in pairs of bfloat16, else as floats.
#if defined(__AVX512BF16__)
constexpr bool in_pairs = true;
#else
constexpr bool in_pairs = false;
#endif

// Sixteen columns of a token, from i on, to where it is arranged. `parts`: of a pair.
inline void store_columns(uint8_t* to, int64_t i, Lanes x, int parts) {
    if (in_pairs)
        store_pairs(to + i / block_columns * parts * part_bytes + i % block_columns * 2, x, parts);
    else
        store_vector(to + i * sizeof(float), x);
}

}  // namespace
}  // namespace ptq::tiles
