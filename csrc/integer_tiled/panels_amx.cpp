// Integer weights in the panels of gemm/amx.h.
#if defined(__x86_64__)
#include "gemm/panels_kernels.h"
#include "integer_tiled/decode_lanes.h"
#include "integer_tiled/kernels.h"
#include "integer_tiled/pairs.h"

namespace ptq::integer_tiled {
namespace {

// Calls f.operator()<bits>().
template <class F>
void with_bits(int bits, const F& f) {
    [&]<int... i>(std::integer_sequence<int, i...>) {
        ((bits == i + 2 ? f.template operator()<i + 2>() : void()), ...);
    }(std::make_integer_sequence<int, 7>{});
}

// Calls write.operator()<bits>(codes, to, row tile, column) for every quad of a panel; `to` is where its steps begin.
template <class Write>
void over_panel(const Weight& w, int64_t tile, int64_t tiles, int64_t column, int64_t end, int64_t steps, void* panel,
                const Write& write) {
    with_bits(w.bits, [&]<int bits>() {
        for (int64_t r = 0; r < tiles; r++) {
            const uint8_t* block =
                w.tiles + (tile + r) * tile_bytes(w.k, bits) + column / block_columns * block_bytes(bits);
            auto* to = static_cast<uint32_t*>(panel) + r * tile_rows;
            for (int64_t c = column; c < end; c += block_columns, block += block_bytes(bits))
                over_quads<bits>(block, [&]<int i>(const Dwords& codes) {
                    write.template operator()<bits>(codes, to, tile + r, c);
                    to += steps * tiles * tile_rows;
                });
        }
    });
}

void unpack_bytes(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    over_panel(w, tile, tiles, column, end, 1, panel,
               []<int bits>(const Dwords& codes, uint32_t* to, int64_t, int64_t) { store_vector(to, codes); });
}

// Bytes 0 and 2 of the dwords of codes, less zero.
Dwords differences(Dwords codes, SignedInts zero) {
    const Lanes first = converted<Lanes>((SignedInts)(codes & 0xffu) - zero);
    const Lanes second = converted<Lanes>((SignedInts)(codes >> 16 & 0xffu) - zero);
    return (Dwords)first >> 16 | ((Dwords)second & 0xffff0000u);
}

void unpack_pairs(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    over_panel(w, tile, tiles, column, end, 2, panel,
               [&]<int bits>(const Dwords& codes, uint32_t* to, int64_t row_tile, int64_t c) {
                   uint32_t* next = to + tiles * tile_rows;
                   if (bits <= 6 && !w.zero) {
                       static const Table<bits> table;
                       store_vector(to, (Dwords)table.pairs((__m512i)codes));
                       store_vector(next, (Dwords)table.pairs((__m512i)(codes >> 8)));
                       return;
                   }
                   const int64_t group = row_tile * w.groups + c / (w.group_blocks * block_columns);
                   const SignedInts zero =
                       w.zero ? load_zero(w.zero + group * tile_rows) : SignedInts{} + (1 << (bits - 1));
                   store_vector(to, differences(codes, zero));
                   store_vector(next, differences(codes >> 8, zero));
               });
}

}  // namespace

extern const gemm::PanelUnpack panels_amx;
const gemm::PanelUnpack panels_amx{unpack_bytes, unpack_pairs};

}  // namespace ptq::integer_tiled
#endif
