// Codes of sixteen tokens as floats, and the vector helpers of attention. Included once per level.
#pragma once

#include "common/fetch.h"
#include "common/lanes.h"
#include "common/softmax.h"
#include "kv_cache/kernels.h"

namespace ptq::kv_cache {
namespace {

using vectors::exponential, vectors::Ints, vectors::nearest, vectors::sum, vectors::sums;

inline Ints load_words(const uint32_t* from) {
    return load_vector<Ints>(from);
}

// Where the words of a block of tokens lie: word w of the widest plane at low + w * stride, of the second plane (three
// and six bits have one) at high + w * stride.
struct Words {
    const uint32_t *low, *high;
    int64_t stride;
};

template <int BITS>
inline Words words_of(const Side& side, int64_t index, int64_t head, int64_t block) {
    const uint32_t* at = side.codes_of(index, head);
    const int64_t stride = side.channel_major ? chunk : block_tokens;
    at += block * block_tokens * (side.channel_major ? 1 : words(side.d, BITS));
    return {at, at + (side.d * widest_plane(BITS) + 31) / 32 * stride, stride};
}

// Channels first, first + 1, ... of a word of the widest plane. `first` is even.
template <int BITS>
struct Fields {
    static constexpr int plane = widest_plane(BITS), above = BITS - plane, count = 32 / plane;
    Ints low, high;

    // `whole`: the first channel is the first of its word.
    Fields(const Words& at, int64_t first, bool whole = false) {
        low = load_words(at.low + first / count * at.stride);
        if (!whole) low >>= static_cast<uint32_t>(first % count * plane);
        if constexpr (above > 0) {
            constexpr int wide = 32 / above;
            const Ints word = load_words(at.high + first / wide * at.stride);
            high = word >> static_cast<uint32_t>(first % wide * above) << plane;
        }
    }

    inline __attribute__((always_inline)) Lanes get(int i) const {
        constexpr uint32_t mask = (1u << plane) - 1;
        const Ints x = low >> static_cast<uint32_t>(i * plane);
        if constexpr (above > 0) return lowest((x & mask) | (high >> static_cast<uint32_t>(i * above) & ~mask));
        return lowest(x);
    }

  private:
    static inline Lanes as_floats(Ints x) { return converted<Lanes>((SignedInts)x); }
    static inline Lanes lowest(Ints x) {  // the lowest BITS bits
#if defined(__AVX512F__)
        if constexpr (BITS <= 4) {
            Lanes table;  // one instruction looks sixteen numbers up by the lowest four bits
            for (int i = 0; i < lanes; i++) table[i] = static_cast<float>(i & ((1 << BITS) - 1));
            return vectors::picked(table, x);
        }
#endif
        return as_floats(x & ((1u << BITS) - 1));
    }
};

}  // namespace
}  // namespace ptq::kv_cache
