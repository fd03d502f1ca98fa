// Units of work, which threads share so that none waits long for a slower one, and each reads memory mostly in order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace ptq {

// All units, which threads take in runs that get shorter towards the end.
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

// The units that one thread has before it. It takes a few at a time from the front; a thread that has nothing left
// takes half of them, once, from the end. (If both take from the front, each reads what the other one has fetched
// ahead: where the memory is slow, that cost 4 % of a decoded token.)
class alignas(64) Share {
  public:
    void set(int64_t first, int64_t last) { left_ = static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(last); }
    // Units [first, last) belong to the caller; false where none is left, or none to help with.
    bool take(int64_t at_once, int64_t& first, int64_t& last) {
        return cut(first, last, true, [&](int64_t from, int64_t to) { return std::min(from + at_once, to); });
    }
    bool help(int64_t& first, int64_t& last) {
        return cut(first, last, false, [](int64_t from, int64_t to) { return to - (to - from) / 2; });
    }

  private:
    template <class Place>
    bool cut(int64_t& first, int64_t& last, bool front, const Place& place) {
        uint64_t left = left_.load(std::memory_order_relaxed), rest;
        do {
            const auto from = static_cast<int64_t>(left >> 32), to = static_cast<int64_t>(left & 0xffffffff);
            const int64_t at = place(from, to);
            first = front ? from : at, last = front ? at : to;
            if (first >= last) return false;
            rest = front ? static_cast<uint64_t>(at) << 32 | (left & 0xffffffff)
                         : (left >> 32 << 32) | static_cast<uint64_t>(at);
        } while (!left_.compare_exchange_weak(left, rest, std::memory_order_relaxed));
        return true;
    }
    std::atomic<uint64_t> left_{0};
};

// What threads [from, to) of `threads` do: the units of their own, then some of the others'. Calls work(first, last).
template <class Work>
void work_through(Share* shares, int64_t threads, int64_t from, int64_t to, int64_t at_once, const Work& work) {
    int64_t first, last;
    for (int64_t self = from; self < to; self++)
        while (shares[self].take(at_once, first, last)) work(first, last);
    for (int64_t self = from; self < to; self++)
        for (int64_t i = 1; i < threads; i++)
            if (shares[(self + i) % threads].help(first, last)) work(first, last);
}

}  // namespace ptq
