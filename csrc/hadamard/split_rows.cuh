// The first step of split.cuh: its matrix, the numbers that it is applied to, and the product. No torch here.
#pragma once

#include "hadamard/transform.cuh"

namespace ptq::hadamard {

constexpr int most_rows = 28;

// What the tensor cores take: numbers straight from global memory; numbers that were treated before (or are not
// aligned), from shared memory; float32 from there, in three parts.
enum class Source { plain, treated, split };

// The matrix as operands A: [row tile, column tile, lane]. Lane 4 g + t has columns 4 s + t, s = 0 .. 3 of each tile.
// What lies beyond `rows` is +1, and meets zeros.
template <class T>
PTQ_DEVICE void load_matrix(const Transform& p, int tiles, Words4* to) {
    const int k = p.split.rows;
    const uint32_t ones = std::is_same_v<T, Half> ? 0x3c003c00u : 0x3f803f80u;
    for (int u = thread(); u < tiles * tiles * 32; u += p.threads) {
        const int g = u % 32 / 4, t = u % 4, row = u / 32 / tiles * 16 + g, first = u / 32 % tiles * 4;
        uint32_t minus[2][4];  // rows g and g + 8
        PTQ_UNROLL
        for (int i = 0; i < 8; i++) {
            const int r = row + i / 4 * 8, s = first + i % 4, both = r & (4 * s + t);
            const bool there = r < k && 4 * s < k;
            minus[i / 4][i % 4] = p.factors.count ? p.factors.codes[0][there ? s * k + r : 0] >> (3 + t)
                                                  : 0x6996u >> ((both ^ both >> 4) & 15);
            minus[i / 4][i % 4] &= there;
        }
        Words4 a;
        PTQ_UNROLL
        for (int i = 0; i < 4; i++)
            a.word[i] = ones | minus[i % 2][i / 2 * 2] << 15 | minus[i % 2][i / 2 * 2 + 1] << 31;
        to[u] = a;
    }
}

// Before the wait for earlier kernels: a decoded token waits for nothing else from memory that is not in the L2 cache.
PTQ_DEVICE void prefetch_codes(const Transform& p) {
    if (const int at = 128 * thread(); p.factors.count && at < p.split.rows * p.split.rows / 4)
        prefetch_line(p.factors.codes[0] + at);
}

// The token at `start` after the norm, and times the signs, in shared memory.
template <class In, Source source>
PTQ_DEVICE void stage(const Transform& p, int64_t start, int token, const float* norms, float* buffer) {
    const In* in = static_cast<const In*>(p.input.added ? p.input.sum : p.in) + start;
    const In* gain = static_cast<const In*>(p.input.gain);
    constexpr int together = 8 / sizeof(In);
    const int step = 8 * p.threads;
    for (int first = 8 * thread(); first < token; first += together * step) {
        Line<In> lines[together], others[together];
        load_lines(in, first, step, token, p.vectorised, lines);
        if (gain) load_lines(gain, first, step, token, p.vectorised, others);
        PTQ_UNROLL
        for (int n = 0; n < together; n++) {
            const int i = first + n * step;
            if (i >= token) break;
            float v[8], other[8];
            lines[n].get(v);
            if (gain) {
                others[n].get(other);
                PTQ_UNROLL
                for (int j = 0; j < 8; j++) v[j] = inputs::normed<In>(p.input, v[j], other[j], norms[0]);
            }
            if constexpr (source == Source::split) {
                if (p.signs && !p.signs_last) {
                    load_numbers(p.signs + i, 8, p.aligned_signs, other);
                    PTQ_UNROLL
                    for (int j = 0; j < 8; j++) v[j] = multiply(v[j], other[j]);
                }
                store_numbers(buffer + staged(p.split, i), 8, true, v);
            } else {
                store_numbers(reinterpret_cast<In*>(buffer) + staged(p.split, i), 8, true, v);
            }
        }
    }
    block_barrier();
}

// Some columns of a thread's rows t, t + 4, ...: packed, or to be split as float32.
template <class In, int tiles, Source source>
struct Numbers {
    static constexpr bool exact = source != Source::split;
    using Stored = std::conditional_t<exact, In, float>;
    using Operand = std::conditional_t<exact, In, Bfloat16>;
    static constexpr int columns = exact ? 8 : 4, lines = tiles == 1 ? 4 : most_rows / 4;
    uint32_t x[lines][4];

    template <class T>
    PTQ_DEVICE void load(const Transform& p, const T* from, int rows_apart) {
        PTQ_UNROLL
        for (int s = 0; s < lines; s++) {
            const Words4 line = 4 * s < p.split.rows ? cuda::load<Words4>(from + s * rows_apart) : Words4{};
            PTQ_UNROLL
            for (int j = 0; j < 4; j++) x[s][j] = line.word[j];
        }
    }

    // Operand B of column j and column tile q: each of its parts, of which the first is the largest.
    static constexpr int parts = exact ? 1 : 3;
    PTQ_DEVICE void operand(int q, int j, uint32_t (&b)[2][parts]) const {
        PTQ_UNROLL
        for (int i = 0; i < 2; i++) {
            const int s = 4 * q + 2 * i, word = exact ? j / 2 : j;
            const uint32_t low = x[s][word], high = s + 1 < lines ? x[s + 1][word] : 0;
            if constexpr (exact)
                b[i][0] = byte_permute(low, high, j % 2 ? 0x7632 : 0x5410);
            else
                split(float_of(low), float_of(high), b[i]);
        }
    }
};

// 1, of the columns from `first` on; `matrix` of this lane.
template <class In, int tiles, Source source>
PTQ_DEVICE void multiply_rows(const Numbers<In, tiles, source>& numbers, const Words4* matrix, int first,
                              float (&v)[32 * tiles]) {
    using These = Numbers<In, tiles, source>;
    PTQ_UNROLL
    for (int q = 0; q < tiles; q++) PTQ_UNROLL
    for (int tile = 0; tile < tiles; tile++) {
        const Words4 words = load<Words4>(matrix + 32 * (tiles * tile + q));
        const uint32_t a[4] = {words.word[0], words.word[1], words.word[2], words.word[3]};
        PTQ_UNROLL
        for (int j = 0; j < These::columns; j++) {
            uint32_t b[2][These::parts];
            numbers.operand(q, j, b);
            float c[4] = {};
            PTQ_UNROLL
            for (int part = These::parts - 1; part >= 0; part--)
                mma<typename These::Operand>(c, a, b[0][part], b[1][part]);
            PTQ_UNROLL
            for (int i = 0; i < 4; i++) {
                float& sum = v[first + j + 8 * (i + 4 * tile)];
                sum = q ? sum + c[i] : c[i];
            }
        }
    }
}

}  // namespace ptq::hadamard
