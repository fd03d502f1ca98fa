// What stands before attention of decoded tokens, in one launch: rotary embedding of queries and keys, to the bit as
// ptq/ops/steps.py defines it; keys without their centre, if there is one; a Hadamard transform of both (R3); keys and
// values into the cache, packed or as they are. No torch here.
#pragma once

#include "kv_cache_cuda/append.cuh"

namespace ptq::kv_cache_cuda {

// Rows of tokens, [batch, tokens, heads * d].
struct Given {
    const void* x;
    int64_t batch_stride, token_stride;
};

// Where keys (side 0) and values go: `head` counts over the batch.
struct PackedRoom {
    Side sides[2];
    float clips[2];

    template <class T, int rounds>
    PTQ_DEVICE void store(int side, const float (&x)[rounds][4], int head, int token) const {
        store_token(sides[side], x, head, token, clips[side]);
    }
};
struct PlainRoom {
    void* sides[2];  // [batch, heads, tokens, d], the channels side by side, tokens d apart
    int64_t batch_stride, head_stride;
    int kv_heads, d;

    template <class T, int rounds>
    PTQ_DEVICE void store(int side, const float (&x)[rounds][4], int head, int token) const {
        store_row(static_cast<T*>(sides[side]) + head / kv_heads * batch_stride + head % kv_heads * head_stride +
                      static_cast<int64_t>(token) * d,
                  d, x);
    }
};

template <class Room>
struct Input {
    Given given[3];         // queries, keys, values
    const void *cos, *sin;  // [batch or 1, tokens, rotary_dim]
    int64_t angle_stride;   // from a row of the batch to the next one, of cos and sin
    const void* center;     // [kv heads, d], or null
    void* queries;          // [batch, q heads, tokens, d]
    Room room;
    int batch, tokens, q_heads, kv_heads, d;
    int rotary_dim;  // channels of a head that are rotated: the first ones
    int order;       // of the transform, a power of two that divides d; 0 or 1: none
    float scale;     // 1 / sqrt(order)
    int start, room_tokens;
    const int64_t* start_at;  // or null; there a graph reads `start` when it runs. Tokens that find no room are dropped

    PTQ_BOTH int heads() const { return q_heads + 2 * kv_heads; }
};
constexpr int input_warps = 4, most_input_channels = 256;

// A token of a head, rotated.
template <class T, int rounds>
PTQ_DEVICE void load_rotated(const T* from, const T* cos, const T* sin, int d, int rotary_dim, float (&x)[rounds][4]) {
    const int half = rotary_dim / 2;
    PTQ_UNROLL
    for (int r = 0; r < rounds; r++) PTQ_UNROLL
    for (int j = 0; j < 4; j++) {
        const int c = 128 * r + 4 * lane() + j;
        x[r][j] = c < d ? widen(from[c]) : 0;
        if (c >= rotary_dim) continue;
        const float other = c < half ? -widen(from[c + half]) : widen(from[c - half]);
        x[r][j] =
            rounded<T>(add(rounded<T>(multiply(x[r][j], widen(cos[c]))), rounded<T>(multiply(other, widen(sin[c])))));
    }
}

// x - center, of a head.
template <class T, int rounds>
PTQ_DEVICE void center_row(const T* center, int d, float (&x)[rounds][4]) {
    PTQ_UNROLL
    for (int r = 0; r < rounds; r++) PTQ_UNROLL
    for (int j = 0; j < 4; j++) {
        const int c = 128 * r + 4 * lane() + j;
        if (c < d) x[r][j] = rounded<T>(add(x[r][j], -widen(center[c])));
    }
}

PTQ_DEVICE void butterfly(float& a, float& b) {
    const float difference = add(a, -b);
    a = add(a, b);
    b = difference;
}
// Blocks of `order` channels times Sylvester's matrix.
template <class T, int rounds>
PTQ_DEVICE void transform(float (&x)[rounds][4], int order, float scale) {
    PTQ_UNROLL
    for (int h = 1; h < 4; h *= 2) {
        if (h >= order) break;
        PTQ_UNROLL
        for (int r = 0; r < rounds; r++) PTQ_UNROLL
        for (int j = 0; j < 4; j++)
            if (!(j & h)) butterfly(x[r][j], x[r][j | h]);
    }
    PTQ_UNROLL
    for (int h = 4; h < 128; h *= 2) {
        if (h >= order) break;
        PTQ_UNROLL
        for (int r = 0; r < rounds; r++) PTQ_UNROLL
        for (int j = 0; j < 4; j++) {
            const float other = shuffle_xor(x[r][j], h / 4);
            x[r][j] = lane() & (h / 4) ? add(other, -x[r][j]) : add(x[r][j], other);
        }
    }
    static_assert(rounds <= 2);
    if (rounds > 1 && order > 128) PTQ_UNROLL
    for (int j = 0; j < 4; j++) butterfly(x[0][j], x[rounds - 1][j]);
    PTQ_UNROLL
    for (int r = 0; r < rounds; r++) PTQ_UNROLL
    for (int j = 0; j < 4; j++) x[r][j] = rounded<T>(multiply(x[r][j], scale));
}

// A warp takes a token of a head of queries, keys or values.
template <class T, int rounds, class Room>
PTQ_KERNEL(32 * input_warps, 4)
void input_kernel(const Input<Room> p) {
    follow_previous();
    const int unit = block_x() * input_warps + warp();
    if (unit >= p.batch * p.tokens * p.heads()) return;
    const int of_all = unit % p.heads(), index = unit / p.heads() % p.tokens, row = unit / p.heads() / p.tokens;
    const int kind = of_all < p.q_heads ? 0 : of_all < p.q_heads + p.kv_heads ? 1 : 2;
    const int head = kind == 0 ? of_all : (of_all - p.q_heads) % p.kv_heads;
    const Given& given = p.given[kind];
    const T* from = static_cast<const T*>(given.x) + row * given.batch_stride + index * given.token_stride +
                    static_cast<int64_t>(head) * p.d;
    float x[rounds][4];
    if (kind == 2) {
        load_row(from, p.d, x);
    } else {
        const int64_t angles = row * p.angle_stride + static_cast<int64_t>(index) * p.rotary_dim;
        load_rotated(from, static_cast<const T*>(p.cos) + angles, static_cast<const T*>(p.sin) + angles, p.d,
                     p.rotary_dim, x);
        if (kind == 1 && p.center) center_row(static_cast<const T*>(p.center) + head * p.d, p.d, x);
        if (p.order > 1) transform<T>(x, p.order, p.scale);
    }
    if (kind == 0) {
        const int64_t to = (static_cast<int64_t>(row) * p.q_heads + head) * p.tokens + index;
        store_row(static_cast<T*>(p.queries) + to * p.d, p.d, x);
        return;
    }
    const int64_t token = (p.start_at ? *p.start_at : p.start) + index;
    if (token >= 0 && token < p.room_tokens)
        p.room.template store<T>(kind - 1, x, row * p.kv_heads + head, static_cast<int>(token));
}

}  // namespace ptq::kv_cache_cuda
