// Sums of the values of a chunk, each times the weights of some query rows. Included once per level.
#pragma once

#include "kv_cache/pairs.h"

namespace ptq::kv_cache {
namespace {

#if defined(__AVX512F__)
constexpr int value_sums = 16;  // that fit into registers
#else
constexpr int value_sums = 4;
#endif

// The sum of sixteen signed integers.
inline int32_t sum_of(const Dwords& x) {
#if defined(__AVX2__)
    const __m256i eight = _mm256_add_epi32(first_eight(x), last_eight(x));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_hadd_epi32(four, four);
    return _mm_extract_epi32(two, 0) + _mm_extract_epi32(two, 1);
#else
    uint32_t total = 0;
    for (int i = 0; i < lanes; i++) total += x[i];
    return static_cast<int32_t>(total);
#endif
}

// What values are multiplied with: weights of tokens times the scales of their values.
template <int ROWS>
struct TokenWeights {
    alignas(64) uint32_t integers[ROWS * chunk / 2];  // [two blocks, row, lane]: of a token of each of them
    float factor[ROWS];                               // of the integers
    float offset[ROWS];                               // what every channel gets beside them

    // Those of a row: of as many tokens, and zeros up to the next multiple of sixteen; `minima` is the sum of the
    // minima of values times their weights. What rounding leaves over is given to the code in the middle.
    void take(int row, int64_t count, const float* weight, float largest, const Lanes& total, float minima, int bits) {
        const Integers rounded(largest, bits, chunk);
        Dwords taken{};
        for (int64_t t = 0, i = row; t < count; t += 2 * block_tokens, i += ROWS) {
            const Dwords first = rounded.of(load(weight + t));
            const Dwords next = rounded.of(t + block_tokens < count ? load(weight + t + block_tokens) : Lanes{});
            taken += first + next - 2 * Integers::zero;
            store_vector(integers + i * lanes, paired(first, next));
        }
        factor[row] = rounded.factor;
        const float left = sum(total) - rounded.factor * static_cast<float>(sum_of(taken));
        offset[row] = minima + static_cast<float>((1 << bits) - 1) / 2 * left;
    }
};

// Keys that are fetched while values are added up: so many bytes of codes.
struct Ahead {
    const char* keys = nullptr;
    int64_t bytes = 0;
};

// Those of as many vectors.
inline void sums_of(const SignedInts (&x)[value_sums], int32_t* out) {
#if defined(__AVX512F__)
    sums(x, out);
#elif defined(__AVX2__)
    const auto eight = [&](int i) { return (__m256i)(x[i].low + x[i].high); };
    const __m256i halves =
        _mm256_hadd_epi32(_mm256_hadd_epi32(eight(0), eight(1)), _mm256_hadd_epi32(eight(2), eight(3)));
    store_vector(out, _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#else
    for (int i = 0; i < value_sums; i++) out[i] = sum_of((Dwords)x[i]);
#endif
}

// out[r, c] = offset[r] + factor[r] * sum over the tokens of `count` blocks of weight[r, t] * value[t, c], for CHANNELS
// channels from `first`. `factor` and `offset` are given for every sum.
template <int BITS, int ROWS, int CHANNELS>
PTQ_INLINE void value_tile(const Words& at, int64_t count, int64_t first, const TokenWeights<ROWS>& w,
                           const Lanes& factor, const Lanes& offset, float* out, int64_t stride) {
    constexpr int step = std::min(Pairs<BITS>::half, CHANNELS);
    SignedInts acc[value_sums] = {};
    for (int64_t b = 0; b < count; b += 2) {
        Dwords weight[ROWS];
        for (int r = 0; r < ROWS; r++) weight[r] = load_words(w.integers + (b / 2 * ROWS + r) * lanes);
#pragma GCC unroll 8
        for (int g = 0; g < CHANNELS; g += step) {
            const auto values = Pairs<BITS>::of_tokens(at.from_block(b), first + g);
#pragma GCC unroll 8
            for (int i = 0; i < step; i++) {
                const Dwords value = values.get(i);
                for (int r = 0; r < ROWS; r++)
                    acc[r * CHANNELS + g + i] = dot(acc[r * CHANNELS + g + i], weight[r], value);
            }
        }
    }
    int32_t total[lanes] = {};
    sums_of(acc, total);
    alignas(64) float y[lanes];
    store(y, converted<Lanes>(load_vector<SignedInts>(total)) * factor + offset);
    for (int r = 0; r < ROWS; r++) std::memcpy(out + r * stride + first, y + r * CHANNELS, CHANNELS * sizeof(float));
}

// Meanwhile keys are fetched, as much for each channel.
template <int BITS, int ROWS>
void values(const Side& v, int64_t index, int64_t head, int64_t count, const TokenWeights<ROWS>& w, float* out,
            const Ahead& ahead) {
    constexpr int channels = value_sums / (ROWS == 3 ? 4 : ROWS), rest = std::min(Pairs<BITS>::half, channels);
    const Words at = words_of<BITS>(v, index, head, 0);
    const int64_t share = ahead.bytes / v.d, stride = partial_stride(v.d);
    const auto tiles = [&]<int CHANNELS>(std::integral_constant<int, CHANNELS>, int64_t begin, int64_t end) {
        float all[2][lanes] = {};
        for (int i = 0; i < ROWS * CHANNELS; i++)
            all[0][i] = w.factor[i / CHANNELS], all[1][i] = w.offset[i / CHANNELS];
        const Lanes factor = load(all[0]), offset = load(all[1]);
        for (int64_t c = begin; c < end; c += CHANNELS) {
            fetch_all(ahead.keys + c * share, CHANNELS * share);
            value_tile<BITS, ROWS, CHANNELS>(at, count, c, w, factor, offset, out, stride);
        }
    };
    const int64_t whole = v.d / channels * channels;
    tiles(std::integral_constant<int, channels>{}, 0, whole);
    tiles(std::integral_constant<int, rest>{}, whole, v.d);
}

}  // namespace
}  // namespace ptq::kv_cache
