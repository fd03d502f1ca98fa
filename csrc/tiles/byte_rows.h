// Tokens of floats as rows of bytes, for formats whose groups of columns have scales. Included once per level, into an
// anonymous namespace; empty but where few tokens are multiplied so: with AVX-512 VNNI alone.
#pragma once

#include "tiles/byte_unit.h"

#if defined(__AVX512VNNI__) && !defined(__AVX512BF16__)
#define PTQ_BYTE_ROWS

namespace ptq::tiles {
namespace {

// A token is four rows, of the lowest bytes first, which are equally far from one another in all of its `arranged`.
// Behind the columns of a row, for each of its segments, which are groups, or at most `segment_blocks` of one: the sum
// of its bytes, and what they are to be multiplied with.
constexpr int byte_rows = 4;
struct Segment {
    int32_t sum;
    float factor;
};

// Calls use(first block, end) for the segments of `blocks` super-blocks in groups of `group_blocks`.
template <class Use>
inline void over_segments(int64_t blocks, int64_t group_blocks, const Use& use) {
    for (int64_t group = 0; group < blocks; group += group_blocks)
        for (int64_t b = group, end = std::min(blocks, group + group_blocks); b < end; b += segment_blocks)
            use(b, std::min(end, b + segment_blocks));
}

// Token t of x [.., k].
inline void arrange_rows(const void* x, Number type, int64_t t, int64_t k, int64_t blocks, int64_t group_blocks,
                         uint8_t* arranged, int64_t arranged_stride) {
    const int64_t stride = arranged_stride / byte_rows;
    auto* rows = reinterpret_cast<int8_t*>(arranged + t * arranged_stride);
    int8_t* to = rows + blocks * block_columns;
    over_segments(blocks, group_blocks, [&](int64_t first, int64_t last) {
        const int64_t begin = first * block_columns, end = std::min(k, last * block_columns);
        const ByteUnit unit(x, type, t * k + begin, t * k + end, byte_rows);
        int32_t sum[byte_rows] = {};
        for (int64_t i = begin; i < last * block_columns; i += tile_rows) {
            const Dwords integers = unit.integers(read(x, type, t * k + i, std::clamp(k - i, int64_t{0}, tile_rows)));
            for (int r = 0; r < byte_rows; r++) {
                const __m128i bytes = ByteUnit::byte_of(integers, r);
                std::memcpy(rows + r * stride + i, &bytes, sizeof bytes);
                sum[r] += ByteUnit::sum_of(bytes);
            }
        }
        for (int r = 0; r < byte_rows; r++) {
            const Segment segment{sum[r], unit.factor(r)};
            std::memcpy(to + r * stride, &segment, sizeof segment);
        }
        to += sizeof(Segment);
    });
}

// What the integers of the rows of some tokens stand for; `zero`: of their codes.
template <int tokens>
inline void joined_rows(const SignedInts (&sums)[byte_rows * tokens], const SignedInts& zero, const int8_t* segments,
                        int64_t stride, Lanes (&total)[tokens]) {
#pragma GCC unroll 16
    for (int r = 0; r < byte_rows * tokens; r++) {
        Segment segment;
        std::memcpy(&segment, segments + r * stride, sizeof segment);
        const Lanes part = converted<Lanes>(sums[r] - zero * segment.sum);
        Lanes& sum = total[r / byte_rows];
        sum = r % byte_rows ? fma(part, fill(segment.factor), sum) : part * segment.factor;
    }
}

}  // namespace
}  // namespace ptq::tiles
#endif
