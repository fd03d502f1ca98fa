// The kernels for few tokens, of one level: included after PTQ_LEVEL, the name of its table, is defined.
// A row tile is read once, as one stream, for up to four tokens at a time.
#include "minifloat_tiled/lookup.h"
#include "tiles/sums.h"

namespace ptq::minifloat_tiled {
namespace {

using tiles::segment_blocks;

// Super-blocks of a group.
inline int64_t blocks_of(const Weight& w, int64_t group) {
    return std::min(w.group_blocks, w.blocks - group * w.group_blocks);
}

inline Lanes scale_of(const Weight& w, int64_t tile, int64_t group) {
    return load(w.scale + (tile * w.groups + group) * tile_rows);
}

// --- quantised tokens ------------------------------------------------------------------------------------------------

void sums(const Quantized& p, int32_t* sums, int64_t first, int64_t last) {
    const int64_t width = p.w.blocks * block_columns, size = p.w.group_blocks * block_columns;
    for (int64_t t = first; t < last; t++)
        for (int64_t g = 0; g < p.w.groups; g++) {
            int32_t sum = 0;
            for (int64_t i = g * size; i < std::min(width, (g + 1) * size); i++) sum += p.q[t * p.q_stride + i];
            sums[t * p.w.groups + g] = sum;
        }
}

// The integers of `blocks` super-blocks, of bytes.
template <int bits, int tokens>
inline void integers(const uint8_t* block, int64_t blocks, const int8_t* q, int64_t stride, const Bytes<bits>& bytes,
                     SignedInts total[tokens]) {
    tiles::IntegerSums<tokens> sums;
    for (int64_t b = 0; b < blocks; b++, block += block_bytes(bits), q += block_columns) {
        tiles::fetch<tiles::load_of<bits, tokens>>(block, block_bytes(bits));
        over_quads<bits>(block,
                         [&]<int i>(Dwords codes) { sums.template add<false>(i, bytes(codes), q + 4 * i, stride); });
    }
    sums.total(total);
}

// A group of more than 65536 columns: its integers may need 64 bits.
template <int bits>
Lanes long_group(const uint8_t* block, int64_t blocks, const int8_t* q, const Bytes<bits>& bytes, int64_t sum) {
    int64_t total[tile_rows];
    for (int64_t& each : total) each = -byte_offset * sum;
    for (int64_t b = 0; b < blocks; b += segment_blocks) {
        SignedInts part[1];
        integers<bits, 1>(block + b * block_bytes(bits), std::min(segment_blocks, blocks - b), q + b * block_columns, 0,
                          bytes, part);
        for (int r = 0; r < tile_rows; r++) total[r] += part[0][r];
    }
    Lanes result;
    for (int r = 0; r < tile_rows; r++) result[r] = static_cast<float>(total[r]);
    return result;
}

template <int bits, int tokens>
void quantized_tile(const Quantized& p, const Bytes<bits>& bytes, int64_t tile, int64_t from) {
    const Weight& w = p.w;
    const uint8_t* block = tile_of(w, tile);
    const int8_t* q = p.q + from * p.q_stride;
    Lanes y[tokens] = {};
    for (int64_t g = 0; g < w.groups; g++) {
        const Lanes scale = scale_of(w, tile, g);
        const int64_t blocks = blocks_of(w, g);
        const int32_t* sum = p.sums + from * w.groups + g;
        if (blocks > segment_blocks) [[unlikely]] {
            for (int t = 0; t < tokens; t++)
                y[t] += scale * long_group<bits>(block, blocks, q + t * p.q_stride, bytes, sum[t * w.groups]);
        } else {
            SignedInts total[tokens];
            integers<bits, tokens>(block, blocks, q, p.q_stride, bytes, total);
            for (int t = 0; t < tokens; t++)
                y[t] += scale * converted<Lanes>(total[t] - byte_offset * sum[t * w.groups]);
        }
        block += blocks * block_bytes(bits);
        q += blocks * block_columns;
    }
    const int64_t row = tile * tile_rows, count = std::min(tile_rows, w.n - row);
    const Lanes bias = tiles::load_bias(p.bias, row, count);
    for (int t = 0; t < tokens; t++) {
        Lanes result = y[t] * p.q_scale[from + t];
        if (p.bias) result += bias;
        tiles::store_result(p.out, p.out_type, (from + t) * w.n + row, result, count);
    }
}

template <int bits>
void quantized_of(const Quantized& p, int64_t first, int64_t last) {
    const Bytes<bits> bytes(*p.w.element);
    tiles::over_tokens(p.t, first, last,
                       [&]<int tokens>(int64_t tile, int64_t t) { quantized_tile<bits, tokens>(p, bytes, tile, t); });
}

void quantized(const Quantized& p, int64_t first, int64_t last) {
    constexpr decltype(&quantized_of<4>) of[] = {quantized_of<4>, quantized_of<5>, quantized_of<6>, quantized_of<7>};
    of[p.w.element->bits - 4](p, first, last);
}

}  // namespace
}  // namespace ptq::minifloat_tiled

#include "minifloat_tiled/decode_floats.h"
#include "minifloat_tiled/panels.h"

namespace ptq::minifloat_tiled {

const Kernels PTQ_LEVEL{sums, quantized, arrange, floats, unpack_floats, unpack_pairs, unpack_bytes};

}  // namespace ptq::minifloat_tiled
