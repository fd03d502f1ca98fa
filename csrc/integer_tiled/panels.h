// Codes of a few row tiles side by side, in the steps of gemm/panels_kernels.h. Included once per level, into an
// anonymous namespace.
#pragma once

#include "common/bits.h"
#include "gemm/block.h"
#include "integer_tiled/kernels.h"
#include "integer_tiled/pairs.h"
#include "tiles/few_tokens.h"

namespace ptq::integer_tiled {

using namespace tiles;
namespace {

// Where the steps of a panel go.
struct PanelSpan {
    int64_t tile, tiles, column, end;
    void* panel;
};

// Calls write(codes, to, of its group) for every quad of a panel; its `steps` steps begin at `to`. What of(row tile,
// group) gives is read once in a group: a compiler fears that steps overlap it.
template <int bits, int steps, class Of, class Write>
PTQ_INLINE void over_panel(const Weight& w, const PanelSpan& p, const Of& of, const Write& write) {
    for (int64_t r = 0; r < p.tiles; r++) {
        const uint8_t* block =
            w.tiles + (p.tile + r) * tile_bytes(w.k, bits) + p.column / block_columns * block_bytes(bits);
        auto* to = static_cast<uint32_t*>(p.panel) + r * tile_rows;
        for (int64_t c = p.column, end; c < p.end; c = end) {
            const int64_t group = c / (w.group_blocks * block_columns);
            const auto here = of(p.tile + r, group);
            end = std::min(p.end, (group + 1) * w.group_blocks * block_columns);
            for (int64_t i = c; i < end; i += block_columns, block += block_bytes(bits))
                over_quads<bits>(block, [&]<int i>(const Dwords& codes) __attribute__((always_inline)) {
                    write(codes, to, here);
                    to += steps * p.tiles * tile_rows;
                });
        }
    }
}

struct Nothing {};
constexpr auto nothing_at = [](int64_t, int64_t) { return Nothing{}; };

// --- bytes -----------------------------------------------------------------------------------------------------------

// Integer scales: (code - 2^(bits - 1)) * multiple, for all levels but AMX 128 more. Codes times multiples fit into
// bytes, so words of several are multiplied; codes of a negative multiple are turned around for it.
#if defined(__AVX512BW__)
struct Multiples {
    __m512i turn, multiple, offset;

    PTQ_INLINE Dwords of(const Dwords& codes) const {
        const __m512i products = _mm512_mullo_epi16(_mm512_xor_si512((__m512i)codes, turn), multiple);
        return (Dwords)_mm512_add_epi8(products, offset);
    }
};
#else  // what bytes carry into each other cancels out, as in the end they fit
struct Multiples {
    Dwords multiple, offset;

    PTQ_INLINE Dwords of(const Dwords& codes) const { return codes * multiple + offset; }
};
#endif

template <int bits>
PTQ_INLINE Multiples multiples_at(const Weight& w, int64_t tile, int64_t group) {
    constexpr int middle = 1 << (bits - 1);
    const SignedInts multiple = load_multiples(w.multiples, w.groups, tile, group);
#if defined(__AVX512BW__)
#if defined(__AMX_INT8__)
    constexpr uint32_t more = 0;
#else
    constexpr uint32_t more = 128;
#endif
    const SignedInts negative = multiple >> 31, size = (multiple ^ negative) - negative;
    const auto offset = (Dwords)(size * (middle + negative));
    return {(__m512i)((Dwords)negative & every_byte<bits>()), (__m512i)((Dwords)size * 0x10001u),
            (__m512i)(((more - offset) & 0xffu) * 0x01010101u)};
#else
    return {(Dwords)multiple, (128u - (Dwords)multiple * middle) * 0x01010101u};
#endif
}

template <int bits>
void multiplied_bytes(const Weight& w, const PanelSpan& p) {
    over_panel<bits, 1>(
        w, p, [&](int64_t tile, int64_t group) { return multiples_at<bits>(w, tile, group); },
        [&](const Dwords& codes, uint32_t* to, const Multiples& multiples)
            __attribute__((always_inline)) { store_vector(to, multiples.of(codes)); });
}

// For AMX less 2^(bits - 1): signed.
void unpack_bytes(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    with_bits<2, 3, 4, 5, 6, 7, 8>(w.bits, [&]<int bits>() {
        if constexpr (bits <= most_multiplied)
            if (w.multiples) return multiplied_bytes<bits>(w, {tile, tiles, column, end, panel});
        over_panel<bits, 1>(w, {tile, tiles, column, end, panel}, nothing_at,
                            [&](const Dwords& codes, uint32_t* to, Nothing) __attribute__((always_inline)) {
#if defined(__AMX_INT8__)
                                const __m512i offset = _mm512_set1_epi8(static_cast<char>(1 << (bits - 1)));
                                store_vector(to, _mm512_sub_epi8((__m512i)codes, offset));
#else
                                store_vector(to, codes);
#endif
                            });
    });
}

// Codes where they lie in the weight.
template <int bits>
struct InPlace {
    using Sum = SignedInts;
    static constexpr int64_t x_step = quads * gemm::quad_tokens;
    template <int tiles>
    static constexpr int64_t codes_step = block_bytes(bits);

