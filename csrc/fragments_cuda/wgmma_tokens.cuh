// Tokens as wgmma takes them: [tiles of 128 tokens, stages, 128 rows of 128 bytes], each stage one piece of memory that
// a bulk copy fetches. A stage is 64 columns of two bytes or 128 of one. Columns come in the order in which a lane of
// fragments has them (weights.cuh), rows are swizzled (cuda/wgmma.h), tokens and columns that are not there are zero.
// No torch here.
#pragma once

#include "cuda/wgmma.h"
#include "fragments_cuda/weights.cuh"

namespace ptq::fragments {

struct Arrange {
    const void* x;  // [tokens, k]
    uint8_t* to;
    int tokens, k;
    bool aligned;  // x and its rows are multiples of 16 bytes
};
constexpr int arrange_threads = 256;

template <class X>
constexpr int stage_columns = wgmma_row_bytes / static_cast<int>(sizeof(X));
template <class X>
PTQ_BOTH int stages_of(int k) {
    return (k + stage_columns<X> - 1) / stage_columns<X>;
}
template <class X>
inline int64_t arranged_bytes(int tokens, int k) {
    return (int64_t{tokens} + wgmma_tokens - 1) / wgmma_tokens * stages_of<X>(k) * wgmma_tile_bytes;
}

// Word i of the 32 columns from `first` on, of which `left` are there.
template <class X>
PTQ_DEVICE uint32_t word_of(const X* from, int left, int i) {
    constexpr int each = 4 / sizeof(X);
    uint32_t word = 0;
    PTQ_UNROLL
    for (int e = 0; e < each; e++) {
        if (each * i + e >= left) continue;
        if constexpr (each == 2)
            word |= static_cast<uint32_t>(from[each * i + e].bits) << (16 * e);
        else
            word |= static_cast<uint32_t>(static_cast<uint8_t>(from[each * i + e])) << (8 * e);
    }
    return word;
}

// A thread has 32 columns of a token: the two words of lane t and step 2 h + u are columns 8 t + 4 u + 0 .. 3 (one
// word, of bytes: columns 0, 2, 1, 3). The first halves of all four lanes are 16 bytes, the second halves the next.
template <class X>
PTQ_KERNEL(arrange_threads, 4)
void arrange_kernel(const Arrange p) {
    follow_previous();
    constexpr int units = stage_columns<X> / half_columns, words = half_columns * sizeof(X) / 4, chunks = words / 4;
    const int stages = stages_of<X>(p.k);
    const int64_t i = static_cast<int64_t>(block_x()) * arrange_threads + thread();
    const int64_t row = i / (stages * units);
    const int unit = static_cast<int>(i % (stages * units));
    if (row >= (static_cast<int64_t>(p.tokens) + wgmma_tokens - 1) / wgmma_tokens * wgmma_tokens) return;

    uint32_t in[words] = {};
    const int left = row < p.tokens ? p.k - half_columns * unit : 0;
    const X* from = static_cast<const X*>(p.x) + row * p.k + half_columns * unit;
    PTQ_UNROLL
    for (int c = 0; c < chunks; c++) {
        if (p.aligned && left >= half_columns) {
            const Words4 v = load<Words4>(reinterpret_cast<const uint8_t*>(from) + 16 * c);
            PTQ_UNROLL
            for (int j = 0; j < 4; j++) in[4 * c + j] = v.word[j];
        } else {
            PTQ_UNROLL
            for (int j = 0; j < 4; j++) in[4 * c + j] = word_of(from, left, 4 * c + j);
        }
    }
    uint8_t* tile = p.to + (row / wgmma_tokens * stages + unit / units) * wgmma_tile_bytes;
    PTQ_UNROLL
    for (int c = 0; c < chunks; c++) {
        Words4 out;
        PTQ_UNROLL
        for (int t = 0; t < 4; t++) {
            const uint32_t word = in[chunks * t + c];
            out.word[t] = sizeof(X) == 1 ? byte_permute(word, 0, 0x3120) : word;
        }
        store<Words4>(tile + swizzled(static_cast<int>(row % wgmma_tokens), unit % units * chunks + c), out);
    }
}

template <class X>
const char* launch_arrange(const Arrange& p, Stream stream) {
    const int64_t tokens = (int64_t{p.tokens} + wgmma_tokens - 1) / wgmma_tokens * wgmma_tokens;
    const int64_t count = tokens * stages_of<X>(p.k) * (stage_columns<X> / half_columns);
    return launch<arrange_kernel<X>>({static_cast<unsigned>((count + arrange_threads - 1) / arrange_threads)},
                                     arrange_threads, 0, stream, p);
}

}  // namespace ptq::fragments
