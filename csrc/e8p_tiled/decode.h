// The kernels for few tokens, of one level: included after PTQ_LEVEL, the name of its table, is defined. A row tile is
// read once, for up to four tokens at a time.
#include <utility>

#include "common/fetch.h"
#include "e8p_tiled/kernels.h"
#include "e8p_tiled/numbers.h"
#include "tiles/few_tokens.h"
#include "tiles/sums.h"

namespace ptq::e8p_tiled {
namespace {

using tiles::dot;
using tiles::load_bias;
using tiles::over_tokens;
using tiles::store_result;

constexpr int64_t ahead = 8192;  // bytes that are fetched before they are needed: measured on Zen 5

inline void fetch(const uint8_t* block, int64_t bytes) {
    fetch_ahead(block, bytes, ahead);
}

// --- quantised tokens ------------------------------------------------------------------------------------------------

// The sum of some integers.
inline int32_t sum_of(const int8_t* q, int64_t count) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += q[i];
    return sum;
}

typedef int8_t Columns __attribute__((vector_size(32)));

template <int... i>
inline Columns in_order(Columns x, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(x, x, column_of(i / 4, i % 4)...);
}

void arrange_tokens(const ArrangedTokens& p, int64_t first, int64_t last) {
    const int64_t width = blocks_in(p.k) * block_columns;
    for (int64_t t = first; t < last; t++) {
        const int8_t* q = p.q + t * p.k;
        p.offsets[t] = -p.offset * sum_of(q, p.k);
        for (int64_t c = 0; c < width; c += block_columns) {
            Columns x{};
            if (c + block_columns <= p.k)
                std::memcpy(&x, q + c, sizeof x);
            else
                std::memcpy(&x, q + c, p.k - c);
            x = in_order(x, std::make_integer_sequence<int, block_columns>{});
            std::memcpy(p.to + t * width + c, &x, sizeof x);
        }
    }
}

// The integers of a row tile, without the offset.
template <int bits, int tokens>
inline void integers(const Points<bits>& points, const uint8_t* block, int64_t blocks, const int8_t* q, int64_t stride,
                     SignedInts total[tokens]) {
    if (blocks == 0) return static_cast<void>(std::fill_n(total, tokens, SignedInts{}));
    tiles::IntegerSums<tokens> sums;
    auto begun = points.begin(block);
    for (int64_t b = 0; b < blocks; b++, q += block_columns) {
        fetch(block, block_bytes(bits));
        Dwords weights[quads];
        points.end(begun, weights);
        block += b + 1 < blocks ? block_bytes(bits) : 0;
        begun = points.begin(block);
#pragma GCC unroll 8
        for (int i = 0; i < quads; i++) sums.template add<are_wide(bits)>(i, weights[i], q + 4 * i, stride);
    }
    sums.total(total);
}

template <int bits, int tokens>
void quantized_tile(const Quantized& p, const Points<bits>& points, int64_t tile, int64_t from) {
    const int64_t blocks = blocks_in(p.w.k), stride = blocks * block_columns;
    const uint8_t* block = p.w.tiles + tile * tile_bytes(p.w.k, bits);
    const int8_t* q = p.q + from * stride;
    SignedInts total[tokens];
    integers<bits, tokens>(points, block, blocks, q, stride, total);
    const int64_t row = tile * tile_rows, count = std::min(tile_rows, p.w.n - row);
    const Lanes bias = load_bias(p.bias, row, count);
    for (int t = 0; t < tokens; t++) {
        const Lanes sum = converted<Lanes>(total[t] + p.offsets[from + t]);
        Lanes y = p.w.scale * sum * p.q_scale[from + t];
        if (p.bias) y += bias;
        store_result(p.out, p.out_type, (from + t) * p.w.n + row, y, count);
    }
}

template <int bits>
void quantized_of(const Quantized& p, int64_t first, int64_t last) {
    const Points<bits> points(tables());
    over_tokens(p.t, first, last,
                [&]<int tokens>(int64_t tile, int64_t t) { quantized_tile<bits, tokens>(p, points, tile, t); });
}

void quantized(const Quantized& p, int64_t first, int64_t last) {
    constexpr decltype(&quantized_of<2>) of[] = {quantized_of<2>, quantized_of<3>, quantized_of<4>};
    of[p.w.bits - 2](p, first, last);
}

}  // namespace
}  // namespace ptq::e8p_tiled

#include "e8p_tiled/decode_floats.h"
#include "e8p_tiled/panels.h"

namespace ptq::e8p_tiled {

const Kernels PTQ_LEVEL{arrange_tokens, quantized,     arrange_floats, floats,      dequantize,
                        few_form,       unpack_floats, unpack_pairs,   unpack_bytes};

}  // namespace ptq::e8p_tiled
