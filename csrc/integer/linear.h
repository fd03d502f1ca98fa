// y = x Wᵀ of one level, included by kernel.h. Eight codes are `bits` bytes, so they are one lane's share of a block of
// 16 x 8 = 128 codes: the plain bytes on disk are decoded sixteen codes at a time by shifts, without any repacking. x
// is put into that order first (`arrange`).
//
// An output is always the same sum, whatever the level, the batch and the threads: weights are exact float32 numbers,
// lane l adds those with (i / 8) % 16 == l in order of i, with fused multiply-adds, then `sum` adds the lanes.
#pragma once

#include "common/lanes.h"
#include "integer/kernels.h"

namespace ptq::integer {

using namespace vectors;
namespace {

// lane l, vector j of a block <- x[8 l + j]; zeros beyond k, so that what is decoded there does not count.
void arrange(const Linear& p, int64_t first, int64_t last) {
    const int64_t width = arranged_width(p.k);
    for (int64_t token = first; token < last; token++) {
        const float* from = p.x + token * p.k;
        float* to = p.arranged + token * arranged_stride(p.k);
        for (int64_t i = 0; i + block <= p.k; i += block)
            for (int64_t l = 0; l < lanes; l++)
                for (int64_t j = 0; j < 8; j++) to[i + j * lanes + l] = from[i + l * 8 + j];
        const int64_t rest = p.k / block * block;
        for (int64_t i = rest; i < width; i++) to[rest + i % 8 * lanes + (i - rest) / 8] = i < p.k ? from[i] : 0.0f;
    }
}

// --- decoding --------------------------------------------------------------------------------------------------------

// The eight codes of each lane: all of them in `low`, or from five bits on, four and four.
struct Words {
    Dwords low, high;
};

template <int bits>
inline Words words(const uint8_t* from) {
    constexpr int size = bits < 4 ? bits : 4, second = bits / 2;
#if defined(__AVX512VBMI__)
    if constexpr (bits != 4) {
        constexpr int bytes = 16 * bits, behind = bytes < 64 ? 0 : bytes - 64;  // two loads cover the block
        alignas(64) static constexpr auto table = [] {
            std::array<uint8_t, 128> at{};
            for (int i = 0; i < 128; i++) {
                const int place = i / 4 % 16 * bits + (i < 64 ? 0 : second) + i % 4;
                at[i] = static_cast<uint8_t>(place < 64 ? place : 64 + place - behind);
            }
            return at;
        }();
        const __m512i low = _mm512_load_si512(table.data());
        if constexpr (bits < 4) {  // a byte of the next lane may follow: nobody looks at it
            const __m512i x = _mm512_maskz_loadu_epi8((1ull << bytes) - 1, from);
            return {(Dwords)(_mm512_maskz_permutexvar_epi8(~0ull, low, x)), Dwords{}};
        } else {
            const __m512i x = _mm512_loadu_si512(from), y = _mm512_loadu_si512(from + behind);
            const __m512i high = _mm512_load_si512(table.data() + 64);
            return {(Dwords)(_mm512_permutex2var_epi8(x, low, y)), (Dwords)(_mm512_permutex2var_epi8(x, high, y))};
        }
    }
#endif
    Words w{};
    if constexpr (bits == 4) {
        w.low = load_vector<Dwords>(from);
    } else {
        for (int l = 0; l < lanes; l++) {
            uint32_t low = 0, high = 0;
            std::memcpy(&low, from + l * bits, size);
            if (bits > 4) std::memcpy(&high, from + l * bits + second, bits - second);
            w.low[l] = low, w.high[l] = high;
        }
    }
    return w;
}

// The numbers at places 0 .. 2^bits - 1 of a table, which repeats up to sixteen: a look-up needs no mask.
template <int bits>
constexpr bool looked_up = gathers && bits <= 4;

// Code j of each lane, as a number; where there are look-ups, as its entry of `table`.
template <int bits>
inline Lanes numbers(const Words& w, int j, [[maybe_unused]] Lanes table) {
    const Dwords code = bits <= 4 || j < 4 ? w.low >> bits * j : w.high >> (4 * bits % 8 + bits * (j - 4));
    if constexpr (looked_up<bits>) return picked(table, code);
    return converted<Lanes>((SignedInts)(code & ((1u << bits) - 1)));
}

template <int bits>
inline Lanes all_codes() {
    Lanes x;
    for (int i = 0; i < lanes; i++) x[i] = static_cast<float>(i & ((1 << bits) - 1));
    return x;
}

// --- scales ----------------------------------------------------------------------------------------------------------

// A weight is code * scale + offset: exact, for scale and zero have eight bits each.
struct Affine {
    Lanes scale, offset;
};

inline Affine affine(const Linear& p, int64_t at) {
    const float scale = from_bfloat16(p.scale[at]);
    return {fill(scale), fill(-scale * (p.zero ? p.zero[at] : static_cast<float>(1 << (p.bits - 1))))};
}

// Sixteen numbers from `at` on, or as many as there are.
template <class T>
inline Dwords load_integers(const T* from, int64_t count) {
    return widened(from, std::min(count, lanes));
}

// Each lane's own group, for groups of whole lanes; `place[l]` counts from the group at the block's start.
inline Affine affine(const Linear& p, int64_t at, const uint8_t* place) {
    const int64_t count = p.n * p.groups - at;
    const Dwords lane = load_integers(place, lanes);
    const Dwords bits = load_integers(p.scale + at, count) << 16;
    const Lanes scale = picked((Lanes)bits, lane);
    if (!p.zero) return {scale, scale * -static_cast<float>(1 << (p.bits - 1))};
    const SignedInts zero = (SignedInts)load_integers(p.zero + at, count);
    return {scale, -scale * picked(converted<Lanes>(zero), lane)};
}

// Whether decoding takes so few instructions that a few tokens want it in their inner loop.
template <int bits>
#if defined(__AVX512VBMI__)
constexpr bool in_registers = true;
#else
constexpr bool in_registers = looked_up<4> && bits == 4;
#endif

// Where each lane of each block finds its group, counted from the group at the block's start.
inline std::vector<uint8_t> places(const Linear& p) {
    std::vector<uint8_t> place(arranged_width(p.k) / 8);
    for (int64_t i = 0; i < p.k; i += 8) place[i / 8] = static_cast<uint8_t>(i / p.size - i / block * block / p.size);
    return place;
}

// --- few tokens: decode and multiply in registers --------------------------------------------------------------------

template <int bits, int tokens, int rows, bool one_group>
void few(const Linear& p, const uint8_t* place, int64_t row, int64_t token) {
    const int64_t bytes = packed_size(p.k, bits), stride = arranged_stride(p.k);
    Lanes total[rows][tokens]{}, table[rows];
    Affine a[rows];
    const float* x = p.arranged + token * stride;
    const uint8_t* from[rows];
    int64_t at[rows], group = 0, group_end = 0;  // of block i
    for (int r = 0; r < rows; r++) {
        const int64_t mine = std::min(row + r, p.n - 1);  // beyond the last row: once more, and not written
        from[r] = p.codes + mine * bytes, at[r] = mine * p.groups, table[r] = all_codes<bits>();
    }
    const auto step = [&](int64_t i, const Words* w) {
        if (!one_group || i == group_end) {
            group = i / p.size, group_end = i + p.size;
            for (int r = 0; r < rows; r++) {
                a[r] = one_group ? affine(p, at[r] + group) : affine(p, at[r] + group, place + i / 8);
                if (one_group && looked_up<bits>) table[r] = fma(all_codes<bits>(), a[r].scale, a[r].offset);
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                Lanes v = numbers<bits>(w[r], j, table[r]);
                if (!one_group || !looked_up<bits>) v = fma(v, a[r].scale, a[r].offset);
#pragma GCC unroll 4
                for (int t = 0; t < tokens; t++)
                    total[r][t] = fma(v, load(x + t * stride + i + j * lanes), total[r][t]);
            }
    };
    Words w[rows];
    int64_t i = 0;
    for (; i + block <= p.k; i += block) {
        for (int r = 0; r < rows; r++) {
            const uint8_t* here = from[r] + i / 8 * bits;
            // The same place of the rows that come next: a thread's rows are one run of memory.
            for (int line = 0; line < 16 * bits; line += 64) __builtin_prefetch(here + rows * bytes + line);
            w[r] = words<bits>(here);
        }
        step(i, w);
    }
    if (i < p.k) {
        for (int r = 0; r < rows; r++) {
            uint8_t rest[16 * bits]{};
            std::memcpy(rest, from[r] + i / 8 * bits, bytes - i / 8 * bits);
            w[r] = words<bits>(rest);
        }
        step(i, w);
    }
    for (int t = 0; t < tokens; t++)
        for (int64_t r = 0; r < std::min<int64_t>(rows, p.n - row); r++)
            p.out[(token + t) * p.n + row + r] = sum(total[r][t]) + (p.bias ? p.bias[row + r] : 0.0f);
}

template <int bits, bool one_group>
void few_tokens(const Linear& p, int64_t first, int64_t last) {
    const std::vector<uint8_t> place = places(p);
    last = std::min(last * panel_rows, p.n);
    if (p.t == 1)
        for (int64_t row = first * panel_rows; row < last; row += 8)
            few<bits, 1, 8, one_group>(p, place.data(), row, 0);
    else
        for (int64_t row = first * panel_rows; row < last; row += 4)
            for (int64_t token = 0; token < p.t; token += 4) {  // codes of four rows stay in the first-level cache
                constexpr decltype(&few<bits, 1, 4, one_group>) of[] = {
                    few<bits, 1, 4, one_group>, few<bits, 2, 4, one_group>, few<bits, 3, 4, one_group>,
                    few<bits, 4, 4, one_group>};
                of[std::min<int64_t>(4, p.t - token) - 1](p, place.data(), row, token);
            }
}

}  // namespace
}  // namespace ptq::integer
