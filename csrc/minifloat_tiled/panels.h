// Numbers of a few row tiles side by side, in the steps of gemm/panels_kernels.h. Included once per level, by decode.h.
#pragma once

#include "common/bits.h"
#include "minifloat_tiled/lookup.h"

namespace ptq::minifloat_tiled {
namespace {

// The super-block of a row tile that begins at a column.
inline const uint8_t* block_at(const Weight& w, int64_t tile, int64_t column) {
    return tile_of(w, tile) + column / block_columns * block_bytes(w.element->bits);
}

[[maybe_unused]] void unpack_floats(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end,
                                    void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    with_bits<4, 5, 6, 7>(w.element->bits, [&]<int bits>() {
        const Values<bits> values(*w.element);
        for (int64_t r = 0; r < tiles; r++) {
            const uint8_t* block = block_at(w, tile + r, column);
            auto* to = static_cast<float*>(panel) + r * tile_rows;
            for (int64_t c = column; c < end; c += block_columns, block += block_bytes(bits))
                over_quads<bits>(block, [&]<int i>(Dwords codes) {
                    values.columns(codes, [&]<int j>(const Lanes& x) {
                        store_vector(to + j * tiles * tile_rows, x * values.factor);
                    });
                    to += 4 * tiles * tile_rows;
                });
        }
    });
}

#if defined(__AVX512BF16__)
[[maybe_unused]] void unpack_pairs(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end,
                                   void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    with_bits<4, 5, 6, 7>(w.element->bits, [&]<int bits>() {
        const Pairs<bits> pairs(*w.element);
        for (int64_t r = 0; r < tiles; r++) {
            const uint8_t* block = block_at(w, tile + r, column);
            auto* to = static_cast<uint32_t*>(panel) + r * tile_rows;
            for (int64_t c = column; c < end; c += block_columns, block += block_bytes(bits))
                over_quads<bits>(block, [&]<int i>(Dwords codes) {
                    store_vector(to, (Dwords)pairs.template at<false>(codes)), to += tiles * tile_rows;
                    store_vector(to, (Dwords)pairs.template at<true>(codes)), to += tiles * tile_rows;
                });
        }
    });
}
#else
constexpr gemm::Unpack unpack_pairs = nullptr;
#endif

void unpack_bytes(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    ElementTable element = *w.element;
#if defined(__AMX_INT8__)
    for (uint8_t& byte : element.byte) byte -= byte_offset;
#endif
    with_bits<4, 5, 6, 7>(element.bits, [&]<int bits>() {
        const Bytes<bits> bytes(element);
        for (int64_t r = 0; r < tiles; r++) {
            const uint8_t* block = block_at(w, tile + r, column);
            auto* to = static_cast<uint32_t*>(panel) + r * tile_rows;
            for (int64_t c = column; c < end; c += block_columns, block += block_bytes(bits))
                over_quads<bits>(block,
                                 [&]<int i>(Dwords codes) { store_vector(to, bytes(codes)), to += tiles * tile_rows; });
        }
    });
}

}  // namespace
}  // namespace ptq::minifloat_tiled
