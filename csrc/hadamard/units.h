// How a transform is cut in units. One unit is a buffer [order / 2^m, 2^m, lanes-of-other-vectors], at least one cache
// line wide, in which all lanes of a vector register do the same thing:
//   rows     (inner = 1, 2^m fills a line):   one vector; lanes are the 2^m
//   gathered (inner = 1, 2^m is short):       as many vectors as fill a line, interleaved [order / 2^m, vectors, 2^m]
//   columns  (inner > 1):                     a panel of columns [order, columns]
#pragma once

#include <algorithm>

#include "hadamard/transform.h"

namespace ptq::hadamard {

struct Cut {
    int64_t vectors;  // in one unit
    int64_t width;    // elements of the buffer per row of the dense factors: 2^m * vectors
    int64_t first;    // stride, in elements, of the first Sylvester stage
    int64_t panels;   // units per block
};

// static: each level must get a copy compiled for its own instruction set
static inline Cut cut(const Problem& p) {
    constexpr int64_t panel_bytes = 1 << 17;  // measured best of 32 KiB to 512 KiB on 1 MiB of L2
    constexpr int64_t max_panel_lines = 64;   // a page
    const int64_t element = p.storage == Storage::float64 ? 8 : 4;
    const int64_t line = 64 / element;
    if (p.inner > 1) {
        const int64_t lines = std::clamp(panel_bytes / (p.order * 64), int64_t{1},
                                         std::min(max_panel_lines, (p.inner + line - 1) / line));
        return {lines * line, p.doublings * lines * line, lines * line, (p.inner + lines * line - 1) / (lines * line)};
    }
    const int64_t vectors = std::max(int64_t{1}, line / p.doublings);
    return {vectors, p.doublings * vectors, 1, 1};
}

}  // namespace ptq::hadamard
