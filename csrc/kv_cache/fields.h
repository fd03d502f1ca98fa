// Codes of sixteen tokens. Included once per level.
#pragma once

#include "common/fetch.h"
#include "common/lanes.h"
#include "common/softmax.h"
#include "kv_cache/kernels.h"

namespace ptq::kv_cache {
namespace {

using vectors::largest_of, vectors::nearest, vectors::power_of_two, vectors::sum, vectors::sums;

inline Dwords load_words(const uint32_t* from) {
    return load_vector<Dwords>(from);
}

// Where the words of a block of tokens lie: word w of the widest plane at low + w * stride, of the second plane (three
// and six bits have one) at high + w * stride.
struct Words {
    const uint32_t *low, *high;
    int64_t stride;

    Words from_block(int64_t block) const { return {low + block * block_tokens, high + block * block_tokens, stride}; }
};

template <int BITS>
inline Words words_of(const Side& side, int64_t index, int64_t head, int64_t block) {
    const uint32_t* at = side.codes_of(index, head);
    const int64_t stride = side.channel_major ? chunk : block_tokens;
    at += block * block_tokens * (side.channel_major ? 1 : words(side.d, BITS));
    return {at, at + (side.d * widest_plane(BITS) + 31) / 32 * stride, stride};
}

// How codes of so many bits are split into planes: `count` channels of the widest in a word, half of them in 16 bits.
// Those have 16 bits of the second plane, the word of which is that of `wide` channels.
template <int BITS>
struct Planes {
    static constexpr int plane = widest_plane(BITS), above = BITS - plane;
    static constexpr int count = 32 / plane, half = count / 2, wide = above ? 32 / above : 0;
};

// Channels first, first + 1, ... of a word of the widest plane, as floats. All that are asked for lie in one word
// of each plane.
template <int BITS>
struct Fields : Planes<BITS> {
    using Planes<BITS>::plane, Planes<BITS>::above, Planes<BITS>::count, Planes<BITS>::wide;
    Dwords low, high;

    Fields(const Words& at, int64_t first) {
        low = load_words(at.low + first / count * at.stride) >> static_cast<uint32_t>(first % count * plane);
        if constexpr (above > 0)
            high = load_words(at.high + first / wide * at.stride) >> static_cast<uint32_t>(first % wide * above);
    }

    Lanes get(int i) const {
        Dwords x = low >> static_cast<uint32_t>(i * plane) & ((1u << plane) - 1);
        if constexpr (above > 0) x |= (high >> static_cast<uint32_t>(i * above) & ((1u << above) - 1)) << plane;
        return converted<Lanes>((SignedInts)x);
    }
};

}  // namespace
}  // namespace ptq::kv_cache
