// Tokens into the packed KV cache, and out of it as float32: both to the bit as ptq/ops/kv_ops.py defines them. No
// torch here.
#pragma once

#include "kv_cache_cuda/layout.cuh"

namespace ptq::kv_cache_cuda {

constexpr int most_channels = 1024;

struct Append {
    Side to;
    const void* x;  // [batch, kv heads, count, d], the channels side by side
    Number kind;
    int64_t batch_stride, head_stride, token_stride;  // of x
    int kv_heads, start, count;
    float clip;
    const int64_t* start_at;  // or null; there a graph reads `start` when it runs. Tokens that find no room are dropped
    int room;                 // tokens
};
constexpr int append_warps = 4;

// A row of d channels in a warp: each lane has four neighbours of every 128, and zeros beyond.
template <class T, int rounds>
PTQ_DEVICE void load_row(const T* from, int d, float (&x)[rounds][4]) {
    PTQ_UNROLL
    for (int r = 0; r < rounds; r++) PTQ_UNROLL
    for (int j = 0; j < 4; j++) {
        const int c = 128 * r + 4 * lane() + j;
        x[r][j] = c < d ? widen(from[c]) : 0;
    }
}

template <class T, int rounds>
PTQ_DEVICE void store_row(T* to, int d, const float (&x)[rounds][4]) {
    PTQ_UNROLL
    for (int r = 0; r < rounds; r++) PTQ_UNROLL
    for (int j = 0; j < 4; j++) {
        const int c = 128 * r + 4 * lane() + j;
        if (c < d) to[c] = convert<T>(x[r][j]);
    }
}

// What a token's codes depend on.
struct Extremes {
    float low = 0, high = 0;
    int bad = 0;

    template <int rounds>
    PTQ_DEVICE explicit Extremes(const float (&x)[rounds][4]) {
        PTQ_UNROLL
        for (int r = 0; r < rounds; r++) PTQ_UNROLL
        for (int j = 0; j < 4; j++) {
            low = x[r][j] < low ? x[r][j] : low;
            high = x[r][j] > high ? x[r][j] : high;
            bad |= (bits_of(x[r][j]) & 0x7fffffffu) >= 0x7f800000u;
        }
        PTQ_UNROLL
        for (int mask = 16; mask; mask /= 2) {
            const float l = shuffle_xor(low, mask), h = shuffle_xor(high, mask);
            low = l < low ? l : low;
            high = h > high ? h : high;
            bad |= shuffle_xor(bad, mask);
        }
    }
};

// Bits `below` and on of this lane's four codes, channels `c` and on: 32 / width lanes fill a word together.
template <int width>
PTQ_DEVICE void store_plane(const Side& to, uint32_t* words, const int (&codes)[4], int below, int first_word, int c,
                            int token) {
    constexpr int fields = 32 / width;
    uint32_t word = 0;
    PTQ_UNROLL
    for (int j = 0; j < 4; j++) word |= (codes[j] >> below & ((1u << width) - 1)) << ((c + j) % fields * width);
    PTQ_UNROLL
    for (int mask = 1; mask < fields / 4; mask *= 2) word |= shuffle_xor(word, mask);
    if (c % fields == 0 && c < to.d) words[to.at(first_word + c / fields, token)] = word;
}

// A warp quantises one token of one head.
template <int rounds>
PTQ_DEVICE void store_token(const Side& to, const float (&numbers)[rounds][4], int head, int token, float clip) {
    const Extremes extremes(numbers);
    const float low = multiply(extremes.low, clip), high = multiply(extremes.high, clip);
    const float top = static_cast<float>((1 << to.bits) - 1);
    const Bfloat16 scale = narrow<Bfloat16>(add(high, -low) < 1e-30f ? 1 : add(divide(high, top), -divide(low, top)));
    const Bfloat16 minimum = narrow<Bfloat16>(low);
    const bool finite = !extremes.bad && (scale.bits & 0x7fff) < 0x7f80 && (minimum.bits & 0x7fff) < 0x7f80;
    const float inverse = divide(1, widen(scale));
    const int in_chunk = token % chunk, second = plane_words(to.d, wide_plane(to.bits));
    uint32_t* words = to.codes_of(token / chunk, head);
    PTQ_UNROLL
    for (int r = 0; r < rounds; r++) {
        if (128 * r >= to.d) break;
        const int c = 128 * r + 4 * lane();
        int codes[4];
        PTQ_UNROLL
        for (int j = 0; j < 4; j++) {
            const float x = multiply(add(numbers[r][j], -widen(minimum)), inverse);
            codes[j] = finite && c + j < to.d ? round_to_int(x < 0 ? 0 : x > top ? top : x) : 0;
        }
        if (to.bits == 8) store_plane<8>(to, words, codes, 0, 0, c, in_chunk);
        if (to.bits == 4 || to.bits == 6) store_plane<4>(to, words, codes, 0, 0, c, in_chunk);
        if (to.bits < 4) store_plane<2>(to, words, codes, 0, 0, c, in_chunk);
        if (to.bits == 6) store_plane<2>(to, words, codes, 4, second, c, in_chunk);
        if (to.bits == 3) store_plane<1>(to, words, codes, 2, second, c, in_chunk);
    }
    if (lane() < 2)
        to.scales_of(token / chunk, head)[lane() * chunk + in_chunk] =
            finite ? (lane() ? minimum.bits : scale.bits) : 0x7fc0;
}

template <class T, int rounds>
PTQ_KERNEL(32 * append_warps, 4)
void append_kernel(const Append p) {
    follow_previous();
    const int unit = block_x() * append_warps + warp();
    if (unit >= p.to.heads * p.count) return;
    const int head = unit / p.count, index = unit % p.count;
    const int64_t token = (p.start_at ? *p.start_at : p.start) + index;
    float x[rounds][4];
    load_row(static_cast<const T*>(p.x) + head / p.kv_heads * p.batch_stride + head % p.kv_heads * p.head_stride +
                 index * p.token_stride,
             p.to.d, x);
    if (token >= 0 && token < p.room) store_token(p.to, x, head, static_cast<int>(token), p.clip);
}

struct Dequantize {
    Side from;
    float* out;  // [heads, length, d]
    int length;
};
constexpr int dequantize_threads = 256;

// A thread makes one number; block_y counts the heads.
PTQ_KERNEL(dequantize_threads, 4)
static void dequantize_kernel(const Dequantize p) {
    follow_previous();
    const Side& from = p.from;
    const int64_t i = static_cast<int64_t>(block_x()) * dequantize_threads + thread();
    if (i >= static_cast<int64_t>(p.length) * from.d) return;
    const int token = static_cast<int>(i / from.d), c = static_cast<int>(i % from.d), head = block_y();
    const int width = wide_plane(from.bits), above = from.bits - width, in_chunk = token % chunk;
    const uint32_t* words = from.codes_of(token / chunk, head);
    uint32_t code = words[from.at(c * width / 32, in_chunk)] >> (c * width % 32) & ((1u << width) - 1);
    if (above)
        code |= (words[from.at(plane_words(from.d, width) + c * above / 32, in_chunk)] >> (c * above % 32) &
                 ((1u << above) - 1))
                << width;
    const uint16_t* scales = from.scales_of(token / chunk, head) + in_chunk;
    p.out[head * static_cast<int64_t>(p.length) * from.d + i] =
        add(multiply(static_cast<float>(code), widen(Bfloat16{scales[0]})), widen(Bfloat16{scales[chunk]}));
}

}  // namespace ptq::kv_cache_cuda
