// Inputs without a Hadamard transform: as numbers, or quantised per token. No torch here.
#pragma once

#include "activations/input.cuh"
#include "activations/quantize.cuh"

namespace ptq::steps_cuda {

using namespace inputs;

struct Tokens {
    Input in;
    const void* x;  // [tokens, k]
    void* out;      // of the type of x; int8 with `scale`
    float* scale;   // of quantised tokens, else null
    int64_t tokens;
    int k, threads;
    bool by_warp;  // a warp for each token, else a block
    bool few;      // tokens: then what they wait for counts
    bool aligned;  // all pointers and rows are multiples of 16 bytes
    activations::Quantizer grid;
};
// The token is read again in every pass, from the L1 cache.
template <class T, bool quantised>
PTQ_KERNEL(activations::most_threads, 2)
void reading_input_kernel(const Tokens p) {
    follow_previous();
    const int worker = thread(), workers = p.threads;
    const int64_t token = block_x(), start = token * p.k;
    float* reduce = reinterpret_cast<float*>(shared());
    const T* x = static_cast<const T*>(p.x);
    float inverse = 0;
    if (p.in.gain) {
        const float total = squares_by_block(p.in, x, start, p.k, p.aligned, reduce, p.threads);
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
        const activations::Scale s = activations::scale_of(p.grid, activations::largest_in_block(top, tops, p.threads));
        int8_t* q = static_cast<int8_t*>(p.out) + start;
        for (int i = unit * worker; i < p.k; i += unit * workers) {
            make(i, v);
            const uint32_t words[2] = {activations::integers(p.grid, s, v[0], v[1], v[2], v[3]),
                                       activations::integers(p.grid, s, v[4], v[5], v[6], v[7])};
            if (p.aligned && p.k - i >= unit)
                store<Words2>(q + i, {{words[0], words[1]}});
            else
                for (int j = 0; j < unit && i + j < p.k; j++)
                    q[i + j] = static_cast<int8_t>(words[j / 4] >> (8 * (j % 4)));
        }
        if (worker == 0) p.scale[token] = s.scale;
    }
}

// The same of tokens that the threads can hold, each `held` lines: a thread has its part of one stretch of the sum of
// squares.
template <class T, bool quantised, int held>
PTQ_KERNEL(activations::most_threads, sizeof(T) == 4 ? 1 : 2)
void input_kernel(const Tokens p) {
    constexpr bool at_once = held == 1;  // there are registers for all that it reads
    if (p.few && p.in.gain && p.aligned && thread() == 0) prefetch(p.in.gain, p.k * static_cast<int>(sizeof(T)));
    follow_previous();
    const int worker = p.by_warp ? lane() : thread(), workers = p.by_warp ? 32 : p.threads;
    const int64_t token = p.by_warp ? static_cast<int64_t>(block_x()) * (p.threads / 32) + warp() : block_x();
    if (token >= p.tokens) return;
    const int64_t start = token * p.k;
    float* reduce = reinterpret_cast<float*>(shared());
    Line<T> lines[held], added[held], beside[held];
    const auto fetch = [&](const void* from, int64_t at, Line<T>(&to)[held]) {
        load_lines(static_cast<const T*>(from) + at, unit * worker, unit * workers, p.k, p.aligned, to);
    };
    const auto give = [&](void* out, int n, const float (&v)[unit]) {
        const int i = unit * (worker + n * workers);
        if (i < p.k) store_numbers(static_cast<T*>(out) + start + i, p.k - i, p.aligned, v);
    };
    float v[unit], other[unit], inverse = 0;
    const auto fetch_beside = [&] { fetch(p.in.gain ? p.in.gain : p.in.up, p.in.gain ? 0 : start, beside); };
    fetch(p.x, start, lines);
    if constexpr (at_once) fetch_beside();
    if (p.in.added) {
        fetch(p.in.added, start, added);
        PTQ_UNROLL
        for (int n = 0; n < held; n++) {
            lines[n].get(v);
            added[n].get(other);
            PTQ_UNROLL
            for (int j = 0; j < unit; j++) v[j] = rounded<T>(add(v[j], other[j]));
            give(p.in.sum, n, v);
            lines[n].set(v);
        }
    }
    if constexpr (!at_once) fetch_beside();
    if (p.in.gain) {
        float total = 0;
        PTQ_UNROLL
        for (int n = 0; n < held; n++) {
            lines[n].get(v);
            total = with_squares(total, v);
        }
        total = sum_in_warp(total);
        if (!p.by_warp) {
            for (int s = thread(); s < stretches; s += p.threads)
                if (s >= p.threads / 32) reduce[s] = 0;
            if (lane() == 0) reduce[warp()] = total;
            total = sum_of_stretches(reduce);
        }
        inverse = inverse_norm(p.in, total, p.k);
    }
    PTQ_UNROLL
    for (int n = 0; n < held; n++) {
        lines[n].get(v);
        beside[n].get(other);
        if (p.in.gain) {
            PTQ_UNROLL
            for (int j = 0; j < unit; j++) v[j] = normed<T>(p.in, v[j], other[j], inverse);
        } else {
            PTQ_UNROLL
            for (int j = 0; j < unit; j++) v[j] = gated<T>(v[j], other[j]);
        }
        if constexpr (quantised)
            lines[n].set(v);
        else
            give(p.out, n, v);
    }
    if constexpr (quantised)
        activations::quantize_lines(p.grid, lines, p.k, p.by_warp, static_cast<int8_t*>(p.out) + start, p.scale + token,
                                    p.aligned, reinterpret_cast<uint32_t*>(reduce), p.threads);
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
    constexpr int few = 64, held = activations::held;
    p.few = p.tokens <= few;
    p.by_warp = p.k <= 32 * unit;
    p.threads = p.by_warp ? 128 : activations::threads_for(p.k);
    const int each = p.by_warp ? p.threads / 32 : 1;
    const Grid grid{static_cast<unsigned>((p.tokens + each - 1) / each)};
    constexpr size_t bytes = activations::reduce_bytes;
    if (p.by_warp || (p.few && p.k <= unit * activations::most_threads))
        return p.scale ? launch<input_kernel<T, true, 1>>(grid, p.threads, bytes, stream, p)
                       : launch<input_kernel<T, false, 1>>(grid, p.threads, bytes, stream, p);
    // On an H200 many short tokens are faster read again, from the L1 cache, than held: more blocks of threads run at
    // once.
    if ((p.k < 8192 && !p.few) || p.k > unit * held * activations::most_threads)
        return p.scale ? launch<reading_input_kernel<T, true>>(grid, p.threads, bytes, stream, p)
                       : launch<reading_input_kernel<T, false>>(grid, p.threads, bytes, stream, p);
    return p.scale ? launch<input_kernel<T, true, held>>(grid, p.threads, bytes, stream, p)
                   : launch<input_kernel<T, false, held>>(grid, p.threads, bytes, stream, p);
}
template <class T>
const char* run_gate(const Gate& p, Stream stream) {
    constexpr int64_t each = gate_threads * unit;
    if (p.size == 0) return nullptr;
    return launch<gate_kernel<T>>({static_cast<unsigned>((p.size + each - 1) / each)}, gate_threads, 0, stream, p);
}

}  // namespace ptq::steps_cuda
