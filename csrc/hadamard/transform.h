// The orthonormal Hadamard transform y = H x / sqrt(order) along one axis of x[outer, blocks * order, inner], without
// torch. H is a Kronecker product: dense +-1 factors, outermost first, then Sylvester's matrix of order 2^m.
#pragma once

#include <cstdint>

namespace ptq::hadamard {

enum class Storage { float32, float64, bfloat16, bfloat16_to_float32 };  // bfloat16 computes in float32

constexpr int max_factors = 8;  // 12^8 is far above any order that ptq/ops/hadamard.py allows

struct Problem {
    const void* in;
    void* out;  // may be `in` where both are of one type
    Storage storage;
    int64_t outer, blocks, order, inner;
    // Numbers, 1 or -1 as a rule, per element of the axis or of x, in the type that is computed in, or null. They
    // multiply the input, or with `transpose` the output: R x = H (s * x), R^T x = s * (H^T x). The codes are then
    // those of H^T.
    const void* signs;
    int64_t sign_vectors;  // of `order` signs each, for as many vectors, then from the first again; with inner = 1
    bool transpose;
    int factors;
    int64_t factor_order[max_factors];  // K, a multiple of 4
    // codes[f][g * K + row], bit 3 + j: element 4 g + j of that row of the factor is -1; the other bits are 0
    const uint8_t* codes[max_factors];
    int64_t doublings;  // 2^m
    double scale;       // of the result
};

// A transform along long columns is two of shorter ones: H = A x B on the axis [a, b] is B on each b rows, then A
// with an inner size b times as large. Each reads and writes stretches of whole pages, where one transform would touch
// single cache lines of `order` pages; that is worth a second pass over memory. Returns how many steps are in `steps`,
// which replace `problem`.
int split(const Problem& problem, Problem (&steps)[2]);

// Work is cut in units that do not share anything; the cut, and every sum in it, is the same for all levels and all
// numbers of threads.
int64_t units(const Problem& problem);

// How many tokens, each of `blocks` vectors, make a whole number of units (inner = 1).
int64_t tokens_per_unit(const Problem& problem);

using Run = void(const Problem& problem, int64_t first_unit, int64_t last_unit);
Run run_portable, run_avx2, run_avx512;

}  // namespace ptq::hadamard
