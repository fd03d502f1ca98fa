// Rounding to the E8 codebooks as plain C++: no torch here. Codes, points, the search and its rule for ties are defined
// in quip_sharp/e8p_ops.py. Every level does the same float32 operations in the same order, one vector in each lane.
#pragma once

#include <cstdint>

namespace ptq::e8p {

constexpr int dim = 8, entries = 256, max_candidates = 8;
constexpr int64_t strip = 16;  // vectors that one unit of `round` takes, rows that one of `ldlq` takes

// A table with what the search asks of it.
struct Table {
    alignas(64) float point[entries][dim];  // as stored: for E8P, coordinate 7 negative where the sum is odd
    alignas(64) float size[entries][dim];   // magnitudes
    float half_norm[entries];
    uint8_t odd[entries];
};

struct Book {
    Table first, second;
    float scale, inverse;
    float multiplier[2];
    int bits;  // 2: one stage; 3: E8P and plain entries; 4: E8P twice
    int candidates;
};

struct Round {
    const Book* book;
    const float* w;  // [vectors, 8]
    int32_t* codes;  // [vectors]
    int64_t vectors;
};

struct Ldlq {
    const Book* book;
    const float* target;  // [c, n]
    const float* w;       // [c, n]
    const float* factor;  // [c, c]: factor[i, j] is what column j takes of the error of column i > j
    int32_t* codes;       // [c / 8, n]
    float* error;         // [c, n]
    int64_t c, n;
};

struct Decode {
    const Book* book;
    const int32_t* codes;  // [vectors]
    float* w;              // [vectors, 8]
};

// Each works on units [first, last): strips of 16 vectors, strips of 16 rows, vectors.
struct Kernels {
    void (*round)(const Round&, int64_t first, int64_t last);
    void (*ldlq)(const Ldlq&, int64_t first, int64_t last);
    void (*decode)(const Decode&, int64_t first, int64_t last);
};

extern const Kernels portable, avx2, avx512;

}  // namespace ptq::e8p
