// Eight rows of eight numbers. Included once per level, into an anonymous namespace.
#pragma once

#include <cstdint>

namespace ptq::gemm {
namespace {

typedef uint32_t Eight __attribute__((vector_size(32)));

inline void transpose(Eight x[8]) {
    Eight y[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + j] = __builtin_shufflevector(y[i + j], y[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            x[i + j + 2] = __builtin_shufflevector(y[i + j], y[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        y[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        y[i + 4] = __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; i++) x[i] = y[i];
}

}  // namespace
}  // namespace ptq::gemm
