// Dense +-1 factors of a Hadamard matrix on the tensor cores, in place in shared memory. A float32 number is the sum of
// three bfloat16 numbers, and the products with +-1 are exact. Tensor cores cut off what they add instead of rounding:
// they add 16 numbers at a time, starting at zero, and these sums are added as float32.
//
// One warp takes 8 columns at a time: up to K = 128 it reads all K numbers of each into registers before it writes any.
#pragma once

#include "cuda/device.h"

namespace ptq::hadamard {

using namespace ptq::cuda;

constexpr int max_dense = 8;       // factors
constexpr int max_in_place = 128;  // order of a factor that a warp can hold: 8 tiles of 16

struct Factors {
    int count;
    int order[max_dense];             // K
    int at[max_dense];                // where its signs begin in shared memory
    const uint8_t* codes[max_dense];  // transform.h: [K / 4, K], bit 3 + j: element 4 g + j of that row is -1
};

PTQ_BOTH int tiles_of(int k) {
    return (k + 15) / 16;
}

// Where element i of a chunk lies in shared memory, and how many elements that takes (transform.cuh says why).
PTQ_BOTH int padded(int i, int log2) {
    return i + 4 * (i >> 5) + 16 * (i >> 8) + (log2 >= 8 ? 8 * (i >> log2) : 0);
}
PTQ_BOTH int padded_size(int elements, int log2) {
    return (padded((elements + 15) / 16 * 16 - 1, log2) + 4) / 4 * 4;
}
PTQ_BOTH int factor_bytes(const Factors& f) {
    int bytes = 0;
    for (int i = 0; i < f.count; i++) bytes += tiles_of(f.order[i]) * tiles_of(f.order[i]) * 32;
    return (bytes + 15) / 16 * 16;
}

// Signs as lanes want them: byte [row tile, column tile, lane], g = lane / 4, t = lane % 4; bit i: column 4 i + t of
// row g is -1, bit 4 + i: of row g + 8. What lies beyond K is +1, and meets zeros.
PTQ_DEVICE void load_factors(const Factors& f, uint8_t* to, int threads) {
    for (int n = 0; n < f.count; n++) {
        const int k = f.order[n], tiles = tiles_of(k);
        for (int u = thread(); u < tiles * tiles * 32; u += threads) {
            const int lane = u % 32, row = u / 32 / tiles * 16 + lane / 4, first = u / 32 % tiles * 16 + lane % 4;
            int byte = 0;
            for (int i = 0; i < 8; i++) {
                const int r = row + (i >= 4 ? 8 : 0), c = first + 4 * (i % 4);
                if (r < k && c < k) byte |= (f.codes[n][c / 4 * k + r] >> (3 + c % 4) & 1) << i;
            }
            to[f.at[n] + u] = static_cast<uint8_t>(byte);
        }
    }
    block_barrier();
}

// The three bfloat16 parts of two numbers, packed.
PTQ_DEVICE void split(float x, float y, uint32_t (&parts)[3]) {
    PTQ_UNROLL
    for (int i = 0; i < 3; i++) {
        parts[i] = pack<Bfloat16>(x, y);
        x -= float_of(parts[i] << 16);
        y -= float_of(parts[i] & 0xffff0000u);
    }
}

// A byte of `load_factors` as operand A: (g, first half), (g + 8, first half), (g, second half), (g + 8, second half).
PTQ_DEVICE void expand_signs(uint32_t byte, uint32_t (&a)[4]) {
    PTQ_UNROLL
    for (int i = 0; i < 4; i++) {
        const uint32_t bits = byte >> (i % 2 * 4 + i / 2 * 2);
        a[i] = 0x3f803f80u | (bits & 1) << 15 | (bits & 2) << 30;
    }
}

// Columns c = first_column .. + 7 of [., K, inner]; sink.emit(element, value) for each output.
template <int tiles, class Sink>
PTQ_DEVICE void dense_columns(const Sink& sink, const float* in, int first_column, int columns, int k, int inner,
                              const uint8_t* signs) {
    const int g = lane() / 4, t = lane() % 4, used = tiles_of(k);
    const auto base = [&](int c) { return c / inner * (k * inner) + c % inner; };
    uint32_t b[tiles][2][3];
    const int from = base(first_column + g);
    PTQ_UNROLL
    for (int kt = 0; kt < tiles; kt++) {
        float x[4];
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) {  // rows t, t + 4, ...: neighbouring lanes reach different banks
            const int row = 16 * kt + 4 * i + t;
            const bool there = row < k && first_column + g < columns;
            x[i] = there ? in[padded(from + row * inner, sink.p.log2)] : 0.0f;
        }
        split(x[0], x[1], b[kt][0]);
        split(x[2], x[3], b[kt][1]);
    }
    warp_barrier();
    const int to[2] = {base(first_column + 2 * t), base(first_column + 2 * t + 1)};
    for (int rt = 0; rt < used; rt++) {
        float sum[4] = {};
        PTQ_UNROLL
        for (int kt = 0; kt < tiles; kt++) {
            if (kt >= used) continue;
            float c[4] = {};
            const uint32_t byte = signs[(rt * used + kt) * 32 + lane()];
            uint32_t a[4];
            expand_signs(byte, a);
            PTQ_UNROLL
            for (int part = 2; part >= 0; part--) mma<Bfloat16>(c, a, b[kt][0][part], b[kt][1][part]);
            PTQ_UNROLL
            for (int i = 0; i < 4; i++) sum[i] += c[i];
        }
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            const int row = 16 * rt + g + (i >= 2 ? 8 : 0);
            if (row < k && first_column + 2 * t + i % 2 < columns) sink.emit(to[i % 2] + row * inner, sum[i]);
        }
    }
    warp_barrier();
}

