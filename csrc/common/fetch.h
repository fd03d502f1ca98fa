// Memory that is read once, from one end to the other.
#pragma once

#include <cstdint>

namespace ptq {

// Whether such lines take the way through the second-level cache: on Intel's processors. Past it a core of theirs has
// sixteen lines on their way at most, half of what its memory gives; on Zen 5, where it was chosen, what runs between
// products then keeps its place there.
extern const bool fetch_into_second_level;

// 16 KB further on, but as if four pages lay side by side, a line of each in turn: where arithmetic takes a part of the
// time, a core of Intel's gets a fifth more from several pages at once than from one.
inline const void* in_four_pages(uintptr_t place) {
    constexpr uintptr_t pages = 4, page = 4096, line = 64, all = pages * page;
    const uintptr_t next = place + all, at = next % all / line;
    uintptr_t found = next / all * all + at % pages * page + at / pages * line;
    asm volatile("" : "+r"(found));  // else GCC takes a loop of fetches for an empty one, and drops it
    return reinterpret_cast<const void*>(found);
}

// Of lines that will be read soon, those `distance` bytes after [from, from + bytes), or as many others.
[[gnu::always_inline]] inline void fetch_ahead(const void* from, int64_t bytes, int64_t distance) {
    const auto place = reinterpret_cast<uintptr_t>(from);
    if (fetch_into_second_level)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(in_four_pages(place + i), 0, 2);
    else
        for (int64_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(reinterpret_cast<const void*>(place + distance + i), 0, 0);
}

}  // namespace ptq
