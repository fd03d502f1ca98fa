// Few tokens of floating-point numbers. Points are exact numbers, multiplied with x in float32; the scale comes at the
// end. Included once per level, by decode.h.
//
// With AVX-512 VNNI, points stay the bytes that come out of a block, and it is x that is brought to bytes: three or
// four products of these take less time than bringing points to floats, or to pairs of bfloat16 (processors.md, E8P
// layers).
#pragma once

#include "tiles/byte_unit.h"

namespace ptq::e8p_tiled {
namespace {

using tiles::part_bytes;
using tiles::read;

// --- x ---------------------------------------------------------------------------------------------------------------

// Where each of a block's 32 columns comes from, in the order of the steps.
struct Order {
    int64_t from[block_columns];
    explicit Order(bool pairs) {
        for (int i = 0; i < block_columns; i++) from[place_of(i / 4, i % 4, pairs)] = column_of(i / 4, i % 4);
    }
};

// The columns of a block, from c on, as floats; zeros beyond the last.
inline void read_block(const Floats& p, int64_t t, int64_t c, float x[block_columns]) {
    for (int64_t i = 0; i < block_columns; i += tile_rows) {
        const int64_t at = std::min(c + i, p.w.k);
        store(x + i, read(p.x, p.x_type, t * p.w.k + at, std::min(p.w.k - at, tile_rows)));
    }
}

void arrange_as_floats(const Floats& p, const Order& order, int64_t t) {
    auto* to = reinterpret_cast<float*>(p.arranged + t * p.arranged_stride);
    for (int64_t c = 0; c < p.w.k; c += block_columns, to += block_columns) {
        float x[block_columns];
        read_block(p, t, c, x);
        for (int64_t i = 0; i < block_columns; i++) to[i] = x[order.from[i]];
    }
}

#if defined(__AVX512BF16__)
typedef uint16_t BlockWords __attribute__((vector_size(64)));

inline BlockWords words_of(const Order& order) {
    BlockWords words;
    for (int i = 0; i < block_columns; i++) words[i] = static_cast<uint16_t>(order.from[i]);
    return words;
}

inline BlockWords picked(BlockWords x, BlockWords words) {
    return (BlockWords)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)words, (__m512i)x);
}

void arrange_as_bfloat16(const Floats& p, const Order& order, int64_t t) {
    const BlockWords words = words_of(order);
    const auto* from = static_cast<const uint16_t*>(p.x) + t * p.w.k;
    uint8_t* to = p.arranged + t * p.arranged_stride;
    for (int64_t c = 0; c < p.w.k; c += block_columns, to += part_bytes) {
        BlockWords x{};
        if (c + block_columns <= p.w.k)
            std::memcpy(&x, from + c, sizeof x);
        else
            std::memcpy(&x, from + c, (p.w.k - c) * sizeof *from);
        x = picked(x, words);
        std::memcpy(to, &x, sizeof x);
    }
}
#endif

#if defined(__AVX512VNNI__)
constexpr Form few_form = Form::bytes;

void arrange_as_bytes(const Floats& p, const Order&, int64_t t) {
    const int64_t width = blocks_in(p.w.k) * block_columns, stride = ByteRow::stride(p.w.k);
    const int count = ByteRow::count(p.x_type);
    const tiles::ByteUnit unit(p.x, p.x_type, t * p.w.k, (t + 1) * p.w.k, count);
    auto* to = reinterpret_cast<int8_t*>(p.arranged + t * p.arranged_stride);
    for (int64_t c = 0; c < p.w.k; c += block_columns) {
        float x[block_columns];
        read_block(p, t, c, x);
        const Dwords integers[] = {unit.integers(load(x)), unit.integers(load(x + 16))};
        for (int i = 0; i < count; i++) {
            const __m128i halves[] = {unit.byte_of(integers[0], i), unit.byte_of(integers[1], i)};
            Columns bytes;
            std::memcpy(&bytes, halves, sizeof bytes);
            bytes = in_order(bytes, std::make_integer_sequence<int, block_columns>{});
            std::memcpy(to + i * stride + c, &bytes, sizeof bytes);
        }
    }
    for (int i = 0; i < count; i++, to += stride) {
        const ByteRow row{-offset_of(p.w.bits) * sum_of(to, width), unit.factor(i)};
        std::memcpy(to + width, &row, sizeof row);
    }
}
#else
constexpr Form few_form = Form::floats;
#endif

void arrange_floats(const Floats& p, int64_t first, int64_t last) {
    const Order order(p.form == Form::pairs);
    auto one = arrange_as_floats;
#if defined(__AVX512VNNI__)
    if (p.form == Form::bytes) one = arrange_as_bytes;
#endif
#if defined(__AVX512BF16__)
    if (p.form == Form::pairs) one = arrange_as_bfloat16;
#endif
    for (int64_t t = first; t < last; t++) one(p, order, t);
}

