// Integer weights in the panels of gemm/amx.h.
#if defined(__x86_64__)
#include "integer_tiled/panels.h"

namespace ptq::integer_tiled {
namespace {

// Codes less 2^(bits - 1): signed bytes.
void unpack_bytes(const void* weight, int64_t tile, int64_t tiles, int64_t column, int64_t end, void* panel) {
    const auto& w = *static_cast<const Weight*>(weight);
    with_bits(w.bits, [&]<int bits>() {
        const __m512i offset = _mm512_set1_epi8(static_cast<char>(1 << (bits - 1)));
        over_panel<bits, 1>(w, {tile, tiles, column, end, panel},
                            [&](const Dwords& codes, uint32_t* to, int64_t, int64_t) __attribute__((always_inline)) {
                                store_vector(to, _mm512_sub_epi8((__m512i)codes, offset));
                            });
    });
}

}  // namespace

extern const gemm::Unpack signed_bytes_amx;
const gemm::Unpack signed_bytes_amx = unpack_bytes;

}  // namespace ptq::integer_tiled
#endif
