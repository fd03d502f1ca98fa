// Work shared out among the threads of torch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "common/units.h"

namespace ptq {

constexpr int64_t codes_of_thread = 1 << 16;  // of weights, or keys: a thread is worth waking for so many

struct Nothing {};

// Calls kernel(p, first, last) on parts of `units`; a thread is worth waking for about 32k elements. A `Guard` lives in
// each thread meanwhile, such as `FlushedSubnormals` for what decays.
template <class Guard = Nothing, class Problem>
void run(void (*kernel)(const Problem&, int64_t, int64_t), const Problem& p, int64_t units, int64_t unit_elements) {
    const int64_t grain = std::max(int64_t{1}, (int64_t{1} << 15) / std::max(int64_t{1}, unit_elements));
    torch::stable::parallel_for(0, units, grain, [&](int64_t first, int64_t last) {
        [[maybe_unused]] const Guard guard{};
        kernel(p, first, last);
    });
}

// Calls work(units) in all threads, as many as there are units at most.
template <class Work>
void share(int64_t count, const Work& work) {
    const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
    Units units{count, threads};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(units); });
}

// Calls work(first, last) until all units are done: each thread has a share of them, which it reads in order, so many
// at once, and then helps the others. `codes`: of all units together.
template <class Work>
void in_shares(int64_t count, int64_t codes, int64_t at_once, const Work& work) {
    const int64_t most = (codes + codes_of_thread - 1) / codes_of_thread;
    const int64_t threads = std::min({int64_t{torch::stable::get_num_threads()}, count, most});
    if (threads < 2 || count >> 32) return work(int64_t{0}, count);
    const std::unique_ptr<Share[]> shares(new Share[threads]);
    for (int64_t i = 0; i < threads; i++) shares[i].set(count * i / threads, count * (i + 1) / threads);
    torch::stable::parallel_for(
        0, threads, 1, [&](int64_t from, int64_t to) { work_through(shares.get(), threads, from, to, at_once, work); });
}

}  // namespace ptq