    template <int tiles, int tokens>
    PTQ_INLINE static void multiply(const uint8_t* codes, int64_t tile_step, const uint32_t* x,
                                    SignedInts sum[tokens][tiles]) {
        multiply_quads<bits, tiles, tokens>(
            [&]<int i>(int r) __attribute__((always_inline)) { return quad_of<bits, i>(codes + r * tile_step); }, x,
            gemm::quad_tokens, sum);
    }
};

template <int bits, class Total = Lanes>
[[maybe_unused]] void direct(const void* block, [[maybe_unused]] int tiles, int64_t tokens) {
    const auto& b = *static_cast<const gemm::Block*>(block);
    const auto multiply = [&]<int count>() {
        if (tokens <= 2) return gemm::multiply_block<InPlace<bits>, count, 2, Total>(b);
        if (tokens <= 4) return gemm::multiply_block<InPlace<bits>, count, 4, Total>(b);
        gemm::multiply_block<InPlace<bits>, count, gemm::quad_tokens, Total>(b);
    };
#if defined(__AVX512F__)
    if (tiles == 3) return multiply.template operator()<3>();
    if (tiles == 2) return multiply.template operator()<2>();
#endif
    multiply.template operator()<1>();
}

// Up to here a panel costs more: measured on Zen 5 (integer scales: Zen 4); with four row tiles on Intel's. Elsewhere
// codes of eight bits are in no panel: they take another path without VNNI.
constexpr int64_t few = gemm::quad_tiles == 4 ? 16 : 32, few_bytes = gemm::quad_tiles == 4 ? 32 : INT64_MAX;

// --- numbers ---------------------------------------------------------------------------------------------------------

// Codes less their zero, which are exact, in bfloat16 too.
inline SignedInts zero_at(const Weight& w, int64_t tile, int64_t group) {
    if (!w.zero) return SignedInts{} + (1 << (w.bits - 1));
    return load_zero(w.zero + (tile * w.groups + group) * tile_rows);
}

// Byte j of the dwords of codes, less zero.
template <int j>
PTQ_INLINE Lanes difference(const Dwords& codes, const SignedInts& zero) {
    return converted<Lanes>((SignedInts)(codes >> 8 * j & 0xffu) - zero);
}

#if defined(__AVX2__)
template <int bits>
void floats_of_panel(const Weight& w, const PanelSpan& p) {
    const int64_t next = p.tiles * tile_rows;
    over_panel<bits, 4>(
        w, p, [&](int64_t tile, int64_t group) { return zero_at(w, tile, group); },
        [&](const Dwords& codes, uint32_t* to, const SignedInts& zero) __attribute__((always_inline)) {
            store_vector(to, difference<0>(codes, zero));
            store_vector(to + next, difference<1>(codes, zero));
            store_vector(to + 2 * next, difference<2>(codes, zero));
            store_vector(to + 3 * next, difference<3>(codes, zero));
        });
}

[[maybe_unused]] void unpack_floats(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end,
                                    void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    with_bits<2, 3, 4, 5, 6, 7, 8>(w.bits,
                                   [&]<int bits>() { floats_of_panel<bits>(w, {tile, tiles, column, end, panel}); });
}
#else  // the kernel for few tokens is faster
constexpr gemm::Unpack unpack_floats = nullptr;
#endif

#if defined(__AVX512BF16__)
// Bytes 0 and 2 of the dwords of codes, less zero.
PTQ_INLINE Dwords differences(const Dwords& codes, const SignedInts& zero) {
    return (Dwords)difference<0>(codes, zero) >> 16 | ((Dwords)difference<2>(codes, zero) & 0xffff0000u);
}

template <int bits>
void pairs_of_panel(const Weight& w, const PanelSpan& p) {
    const int64_t next = p.tiles * tile_rows;
    if (bits <= 6 && !w.zero) {
        static const Table<bits> made;
        const Table<bits> table = made;
        over_panel<bits, 2>(w, p, nothing_at,
                            [&](const Dwords& codes, uint32_t* to, Nothing) __attribute__((always_inline)) {
                                store_vector(to, (Dwords)table.pairs((__m512i)codes));
                                store_vector(to + next, (Dwords)table.pairs((__m512i)(codes >> 8)));
                            });
        return;
    }
    over_panel<bits, 2>(
        w, p, [&](int64_t tile, int64_t group) { return zero_at(w, tile, group); },
        [&](const Dwords& codes, uint32_t* to, const SignedInts& zero) __attribute__((always_inline)) {
            store_vector(to, differences(codes, zero));
            store_vector(to + next, differences(codes >> 8, zero));
        });
}

[[maybe_unused]] void unpack_pairs(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end,
                                   void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    with_bits<2, 3, 4, 5, 6, 7, 8>(w.bits,
                                   [&]<int bits>() { pairs_of_panel<bits>(w, {tile, tiles, column, end, panel}); });
}
#else
constexpr gemm::Unpack unpack_pairs = nullptr;
#endif

}  // namespace
}  // namespace ptq::integer_tiled
