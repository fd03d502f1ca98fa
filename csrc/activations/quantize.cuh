// Integers and one scale per token on a GPU, to the bit as ptq/ops/activations.py defines them. No torch here.
#pragma once

#include "activations/quantize.h"
#include "cuda/lines.cuh"

namespace ptq::activations {

using namespace ptq::cuda;

constexpr int reduce_bytes = 128;  // of shared memory: a number for each of 32 warps

// Magnitudes as bits are in the order of the numbers, and NaNs are above infinity.
PTQ_DEVICE uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}
PTQ_DEVICE uint32_t largest_in_warp(uint32_t top) {
    PTQ_UNROLL
    for (int mask = 16; mask; mask /= 2) top = larger(top, shuffle_xor(top, mask));
    return top;
}
PTQ_DEVICE uint32_t largest_in_block(uint32_t top, uint32_t* reduce, int threads) {
    top = largest_in_warp(top);
    if (lane() == 0) reduce[warp()] = top;
    block_barrier();
    top = largest_in_warp(lane() < threads / 32 ? reduce[lane()] : 0);
    block_barrier();
    return top;
}

struct Scale {
    float scale, inverse;
    bool finite;
};
PTQ_DEVICE Scale scale_of(const Quantizer& grid, uint32_t top) {
    const bool finite = top < 0x7f800000u;
    const float magnitude = float_of(top);
    const float scale = !finite ? float_of(0x7fc00000u) : magnitude < 1e-30f ? 1.0f : multiply(magnitude, grid.share);
    return {scale, finite ? divide(1.0f, scale) : 0.0f, finite};
}
// The integer in the lowest byte, where all numbers of the token are finite: what is added leaves it there, rounded.
PTQ_DEVICE uint32_t integer_bits(const Quantizer& grid, const Scale& s, float x) {
    return bits_of(add(lesser(greater(multiply(x, s.inverse), grid.low), grid.high), 12582912.0f));
}
PTQ_DEVICE int8_t integer(const Quantizer& grid, const Scale& s, float x) {
    return s.finite ? static_cast<int8_t>(integer_bits(grid, s, x)) : 0;
}
// Four of them.
PTQ_DEVICE uint32_t integers(const Quantizer& grid, const Scale& s, float a, float b, float c, float d) {
    const uint32_t low = byte_permute(integer_bits(grid, s, a), integer_bits(grid, s, b), 0x40);
    const uint32_t high = byte_permute(integer_bits(grid, s, c), integer_bits(grid, s, d), 0x40);
    return s.finite ? byte_permute(low, high, 0x5410) : 0;
}

// A token of k numbers by `workers` threads, of which this is `worker`.
template <class Number>
PTQ_DEVICE uint32_t largest_of(const Number& number, int k, int worker, int workers) {
    uint32_t top = 0;
    for (int i = worker; i < k; i += workers) top = larger(top, bits_of(number(i)) & 0x7fffffffu);
    return top;
}
template <class Number>
PTQ_DEVICE void write_integers(const Quantizer& grid, const Scale& s, const Number& number, int k, int8_t* q,
                               bool vectorised, int worker, int workers) {
    if (vectorised && k % 4 == 0) {
        for (int i = 4 * worker; i < k; i += 4 * workers) {
            store<uint32_t>(q + i, integers(grid, s, number(i), number(i + 1), number(i + 2), number(i + 3)));
        }
        return;
    }
    for (int i = worker; i < k; i += workers) q[i] = integer(grid, s, number(i));
}

// `tokens` tokens of k numbers, number(i) the i-th of all: by the whole block, or a warp for each.
template <class Number>
PTQ_DEVICE void quantize_tokens_in_block(const Quantizer& grid, const Number& number, int tokens, int k, int8_t* q,
                                         float* scale, bool vectorised, uint32_t* reduce, int threads) {
    if (tokens == 1) {
        const Scale s = scale_of(grid, largest_in_block(largest_of(number, k, thread(), threads), reduce, threads));
        write_integers(grid, s, number, k, q, vectorised, thread(), threads);
        if (thread() == 0) *scale = s.scale;
        return;
    }
    for (int token = warp(); token < tokens; token += threads / 32) {
        const auto of_token = [&](int i) { return number(token * k + i); };
        const Scale s = scale_of(grid, largest_in_warp(largest_of(of_token, k, lane(), 32)));
        write_integers(grid, s, of_token, k, q + static_cast<int64_t>(token) * k, vectorised, lane(), 32);
        if (lane() == 0) scale[token] = s.scale;
    }
}

