// Integer weights in the panels of gemm/amx.h.
#if defined(__x86_64__)
#include "gemm/panels_kernels.h"
#include "integer_tiled/decode_lanes.h"
#include "integer_tiled/kernels.h"
#include "integer_tiled/pairs.h"

namespace ptq::integer_tiled {
namespace {

// Where the steps of a panel go.
struct Place {
    int64_t tile, tiles, column, end;
    void* panel;
};

// Calls write(codes, to, row tile, column) for every quad of a panel; its `steps` steps begin at `to`.
template <int bits, int steps, class Write>
PTQ_INLINE void over_panel(const Weight& w, const Place& p, const Write& write) {
    for (int64_t r = 0; r < p.tiles; r++) {
        const uint8_t* block =
            w.tiles + (p.tile + r) * tile_bytes(w.k, bits) + p.column / block_columns * block_bytes(bits);
        auto* to = static_cast<uint32_t*>(p.panel) + r * tile_rows;
        for (int64_t c = p.column; c < p.end; c += block_columns, block += block_bytes(bits))
            over_quads<bits>(block, [&]<int i>(const Dwords& codes) __attribute__((always_inline)) {
                write(codes, to, p.tile + r, c);
                to += steps * p.tiles * tile_rows;
            });
    }
}

// Less 2^(bits - 1): signed bytes.
template <int bits>
void bytes_of(const Weight& w, const Place& p) {
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(1 << (bits - 1)));
    over_panel<bits, 1>(w, p, [&](const Dwords& codes, uint32_t* to, int64_t, int64_t) __attribute__((always_inline)) {
        store_vector(to, _mm512_sub_epi8((__m512i)codes, offset));
    });
}

// Bytes 0 and 2 of the dwords of codes, less zero.
PTQ_INLINE Dwords differences(Dwords codes, SignedInts zero) {
    const Lanes first = converted<Lanes>((SignedInts)(codes & 0xffu) - zero);
    const Lanes second = converted<Lanes>((SignedInts)(codes >> 16 & 0xffu) - zero);
    return (Dwords)first >> 16 | ((Dwords)second & 0xffff0000u);
}

template <int bits>
void pairs_of(const Weight& w, const Place& p) {
    const int64_t next = p.tiles * tile_rows;
    if (bits <= 6 && !w.zero) {
        static const Table<bits> made;
        const Table<bits> table = made;
        over_panel<bits, 2>(w, p,
                            [&](const Dwords& codes, uint32_t* to, int64_t, int64_t) __attribute__((always_inline)) {
                                store_vector(to, (Dwords)table.pairs((__m512i)codes));
                                store_vector(to + next, (Dwords)table.pairs((__m512i)(codes >> 8)));
                            });
        return;
    }
    over_panel<bits, 2>(
        w, p, [&](const Dwords& codes, uint32_t* to, int64_t tile, int64_t c) __attribute__((always_inline)) {
            const int64_t group = tile * w.groups + c / (w.group_blocks * block_columns);
            const SignedInts zero = w.zero ? load_zero(w.zero + group * tile_rows) : SignedInts{} + (1 << (bits - 1));
            store_vector(to, differences(codes, zero));
            store_vector(to + next, differences(codes >> 8, zero));
        });
}

void unpack_bytes(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    constexpr decltype(&bytes_of<2>) of[] = {bytes_of<2>, bytes_of<3>, bytes_of<4>, bytes_of<5>,
                                             bytes_of<6>, bytes_of<7>, bytes_of<8>};
    const auto& w = *static_cast<const Weight*>(weight);
    of[w.bits - 2](w, {tile, tiles, column, end, panel});
}

void unpack_pairs(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    constexpr decltype(&pairs_of<2>) of[] = {pairs_of<2>, pairs_of<3>, pairs_of<4>, pairs_of<5>,
                                             pairs_of<6>, pairs_of<7>, pairs_of<8>};
    const auto& w = *static_cast<const Weight*>(weight);
    of[w.bits - 2](w, {tile, tiles, column, end, panel});
}

}  // namespace

extern const gemm::PanelUnpack panels_amx;
const gemm::PanelUnpack panels_amx{unpack_bytes, unpack_pairs};

}  // namespace ptq::integer_tiled
#endif
