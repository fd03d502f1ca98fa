// Memory that is read once, from one end to the other.
#pragma once

#include <cstdint>

namespace ptq {

// Whether such lines take the way through the second-level cache: on Intel's processors. Past it a core of theirs has
// sixteen lines on their way at most, half of what its memory gives; on Zen 5, where it was chosen, what runs between
// products then keeps its place there.
extern const bool fetch_into_second_level;

// Of lines [from, from + bytes), which will be read soon.
[[gnu::always_inline]] inline void fetch_once(const void* from, int64_t bytes) {
    const auto* lines = static_cast<const uint8_t*>(from);
    if (fetch_into_second_level)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(lines + i, 0, 2);
    else
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(lines + i, 0, 0);
}

}  // namespace ptq
