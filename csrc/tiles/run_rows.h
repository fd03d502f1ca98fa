// The rows of several weights in tiles, shared by threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/parallel.h"
#include "tiles/layout.h"

namespace ptq::tiles {

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

// The same, but for problems of so many tokens that they go to gemm/, one by one.
template <class Problem, class IsMany, class Many>
void run_rows(void (*kernel)(const Problem&, int64_t, int64_t), const std::vector<Problem>& problems,
              const IsMany& is_many, const Many& many) {
    std::vector<Problem> few;
    for (const Problem& p : problems)
        if (is_many(p))
            many(p);
        else
            few.push_back(p);
    if (!few.empty()) run_rows(kernel, few);
}

}  // namespace ptq::tiles
