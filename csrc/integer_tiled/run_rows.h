// The rows of several weights in tiles, shared by threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/parallel.h"
#include "integer_tiled/layout.h"

namespace ptq::integer_tiled {

// The row tiles of all problems as one range of units: threads are woken once, and share all of it evenly.
template <class Problem>
void run_rows(void (*kernel)(const Problem&, int64_t, int64_t), const std::vector<Problem>& problems) {
    const Problem& one = problems.front();
    int64_t total = 0;
    for (const Problem& p : problems) total += row_tiles(p.w.n);
    const int64_t codes = total * tile_rows * one.w.k * std::max(int64_t{1}, one.t / 4);
    in_shares(total, codes, 4, [&](int64_t first, int64_t last) {
        for (const Problem& p : problems) {
            const int64_t units = row_tiles(p.w.n), from = std::max(first, int64_t{0}), to = std::min(last, units);
            if (from < to) kernel(p, from, to);
            first -= units, last -= units;
        }
    });
}

}  // namespace ptq::integer_tiled
