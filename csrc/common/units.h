// Units of work, which threads take in runs that get shorter towards the end: none waits long for a slower one, and
// each reads its part of memory mostly in order.
#pragma once

#include <atomic>
#include <cstdint>

namespace ptq {

struct Units {
    const int64_t count, threads;
    std::atomic<int64_t> next{0};

    // The units [first, last) from now on belong to the caller; false where none is left.
    [[gnu::always_inline]] bool take(int64_t& first, int64_t& last) {
        first = next.load(std::memory_order_relaxed);
        do {
            if (first >= count) return false;
            const int64_t share = (count - first) / (2 * threads);
            last = first + (share > 0 ? share : 1);
        } while (!next.compare_exchange_weak(first, last, std::memory_order_relaxed));
        return true;
    }
};

// What one thread does: for (Run run{units}; run.next();) run.unit ...
struct Run {
    Units& units;
    int64_t unit = 0, end = 0;

    [[gnu::always_inline]] bool next() {
        if (unit + 1 >= end) return units.take(unit, end);
        unit++;
        return true;
    }
    // The unit that will probably come next: worth fetching.
    [[gnu::always_inline]] int64_t likely() const {
        return unit + 1 < end ? unit + 1 : units.next.load(std::memory_order_relaxed);
    }
};

}  // namespace ptq