// --- products --------------------------------------------------------------------------------------------------------

// Sixteen rows times some tokens, without the scale. `parts`: rows of bytes of a token.
#if defined(__AVX512VNNI__)
template <int bits, int tokens, int parts>
inline void multiply(const Points<bits>& points, const Floats& p, const uint8_t* block, int64_t from,
                     Lanes total[tokens]) {
    constexpr int rows = parts * tokens;
    const int64_t stride = ByteRow::stride(p.w.k), blocks = blocks_in(p.w.k);
    const auto* q = reinterpret_cast<const int8_t*>(p.arranged + from * p.arranged_stride);
    SignedInts sums[rows];
    integers<bits, rows>(points, block, blocks, q, stride, sums);
    for (int i = 0; i < rows; i++) {
        ByteRow row;
        std::memcpy(&row, q + i * stride + blocks * block_columns, sizeof row);
        const Lanes part = converted<Lanes>(sums[i] + row.offset) * row.factor;
        Lanes& y = total[i / parts];
        y = i % parts ? y + part : part;
    }
}
#else
template <int bits, int tokens, int parts>
inline void multiply(const Points<bits>& points, const Floats& p, const uint8_t* block, int64_t from,
                     Lanes total[tokens]) {
    const int64_t blocks = blocks_in(p.w.k), stride = p.arranged_stride;
    const uint8_t* x = p.arranged + from * stride;
    tiles::FloatSums<tokens> sums;
    for (int64_t b = 0; b < blocks; b++, block += block_bytes(bits), x += block_columns * sizeof(float)) {
        fetch(block, block_bytes(bits));
        Dwords weights[quads];
        points.unpack(block, weights);
#pragma GCC unroll 8
        for (int i = 0; i < quads; i++) {
            Dwords numbers[4];
            to_floats<bits>(weights[i], numbers);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums.add(j, (Lanes)numbers[j], x + (4 * i + j) * sizeof(float), stride);
        }
    }
    sums.total(total);
}
#endif

template <int bits, int tokens, int parts>
void floats_tile(const Floats& p, const Points<bits>& points, int64_t tile, int64_t from) {
    Lanes total[tokens];
    multiply<bits, tokens, parts>(points, p, p.w.tiles + tile * tile_bytes(p.w.k, bits), from, total);
    const int64_t row = tile * tile_rows, count = std::min(tile_rows, p.w.n - row);
    const Lanes bias = load_bias(p.bias, row, count);
    for (int t = 0; t < tokens; t++) {
        const Lanes y = p.w.scale * total[t];
        store_result(p.out, p.out_type, (from + t) * p.w.n + row, p.bias ? y + bias : y, count);
    }
}

template <int bits>
void floats_of(const Floats& p, int64_t first, int64_t last) {
    const Points<bits> points(tables());
    over_tokens(p.t, first, last, [&]<int tokens>(int64_t tile, int64_t t) {
        if (p.form == Form::bytes && p.x_type == Number::float32)
            floats_tile<bits, tokens, few_form == Form::bytes ? 4 : 3>(p, points, tile, t);
        else
            floats_tile<bits, tokens, 3>(p, points, tile, t);
    });
}

void floats(const Floats& p, int64_t first, int64_t last) {
    constexpr decltype(&floats_of<2>) of[] = {floats_of<2>, floats_of<3>, floats_of<4>};
    of[p.w.bits - 2](p, first, last);
}

// --- the weight as it is ---------------------------------------------------------------------------------------------

template <int bits>
void write(const Dequantize& p, int64_t tile) {
    const Points<bits> points(tables());
    const int64_t rows = std::min(tile_rows, p.w.n - tile * tile_rows);
    const uint8_t* block = p.w.tiles + tile * tile_bytes(p.w.k, bits);
    for (int64_t c = 0; c < p.w.k; c += block_columns, block += block_bytes(bits)) {
        Dwords weights[quads];
        points.unpack(block, weights);
        const auto* bytes = reinterpret_cast<const uint8_t*>(weights);
        for (int64_t r = 0; r < rows; r++) {
            float numbers[block_columns];
            for (int i = 0; i < block_columns; i++)
                numbers[column_of(i / 4, i % 4)] =
                    p.w.scale * static_cast<float>(bytes[i / 4 * 64 + 4 * r + i % 4] - offset_of(bits));
            std::memcpy(p.out + (tile * tile_rows + r) * p.w.k + c, numbers,
                        std::min(block_columns, p.w.k - c) * sizeof(float));
        }
    }
}

void dequantize(const Dequantize& p, int64_t first, int64_t last) {
    constexpr decltype(&write<2>) of[] = {write<2>, write<3>, write<4>};
    for (int64_t tile = first; tile < last; tile++) of[p.w.bits - 2](p, tile);
}

}  // namespace
}  // namespace ptq::e8p_tiled
