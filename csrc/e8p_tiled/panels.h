// Weights of a few row tiles side by side, in the steps of gemm/panels_kernels.h. Included once per level, into an
// anonymous namespace.
#pragma once

#include "common/bits.h"
#include "e8p_tiled/kernels.h"
#include "e8p_tiled/numbers.h"

namespace ptq::e8p_tiled {
namespace {

// Calls write(quad of weights, to) for every quad of a panel; its `steps` steps begin at `to`.
template <int bits, int steps, class Write>
PTQ_INLINE void over_panel(const Weight& w, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel,
                           const Write& write) {
    const Points<bits> points(tables());
    for (int64_t r = 0; r < tiles; r++) {
        const uint8_t* block =
            w.tiles + (tile + r) * tile_bytes(w.k, bits) + column / block_columns * block_bytes(bits);
        auto* to = static_cast<uint32_t*>(panel) + r * tile_rows;
        for (int64_t c = column; c < end; c += block_columns, block += block_bytes(bits)) {
            Dwords weights[quads];
            points.unpack(block, weights);
#pragma GCC unroll 8
            for (int i = 0; i < quads; i++, to += steps * tiles * tile_rows) write(weights[i], to);
        }
    }
}

// For AMX less their offset: signed.
void unpack_bytes(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    with_bits<2, 3, 4>(w.bits, [&]<int bits>() {
        over_panel<bits, 1>(w, tile, tiles, column, end, panel, [&](const Dwords& weights, uint32_t* to) {
#if defined(__AMX_INT8__)
            const __m512i offset = _mm512_set1_epi8(static_cast<char>(offset_of(bits)));
            store_vector(to, _mm512_sub_epi8((__m512i)weights, offset));
#else
            store_vector(to, weights);
#endif
        });
    });
}

[[maybe_unused]] void unpack_floats(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end,
                                    void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    with_bits<2, 3, 4>(w.bits, [&]<int bits>() {
        over_panel<bits, 4>(w, tile, tiles, column, end, panel, [&](const Dwords& weights, uint32_t* to) {
            Dwords numbers[4];
            to_floats<bits>(weights, numbers);
            for (int j = 0; j < 4; j++) store_vector(to + j * tiles * tile_rows, numbers[j]);
        });
    });
}

#if defined(__AVX512BF16__)
[[maybe_unused]] void unpack_pairs(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end,
                                   void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    with_bits<2, 3, 4>(w.bits, [&]<int bits>() {
        over_panel<bits, 2>(w, tile, tiles, column, end, panel, [&](const Dwords& weights, uint32_t* to) {
            Dwords pairs[2];
            to_pairs<bits>(weights, pairs);
            store_vector(to, pairs[0]), store_vector(to + tiles * tile_rows, pairs[1]);
        });
    });
}
#else
constexpr gemm::Unpack unpack_pairs = nullptr;
#endif

}  // namespace
}  // namespace ptq::e8p_tiled
