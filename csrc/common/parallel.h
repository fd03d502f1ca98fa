// Work shared out among the threads of torch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace ptq {

// Calls kernel(p, first, last) on parts of `units`; a thread is worth waking for about 32k elements.
template <class Problem>
void run(void (*kernel)(const Problem&, int64_t, int64_t), const Problem& p, int64_t units, int64_t unit_elements) {
    const int64_t grain = std::max(int64_t{1}, (int64_t{1} << 15) / std::max(int64_t{1}, unit_elements));
    torch::stable::parallel_for(0, units, grain, [&](int64_t first, int64_t last) { kernel(p, first, last); });
}

}  // namespace ptq