// A thread holds up to 4 lines of a token: `worker`, then `workers` further.
constexpr int unit = 8, held = 4, most_threads = 512;
inline int threads_for(int k) {
    const int units = (k + unit - 1) / unit;
    return units >= most_threads ? most_threads : (units + 31) / 32 * 32;
}

// A token of k numbers by the block, or with `by_warp` by a warp; beyond k are zeros.
template <class T, int count>
PTQ_DEVICE void quantize_lines(const Quantizer& grid, const Line<T> (&lines)[count], int k, bool by_warp, int8_t* q,
                               float* scale, bool aligned, uint32_t* reduce, int threads) {
    const int worker = by_warp ? lane() : thread(), workers = by_warp ? 32 : threads;
    float v[unit];
    uint32_t top = 0;
    PTQ_UNROLL
    for (int n = 0; n < count; n++) {
        lines[n].get(v);
        PTQ_UNROLL
        for (int j = 0; j < unit; j++) top = larger(top, bits_of(v[j]) & 0x7fffffffu);
    }
    const Scale s = scale_of(grid, by_warp ? largest_in_warp(top) : largest_in_block(top, reduce, threads));
    if (worker == 0) *scale = s.scale;
    PTQ_UNROLL
    for (int n = 0; n < count; n++) {
        const int i = unit * (worker + n * workers);
        if (i >= k) break;
        lines[n].get(v);
        const uint32_t words[2] = {integers(grid, s, v[0], v[1], v[2], v[3]),
                                   integers(grid, s, v[4], v[5], v[6], v[7])};
        if (aligned && k - i >= unit)
            store<Words2>(q + i, {{words[0], words[1]}});
        else
            for (int j = 0; j < unit && i + j < k; j++) q[i + j] = static_cast<int8_t>(words[j / 4] >> (8 * (j % 4)));
    }
}

// Tokens straight from global memory, one block per token. Long ones are read twice.
struct Tokens {
    const void* in;  // [tokens, k]
    int8_t* q;
    float* scale;
    int64_t tokens;
    int k, threads;
    bool vectorised;
    Quantizer grid;
};

template <class In>
PTQ_KERNEL(most_threads, sizeof(In) == 4 ? 1 : 2)
void quantize_kernel(const Tokens p) {
    follow_previous();
    const int64_t token = block_x();
    const In* in = static_cast<const In*>(p.in) + token * p.k;
    const bool aligned = p.vectorised && p.k % unit == 0;
    Line<In> lines[held];
    load_lines(in, unit * thread(), unit * p.threads, p.k, aligned, lines);
    quantize_lines(p.grid, lines, p.k, false, p.q + token * p.k, p.scale + token, aligned,
                   reinterpret_cast<uint32_t*>(shared()), p.threads);
}

template <class In>
PTQ_KERNEL(256, 4)
void quantize_long_kernel(const Tokens p) {
    follow_previous();
    uint32_t* reduce = reinterpret_cast<uint32_t*>(shared());
    const int64_t token = block_x();
    const In* in = static_cast<const In*>(p.in) + token * p.k;
    const auto number = [&](int i) { return widen(in[i]); };
    const uint32_t top = largest_of(number, p.k, thread(), p.threads);
    const Scale s = scale_of(p.grid, largest_in_block(top, reduce, p.threads));
    write_integers(p.grid, s, number, p.k, p.q + token * p.k, p.vectorised, thread(), p.threads);
    if (thread() == 0) p.scale[token] = s.scale;
}

template <class In>
const char* run_quantize(const Tokens& tokens, Stream stream) {
    Tokens p = tokens;
    const Grid grid{static_cast<unsigned>(p.tokens)};
    const bool is_long = p.k > unit * held * most_threads;
    p.threads = is_long ? 256 : p.k ? threads_for(p.k) : 32;
    return is_long ? launch<quantize_long_kernel<In>>(grid, p.threads, reduce_bytes, stream, p)
                   : launch<quantize_kernel<In>>(grid, p.threads, reduce_bytes, stream, p);
}
inline const char* quantize(const Tokens& tokens, int element, bool half, Stream stream) {
    if (tokens.tokens == 0) return nullptr;
    if (element == 4) return run_quantize<float>(tokens, stream);
    return half ? run_quantize<Half>(tokens, stream) : run_quantize<Bfloat16>(tokens, stream);
}

}  // namespace ptq::activations
