// The kernels for few tokens, of one level: included after PTQ_LEVEL, the name of its table, is defined.
// Sixteen rows lie in the sixteen lanes of a vector; a row tile is read once, for up to four tokens at a time.
#include "integer_tiled/kernels.h"
#include "tiles/few_tokens.h"

namespace ptq::integer_tiled {

using namespace tiles;
namespace {

// --- quantised tokens ------------------------------------------------------------------------------------------------

void sums(const Sums& p, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        for (int64_t g = 0; g < p.groups; g++) {
            const int8_t* q = p.q + t * p.q_stride + g * p.size;
            int32_t sum = 0;
            for (int64_t i = 0; i < p.size; i++) sum += q[i];
            p.sums[t * p.groups + g] = sum;
        }
}

// The integers of `blocks` super-blocks.
template <int bits, int tokens>
inline void integers(const uint8_t* block, int64_t blocks, const int8_t* q, int64_t stride, SignedInts total[tokens]) {
    constexpr int chains = integer_tiled::chains<tokens>;
    SignedInts acc[tokens][chains] = {};
    for (int64_t b = 0; b < blocks; b++, block += block_bytes(bits), q += block_columns) {
        fetch<load_of<bits, tokens>>(block, block_bytes(bits));
        BlockSum<bits> sum[tokens];
        over_quads<bits>(block, [&]<int i>(const Dwords& codes) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int t = 0; t < tokens; t++)
                sum[t].template add<i>(acc[t][i / BlockSum<bits>::together % chains], codes,
                                       load_int(q + t * stride + 4 * i));
        });
    }
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t++) {
        total[t] = acc[t][0];
        for (int c = 1; c < chains; c++) total[t] += acc[t][c];
    }
}

// A group of more than 65536 columns: its integers may need 64 bits.
template <int bits>
Lanes long_group(const Weight& w, const uint8_t* block, const int8_t* q, SignedInts zero, int64_t sum) {
    int64_t total[tile_rows];
    for (int r = 0; r < tile_rows; r++) total[r] = -zero[r] * sum;
    for (int64_t b = 0; b < w.group_blocks; b += segment_blocks) {
        SignedInts part[1];
        integers<bits, 1>(block + b * block_bytes(bits), std::min(segment_blocks, w.group_blocks - b),
                          q + b * block_columns, 0, part);
        for (int r = 0; r < tile_rows; r++) total[r] += part[0][r];
    }
    Lanes result;
    for (int r = 0; r < tile_rows; r++) result[r] = static_cast<float>(total[r]);
    return result;
}

template <int tokens>
void finish(const Quantized& p, const Lanes (&y)[tokens], int64_t tile, int64_t from) {
    const int64_t row = tile * tile_rows, count = std::min(tile_rows, p.w.n - row);
    const Lanes bias = load_bias(p.bias, row, count);
    for (int t = 0; t < tokens; t++) {
        Lanes result = y[t] * p.q_scale[from + t];
        if (p.bias) result += bias;
        store_result(p.out, p.out_type, (from + t) * p.w.n + row, result, count);
    }
}

// Integer scales: sums of rows stay integers.
template <int bits, int tokens>
void whole_tile(const Quantized& p, int64_t tile, int64_t from) {
    const Weight& w = p.w;
    const uint8_t* block = w.tiles + tile * w.groups * w.group_blocks * block_bytes(bits);
    const int8_t* q = p.q + from * p.q_stride;
    const Lanes step = load_steps(w.multiples, w.groups, tile);
    SignedInts sum[tokens] = {};
    for (int64_t g = 0; g < w.groups; g++) {
        const SignedInts multiple = load_multiples(w.multiples, w.groups, tile, g);
        SignedInts total[tokens];
        integers<bits, tokens>(block, w.group_blocks, q, p.q_stride, total);
        for (int t = 0; t < tokens; t++)
            sum[t] += multiple * (total[t] - (p.sums[(from + t) * w.groups + g] << (bits - 1)));
        block += w.group_blocks * block_bytes(bits);
        q += w.group_blocks * block_columns;
    }
    Lanes y[tokens];
    for (int t = 0; t < tokens; t++) y[t] = converted<Lanes>(sum[t]) * step;
    finish<tokens>(p, y, tile, from);
}

template <int bits, int tokens>
void quantized_tile(const Quantized& p, int64_t tile, int64_t from) {
    const Weight& w = p.w;
    if constexpr (bits <= most_multiplied)
        if (w.multiples) return whole_tile<bits, tokens>(p, tile, from);
    const uint8_t* block = w.tiles + tile * w.groups * w.group_blocks * block_bytes(bits);
    const int8_t* q = p.q + from * p.q_stride;
    Lanes y[tokens] = {};
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t at = tile * w.groups + g;
        const Lanes scale = load(w.scale + at * tile_rows);
        const SignedInts zero = w.zero ? load_zero(w.zero + at * tile_rows) : SignedInts{} + (1 << (bits - 1));
        const int32_t* sum = p.sums + from * w.groups + g;
        if (w.group_blocks > segment_blocks) [[unlikely]] {
            for (int t = 0; t < tokens; t++)
                y[t] += scale * long_group<bits>(w, block, q + t * p.q_stride, zero, sum[t * w.groups]);
        } else {
            SignedInts total[tokens];
            integers<bits, tokens>(block, w.group_blocks, q, p.q_stride, total);
            for (int t = 0; t < tokens; t++) y[t] += scale * converted<Lanes>(total[t] - zero * sum[t * w.groups]);
        }
        block += w.group_blocks * block_bytes(bits);
        q += w.group_blocks * block_columns;
    }
    finish<tokens>(p, y, tile, from);
}

template <int bits>
void quantized_of(const Quantized& p, int64_t first, int64_t last) {
    over_tokens(p.t, first, last,
                [&]<int tokens>(int64_t tile, int64_t t) { quantized_tile<bits, tokens>(p, tile, t); });
}

void quantized(const Quantized& p, int64_t first, int64_t last) {
    constexpr decltype(&quantized_of<2>) of[] = {quantized_of<2>, quantized_of<3>, quantized_of<4>, quantized_of<5>,
                                                 quantized_of<6>, quantized_of<7>, quantized_of<8>};
    of[p.w.bits - 2](p, first, last);
}

}  // namespace
}  // namespace ptq::integer_tiled

#include "integer_tiled/decode_floats.h"
#include "integer_tiled/panels.h"

namespace ptq::integer_tiled {

const Kernels PTQ_LEVEL{sums,
                        quantized,
                        arrange,
                        floats,
                        unpack_floats,
                        unpack_pairs,
                        unpack_bytes,
                        {{direct<2>, few}, {}, {direct<4>, few}, {}, {}, {}, {direct<8>, few_bytes}},
                        {{direct<2, SignedInts>, few}, {}, {direct<4, SignedInts>, few}}};

}  // namespace ptq::integer_tiled