// The same for any K, out of place: from `from` to sink.buffer, four row tiles at a time.
template <class Sink>
PTQ_DEVICE void wide_columns(const Sink& sink, const float* from, int first_column, int columns, int k, int inner,
                             const uint8_t* signs) {
    constexpr int together = 4;
    const int g = lane() / 4, t = lane() % 4, tiles = tiles_of(k);
    const auto base = [&](int c) { return c / inner * (k * inner) + c % inner; };
    const int in = base(first_column + g);
    const int to[2] = {base(first_column + 2 * t), base(first_column + 2 * t + 1)};
    for (int first = 0; first < tiles; first += together) {
        float sum[together][4] = {};
        for (int kt = 0; kt < tiles; kt++) {
            float x[4];
            PTQ_UNROLL
            for (int i = 0; i < 4; i++) {
                const int row = 16 * kt + 4 * i + t;
                const bool there = row < k && first_column + g < columns;
                x[i] = there ? from[padded(in + row * inner, sink.p.log2)] : 0.0f;
            }
            uint32_t b[2][3];
            split(x[0], x[1], b[0]);
            split(x[2], x[3], b[1]);
            PTQ_UNROLL
            for (int r = 0; r < together; r++) {
                if (first + r >= tiles) continue;
                uint32_t a[4];
                float c[4] = {};
                expand_signs(signs[((first + r) * tiles + kt) * 32 + lane()], a);
                PTQ_UNROLL
                for (int part = 2; part >= 0; part--) mma<Bfloat16>(c, a, b[0][part], b[1][part]);
                PTQ_UNROLL
                for (int i = 0; i < 4; i++) sum[r][i] += c[i];
            }
        }
        PTQ_UNROLL
        for (int r = 0; r < together; r++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            const int row = 16 * (first + r) + g + (i >= 2 ? 8 : 0);
            if (row < k && first_column + 2 * t + i % 2 < columns) sink.emit(to[i % 2] + row * inner, sum[r][i]);
        }
    }
}

// One factor on the whole chunk, in place where `from` is sink.buffer.
template <class Sink>
PTQ_DEVICE void dense_pass(const Sink& sink, const float* from, int elements, int k, int inner, const uint8_t* signs,
                           int threads) {
    const int columns = elements / k;
    for (int first = warp() * 8; first < columns; first += threads / 4) {
        if (k <= 32)
            dense_columns<2>(sink, from, first, columns, k, inner, signs);
        else if (k <= 64)
            dense_columns<4>(sink, from, first, columns, k, inner, signs);
        else if (k <= max_in_place)
            dense_columns<8>(sink, from, first, columns, k, inner, signs);
        else
            wide_columns(sink, from, first, columns, k, inner, signs);
    }
}

}  // namespace ptq::hadamard
