// Memory that is read once, from one end to the other.
#pragma once

#include <cstdint>

namespace ptq {

// What brings such lines here before they are asked for, by processor: docs/processors.md.
enum class Fetching {
    past_second_level,  // where it was chosen, on Zen 5, what runs between products then keeps its place there
    in_four_pages,      // Intel's: past it a core has sixteen lines on their way at most, half of what memory gives
    second_level,       // Zen 4's, for the same reason; and nothing at all where little is computed: see `Load`
};
extern const Fetching fetching;

// What is done with the lines between two fetches. A core of Zen 4's that computes little finds out by itself which
// line comes next, and is then faster without being told.
enum class Load {
    light,   // little, and they are read in their order
    uneven,  // little, but they are planes of codes, which are read in turns
    heavy,
};

// 16 KB further on, but as if four pages lay side by side, a line of each in turn: where arithmetic takes a part of the
// time, a core of Intel's gets a fifth more from several pages at once than from one.
inline const void* in_four_pages(uintptr_t place) {
    constexpr uintptr_t pages = 4, page = 4096, line = 64, all = pages * page;
    const uintptr_t next = place + all, at = next % all / line;
    uintptr_t found = next / all * all + at % pages * page + at / pages * line;
    asm volatile("" : "+r"(found));  // else GCC takes a loop of fetches for an empty one, and drops it
    return reinterpret_cast<const void*>(found);
}

// All of it, into the second-level cache.
[[gnu::always_inline]] inline void fetch_all(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// Of lines that will be read soon, those `distance` bytes after [from, from + bytes), or as many others: `far`, where
// they go to the second-level cache.
template <Load load = Load::heavy, int64_t far = 8192>
[[gnu::always_inline]] inline void fetch_ahead(const void* from, int64_t bytes, int64_t distance) {
    const auto place = reinterpret_cast<uintptr_t>(from);
    const auto at = [](uintptr_t line) { return reinterpret_cast<const void*>(line); };
    if (fetching == Fetching::in_four_pages)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(in_four_pages(place + i), 0, 2);
    else if (fetching == Fetching::past_second_level || load == Load::uneven)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at(place + distance + i), 0, 0);
    else if (load == Load::heavy)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at(place + far + i), 0, 2);
}

}  // namespace ptq
