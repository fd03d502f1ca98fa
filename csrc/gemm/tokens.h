// Tokens as bytes: given, or made of numbers on the way. No torch here.
#pragma once

#include <cstdint>
#include <memory>

#include "activations/quantize.h"

namespace ptq::gemm {

struct Tokens {
    int64_t t, k;
    const int8_t* q;                      // [t, k], where `numbers` is null
    const activations::Numbers* numbers;  // whose integers are meant, or null
    float* scale;                         // [t]: where the scales of `numbers` go
    float unit;                           // times this power of two
};

// The integers of a token, zeros up to a number of columns (or all zeros, behind the last token): where they are, or in
// `spare`, which has zeros behind column k.
const int8_t* row_of(const Tokens& from, int64_t token, int64_t columns, int8_t* spare);
// All tokens, `columns` apart: where they are, or in `room`.
const int8_t* rows_of(const Tokens& from, int64_t columns, std::unique_ptr<int8_t[]>& room);

// Tokens in the order in which blocks of them are multiplied: four columns of a token in a number. Columns beyond those
// of x, and tokens beyond the last, are zero.
struct Quads {
    Tokens from;
    int64_t columns, group_columns, groups, panel_columns;  // of the weight; the most of a panel
    int32_t* x;                                             // [panel, block of tokens, column / 4, token]
    int32_t* offset;  // [block of tokens, group, token]: sums of q over the groups, times `factor`
    int32_t factor;
};

}  // namespace ptq::gemm
