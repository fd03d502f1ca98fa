// Inputs without a Hadamard transform: as numbers, or quantised per token. No torch here.
#pragma once

#include "activations/quantize.cuh"
#include "steps_cuda/input.cuh"

namespace ptq::steps_cuda {

struct Tokens {
    Input in;
    const void* x;  // [tokens, k]
    void* out;      // of the type of x; int8 with `scale`
    float* scale;   // of quantised tokens, else null
    int64_t tokens;
    int k, threads;
    bool by_warp;  // a warp for each token, else a block
    bool aligned;  // all pointers and rows are multiples of 16 bytes
    activations::Grid8 grid;
};
constexpr int most_threads = 512;

// The token is read again in every pass: it is in the L1 cache.
template <class T, bool quantised>
PTQ_KERNEL(most_threads, 2)
void input_kernel(const Tokens p) {
    follow_previous();
    const int worker = p.by_warp ? lane() : thread(), workers = p.by_warp ? 32 : p.threads;
    const int64_t token = p.by_warp ? static_cast<int64_t>(block_x()) * (p.threads / 32) + warp() : block_x();
    if (token >= p.tokens) return;
    const int64_t start = token * p.k;
    float* reduce = reinterpret_cast<float*>(shared());
    const T* x = static_cast<const T*>(p.x);
    float inverse = 0;
    if (p.in.gain) {
        const float total = p.by_warp ? squares_by_warp(p.in, x, start, p.k, p.aligned)
                                      : squares_by_block(p.in, x, start, p.k, p.aligned, reduce, p.threads);
        inverse = inverse_norm(p.in, total, p.k);
        if (p.in.added) x = static_cast<const T*>(p.in.sum);
    }
    const auto make = [&](int i, float (&v)[unit]) {
        float other[unit];
        load_numbers(x + start + i, p.k - i, p.aligned, v);
        load_numbers(p.in.gain ? static_cast<const T*>(p.in.gain) + i : static_cast<const T*>(p.in.up) + start + i,
                     p.k - i, p.aligned, other);
        PTQ_UNROLL
        for (int j = 0; j < unit; j++)
            v[j] = p.in.gain ? normed<T>(p.in, v[j], other[j], inverse) : gated<T>(v[j], other[j]);
    };
    float v[unit];
    if constexpr (!quantised) {
        for (int i = unit * worker; i < p.k; i += unit * workers) {
            make(i, v);
            store_numbers(static_cast<T*>(p.out) + start + i, p.k - i, p.aligned, v);
        }
    } else {
        uint32_t top = 0;
        for (int i = unit * worker; i < p.k; i += unit * workers) {
            make(i, v);
            PTQ_UNROLL
            for (int j = 0; j < unit; j++)
                top = activations::larger(top, i + j < p.k ? bits_of(v[j]) & 0x7fffffffu : 0);
        }
        uint32_t* tops = reinterpret_cast<uint32_t*>(reduce);
        top = p.by_warp ? activations::largest_in_warp(top) : activations::largest_in_block(top, tops, p.threads);
        const activations::Scale s = activations::scale_of(p.grid, top);
        int8_t* q = static_cast<int8_t*>(p.out) + start;
        for (int i = unit * worker; i < p.k; i += unit * workers) {
            make(i, v);
            uint32_t words[2] = {};
            PTQ_UNROLL
            for (int j = 0; j < unit; j++)
                words[j / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(activations::integer(p.grid, s, v[j])))
                                << (8 * (j % 4));
            if (p.aligned && p.k - i >= unit)
                store<Words2>(q + i, {{words[0], words[1]}});
            else
                for (int j = 0; j < unit && i + j < p.k; j++)
                    q[i + j] = static_cast<int8_t>(words[j / 4] >> (8 * (j % 4)));
        }
        if (worker == 0) p.scale[token] = s.scale;
    }
}

// silu(x) * up of any number of numbers, without regard to tokens.
struct Gate {
    const void *x, *up;
    void* out;
    int64_t size;
    bool aligned;
};
constexpr int gate_threads = 256;

template <class T>
PTQ_KERNEL(gate_threads, 4)
void gate_kernel(const Gate p) {
    follow_previous();
    const int64_t i = (static_cast<int64_t>(block_x()) * gate_threads + thread()) * unit, rest = p.size - i;
    if (rest <= 0) return;
    const int left = rest < unit ? static_cast<int>(rest) : unit;
    float v[unit], up[unit];
    load_numbers(static_cast<const T*>(p.x) + i, left, p.aligned, v);
    load_numbers(static_cast<const T*>(p.up) + i, left, p.aligned, up);
    PTQ_UNROLL
    for (int j = 0; j < unit; j++) v[j] = gated<T>(v[j], up[j]);
    store_numbers(static_cast<T*>(p.out) + i, left, p.aligned, v);
}

template <class T>
const char* run_input(const Tokens& tokens, Stream stream) {
    Tokens p = tokens;
    if (p.tokens == 0) return nullptr;
    const int units = (p.k + unit - 1) / unit;
    p.by_warp = units <= 32;
    p.threads = p.by_warp ? 128 : units >= most_threads ? most_threads : (units + 31) / 32 * 32;
    const int each = p.by_warp ? p.threads / 32 : 1;
    const Grid grid{static_cast<unsigned>((p.tokens + each - 1) / each)};
    return p.scale ? launch<input_kernel<T, true>>(grid, p.threads, activations::reduce_bytes, stream, p)
                   : launch<input_kernel<T, false>>(grid, p.threads, activations::reduce_bytes, stream, p);
}
template <class T>
const char* run_gate(const Gate& p, Stream stream) {
    constexpr int64_t each = gate_threads * unit;
    if (p.size == 0) return nullptr;
    return launch<gate_kernel<T>>({static_cast<unsigned>((p.size + each - 1) / each)}, gate_threads, 0, stream, p);
}

}  // namespace ptq::steps_cuda
