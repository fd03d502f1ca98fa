// Rotary embedding of queries and keys in one launch, to the bit as ptq/ops/steps.py defines it. No torch here.
#pragma once

#include "cuda/device.h"

namespace ptq::steps_cuda {

using namespace ptq::cuda;

// x[batch, heads, tokens, d], the channels side by side, to out in rows of d.
struct Side {
    const void* x;
    void* out;
    int64_t batch_stride, head_stride, token_stride;
    int heads;
};
struct Rotary {
    Side side[2];
    const void *cos, *sin;  // [batch or 1, tokens, d]
    int batch, tokens, d;
    int64_t angle_stride;  // from a row of the batch to the next one, of cos and sin
    bool aligned;          // pointers, strides and d / 2 allow 8 numbers at once
};
constexpr int rotary_threads = 128, rotated_at_once = 8;

// A thread turns `count` numbers of the first half with those of the second half.
template <class T, int count>
PTQ_DEVICE void rotate(const T* x, const T* cos, const T* sin, T* out, int half) {
    float low[count], high[count], c[count], s[count], y[count];
    load_numbers(x, count, count > 1, low);
    load_numbers(x + half, count, count > 1, high);
    load_numbers(cos, count, count > 1, c);
    load_numbers(sin, count, count > 1, s);
    PTQ_UNROLL
    for (int i = 0; i < count; i++)
        y[i] = add(rounded<T>(multiply(low[i], c[i])), rounded<T>(multiply(-high[i], s[i])));
    store_numbers(out, count, count > 1, y);
    load_numbers(cos + half, count, count > 1, c);
    load_numbers(sin + half, count, count > 1, s);
    PTQ_UNROLL
    for (int i = 0; i < count; i++) y[i] = add(rounded<T>(multiply(high[i], c[i])), rounded<T>(multiply(low[i], s[i])));
    store_numbers(out + half, count, count > 1, y);
}

// Units of all rows of queries, then those of keys.
template <class T>
PTQ_KERNEL(rotary_threads, 8)
void rotary_kernel(const Rotary p) {
    follow_previous();
    const int half = p.d / 2, units = p.aligned ? half / rotated_at_once : half;
    int64_t at = static_cast<int64_t>(block_x()) * rotary_threads + thread();
    const int64_t first = static_cast<int64_t>(p.batch) * p.side[0].heads * p.tokens * units;
    const bool second = at >= first;
    const Side& side = p.side[second];
    at -= second ? first : 0;
    const int64_t row = at / units;
    const int unit = static_cast<int>(at % units);
    if (row >= static_cast<int64_t>(p.batch) * side.heads * p.tokens) return;
    const int token = static_cast<int>(row % p.tokens);
    const int64_t head = row / p.tokens % side.heads, b = row / p.tokens / side.heads;
    const T* x =
        static_cast<const T*>(side.x) + b * side.batch_stride + head * side.head_stride + token * side.token_stride;
    const int64_t angles = b * p.angle_stride + static_cast<int64_t>(token) * p.d;
    const T *cos = static_cast<const T*>(p.cos) + angles, *sin = static_cast<const T*>(p.sin) + angles;
    T* out = static_cast<T*>(side.out) + row * p.d;
    const int i = p.aligned ? unit * rotated_at_once : unit;
    if (p.aligned)
        rotate<T, rotated_at_once>(x + i, cos + i, sin + i, out + i, half);
    else
        rotate<T, 1>(x + i, cos + i, sin + i, out + i, half);
}

template <class T>
const char* run_rotary(const Rotary& p, Stream stream) {
    const int64_t units = p.aligned ? p.d / 2 / rotated_at_once : p.d / 2;
    const int64_t count = int64_t{p.batch} * p.tokens * (p.side[0].heads + p.side[1].heads) * units;
    if (count == 0) return nullptr;
    return launch<rotary_kernel<T>>({static_cast<unsigned>((count + rotary_threads - 1) / rotary_threads)},
                                    rotary_threads, 0, stream, p);
}

}  // namespace ptq::steps_cuda
