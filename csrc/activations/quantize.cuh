// Integers and one scale per token on a GPU, to the bit as ptq/ops/activations.py defines them. No torch here.
#pragma once

#include "cuda/device.h"

namespace ptq::activations {

using namespace ptq::cuda;

// quantize.h's Quantizer; low and high are integers here.
struct Grid8 {
    float low, high;  // of the integers
    float share;      // scale of a token whose largest magnitude is 1
};

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
PTQ_DEVICE Scale scale_of(const Grid8& grid, uint32_t top) {
    const bool finite = top < 0x7f800000u;
    const float magnitude = float_of(top);
    const float scale = !finite ? float_of(0x7fc00000u) : magnitude < 1e-30f ? 1.0f : multiply(magnitude, grid.share);
    return {scale, finite ? divide(1.0f, scale) : 0.0f, finite};
}
PTQ_DEVICE int8_t integer(const Grid8& grid, const Scale& s, float x) {
    if (!s.finite) return 0;
    float y = multiply(x, s.inverse);
    y = y < grid.low ? grid.low : y;
    y = y > grid.high ? grid.high : y;
    return static_cast<int8_t>(round_to_int(y));
}

// A token of k numbers by `workers` threads, of which this is `worker`.
template <class Number>
PTQ_DEVICE uint32_t largest_of(const Number& number, int k, int worker, int workers) {
    uint32_t top = 0;
    for (int i = worker; i < k; i += workers) top = larger(top, bits_of(number(i)) & 0x7fffffffu);
    return top;
}
template <class Number>
PTQ_DEVICE void write_integers(const Grid8& grid, const Scale& s, const Number& number, int k, int8_t* q,
                               bool vectorised, int worker, int workers) {
    if (vectorised && k % 4 == 0) {
        for (int i = 4 * worker; i < k; i += 4 * workers) {
            uint32_t word = 0;
            PTQ_UNROLL
            for (int j = 0; j < 4; j++)
                word |= static_cast<uint32_t>(static_cast<uint8_t>(integer(grid, s, number(i + j)))) << (8 * j);
            store<uint32_t>(q + i, word);
        }
        return;
    }
    for (int i = worker; i < k; i += workers) q[i] = integer(grid, s, number(i));
}

// `tokens` tokens of k numbers, number(i) the i-th of all: by the whole block, or a warp for each.
template <class Number>
PTQ_DEVICE void quantize_tokens_in_block(const Grid8& grid, const Number& number, int tokens, int k, int8_t* q,
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

// Tokens of any length straight from global memory, read twice; one block per token.
struct Tokens {
    const void* in;  // [tokens, k]
    int8_t* q;
    float* scale;
    int64_t tokens;
    int k, threads;
    bool vectorised;
    Grid8 grid;
};

template <class In>
PTQ_KERNEL(256, 4)
void quantize_kernel(const Tokens p) {
    follow_previous();
    uint32_t* reduce = reinterpret_cast<uint32_t*>(shared());
    const int64_t token = block_x();
    const In* in = static_cast<const In*>(p.in) + token * p.k;
    const auto number = [&](int i) { return widen(in[i]); };
    uint32_t top = 0;
    if (p.vectorised && p.k % 8 == 0) {
        constexpr int each = 8;
        for (int i = each * thread(); i < p.k; i += each * p.threads) {
            float x[each];
            load_numbers(in + i, each, true, x);
            PTQ_UNROLL
            for (int j = 0; j < each; j++) top = larger(top, bits_of(x[j]) & 0x7fffffffu);
        }
    } else {
        top = largest_of(number, p.k, thread(), p.threads);
    }
    const Scale s = scale_of(p.grid, largest_in_block(top, reduce, p.threads));
    write_integers(p.grid, s, number, p.k, p.q + token * p.k, p.vectorised, thread(), p.threads);
    if (thread() == 0) p.scale[token] = s.scale;
}

inline const char* quantize(const Tokens& tokens, int element, bool half, Stream stream) {
    Tokens p = tokens;
    p.threads = p.k >= 2048 ? 256 : 64;
    if (p.tokens == 0) return nullptr;
    const Grid grid{static_cast<unsigned>(p.tokens)};
    if (element == 4) return launch<quantize_kernel<float>>(grid, p.threads, reduce_bytes, stream, p);
    if (half) return launch<quantize_kernel<Half>>(grid, p.threads, reduce_bytes, stream, p);
    return launch<quantize_kernel<Bfloat16>>(grid, p.threads, reduce_bytes, stream, p);
}

}  // namespace ptq::activations
