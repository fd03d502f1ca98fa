// E8P weights in the panels of gemm/amx.h.
#if defined(__x86_64__)
#include "e8p_tiled/kernels.h"
#include "e8p_tiled/numbers.h"
#include "gemm/panels_kernels.h"

namespace ptq::e8p_tiled {
namespace {

// Calls write(quad of weights, to), which returns where the next steps go.
template <int bits, class Write>
void over_panel(const Weight& w, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel,
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
            for (int i = 0; i < quads; i++) to = write(weights[i], to);
        }
    }
}

// Signed bytes.
template <int bits>
void bytes_of(const Weight& w, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(offset_of(bits)));
    over_panel<bits>(w, tile, tiles, column, end, panel, [&](const Dwords& weights, uint32_t* to) {
        store_vector(to, _mm512_sub_epi8((__m512i)weights, offset));
        return to + tiles * tile_rows;
    });
}

template <int bits>
void pairs_of(const Weight& w, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    over_panel<bits>(w, tile, tiles, column, end, panel, [&](const Dwords& weights, uint32_t* to) {
        Dwords pairs[2];
        to_pairs<bits>(weights, pairs);
        for (const Dwords& pair : pairs) store_vector(to, pair), to += tiles * tile_rows;
        return to;
    });
}

void unpack_bytes(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    constexpr decltype(&bytes_of<2>) of[] = {bytes_of<2>, bytes_of<3>, bytes_of<4>};
    const auto& w = *static_cast<const Weight*>(weight);
    of[w.bits - 2](w, tile, tiles, column, end, panel);
}

void unpack_pairs(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    constexpr decltype(&pairs_of<2>) of[] = {pairs_of<2>, pairs_of<3>, pairs_of<4>};
    const auto& w = *static_cast<const Weight*>(weight);
    of[w.bits - 2](w, tile, tiles, column, end, panel);
}

}  // namespace

extern const gemm::PanelUnpack panels_amx;
const gemm::PanelUnpack panels_amx{unpack_bytes, unpack_pairs};

}  // namespace ptq::e8p_tiled
#endif
