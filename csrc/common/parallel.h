// Work shared out among the threads of torch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "common/units.h"

namespace ptq {

// Calls kernel(p, first, last) on parts of `units`; a thread is worth waking for about 32k elements.
template <class Problem>
void run(void (*kernel)(const Problem&, int64_t, int64_t), const Problem& p, int64_t units, int64_t unit_elements) {
    const int64_t grain = std::max(int64_t{1}, (int64_t{1} << 15) / std::max(int64_t{1}, unit_elements));
    torch::stable::parallel_for(0, units, grain, [&](int64_t first, int64_t last) { kernel(p, first, last); });
}

// Calls work(units) in all threads, as many as there are units at most.
template <class Work>
void share(int64_t count, const Work& work) {
    const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
    Units units{count, threads};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(units); });
}

}  // namespace ptq
