// The Hadamard transform of any order along any axis, in float32 or float64, one step after the other through global
// memory: correct, and slow. For what transform.cuh does not take. No torch here.
#pragma once

#include "cuda/device.h"

namespace ptq::hadamard {

using namespace ptq::cuda;

constexpr int general_threads = 256;
constexpr int widest_step = 64;  // of Sylvester's matrix

// Element i of x[outer, size, inner], with its sign and the scale, from one type to another.
struct Copied {
    const void* in;
    void* out;
    const void* signs;  // in the type that is computed in, or null
    int64_t count, size, inner;
    double scale;
};

// The type that is computed in: float64 for float64, else float32.
template <class T>
PTQ_DEVICE auto number_of(T x) {
    if constexpr (sizeof(T) == 8)
        return x;
    else
        return widen(x);
}

template <class In, class Out, class Number>
PTQ_KERNEL(general_threads, 2)
void copy_kernel(const Copied p) {
    follow_previous();
    const int64_t i = static_cast<int64_t>(block_x()) * general_threads + thread();
    if (i >= p.count) return;
    Number x = static_cast<Number>(number_of(static_cast<const In*>(p.in)[i])) * static_cast<Number>(p.scale);
    if (p.signs) x *= static_cast<const Number*>(p.signs)[i / p.inner % p.size];
    if constexpr (sizeof(Out) == 2)
        static_cast<Out*>(p.out)[i] = narrow<Out>(x);
    else
        static_cast<Out*>(p.out)[i] = static_cast<Out>(x);
}

// out[o, row, j] = sum over c of +-in[o, c, j], x[., order, inner]. Signs: a dense factor's codes (transform.h), or
// without codes Sylvester's matrix.
struct Step {
    const void* in;
    void* out;
    int64_t count, inner;
    int order;
    const uint8_t* codes;
};

template <class Number>
PTQ_KERNEL(general_threads, 2)
void step_kernel(const Step p) {
    follow_previous();
    const int64_t i = static_cast<int64_t>(block_x()) * general_threads + thread();
    if (i >= p.count) return;
    const int row = static_cast<int>(i / p.inner % p.order);
    const Number* in = static_cast<const Number*>(p.in) + (i - row * p.inner);
    Number sum = 0;
    for (int c = 0; c < p.order; c++) {
        unsigned minus = static_cast<unsigned>(row & c);
        if (p.codes) {
            minus = p.codes[c / 4 * p.order + row] >> (3 + c % 4) & 1;
        } else {  // parity of up to 6 bits
            minus ^= minus >> 4;
            minus = 0x6996u >> (minus & 15) & 1;
        }
        const Number x = in[c * p.inner];
        sum += minus ? -x : x;
    }
    static_cast<Number*>(p.out)[i] = sum;
}

}  // namespace ptq::hadamard
