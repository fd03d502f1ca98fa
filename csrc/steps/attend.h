// Attention of a few query tokens over plain keys and values: one pass over them, chunk by chunk, with a running
// maximum (flash attention, arXiv 2205.14135). A unit is one part of a head of keys: up to `most_rows` query rows share
// what is read. Parts are merged afterwards, in their order. Included once per level. Sums are float32, and the same
// for any number of threads and, of finite numbers, of query tokens.
#include "steps/scores.h"

namespace ptq::steps {
namespace {

constexpr int64_t most_rows = 4;
constexpr float none = -std::numeric_limits<float>::infinity();

// Keys that are fetched while values are added up: so many tokens.
struct Ahead {
    const char* keys = nullptr;
    int64_t tokens = 0;
};

// Vectors of columns of values at once.
template <int rows>
constexpr int vectors = std::clamp(together / rows, 1, 4);

// out[r, c] += sum over tokens of weight[r, s] * value[s, c] for `vectors` of columns of the values, from `from` on;
// with `whole` there are so many, else the last vectors may be short. Of the keys ahead the same columns are fetched.
template <Number type, int rows, bool whole>
inline void add_columns(const Attend& p, int64_t at, int64_t count, int64_t from, const float* weight, float* out,
                        const Ahead& ahead) {
    const int64_t width = padded(p.d);
    constexpr int wide = vectors<rows>;
    const int64_t columns = whole ? wide * lanes : p.d - from;
    int64_t left[wide];
    for (int64_t c = 0; c < wide; c++) left[c] = whole ? lanes : std::clamp(p.d - from - c * lanes, int64_t{0}, lanes);
    Lanes acc[rows][wide];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++)
            acc[r][c] = whole || left[c] ? load(out + r * width + from + c * lanes) : Lanes{};
    for (int64_t s = 0; s < count; s++) {
        if (s < ahead.tokens) fetch_all(ahead.keys + (s * p.d + from) * bytes<type>, columns * bytes<type>);
        Lanes w[rows];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) w[r] = fill(weight[r * chunk + s]);
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++) {
            const Lanes x = read<type>(p.values, at + s * p.d + from + c * lanes, whole ? lanes : left[c]);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) acc[r][c] = fma(w[r], x, acc[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++)
            if (whole || left[c]) store(out + r * width + from + c * lanes, acc[r][c]);
}

#if defined(__AVX512BF16__)
// The same of bfloat16 in whole steps of 64 columns: weights are rounded to it, too, and an instruction adds up the
// products of two tokens. Where rows are so many that they, and not memory, take the time.
template <int rows>
inline void add_pairs(const Attend& p, int64_t at, int64_t count, const float* weight, float* out, const Ahead& ahead) {
    constexpr int64_t columns = 64;
    alignas(64) uint16_t rounded[rows * chunk];
    for (int64_t i = 0; i < rows * chunk; i += 2 * lanes) {
        const auto low = (__m512)load(weight + i), high = (__m512)load(weight + i + lanes);
        _mm512_store_si512(rounded + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    const auto first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                        5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const auto last = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    const auto* values = static_cast<const uint16_t*>(p.values) + at;
    for (int64_t c = 0; c < p.d; c += columns) {
        __m512 acc[rows][4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) acc[r][v] = (__m512)load(out + r * p.d + c + v * lanes);
        for (int64_t s = 0; s < count; s += 2) {
            const uint16_t* from = values + s * p.d + c;
            if (s < ahead.tokens) fetch_all(ahead.keys + (s * p.d + c) * 2, columns * 2);
            if (s + 1 < ahead.tokens) fetch_all(ahead.keys + ((s + 1) * p.d + c) * 2, columns * 2);
            __m512i pair[4];
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const auto one = _mm512_loadu_si512(from + half * 32);
                const auto next = s + 1 < count ? _mm512_loadu_si512(from + p.d + half * 32) : _mm512_setzero_si512();
                pair[2 * half] = _mm512_permutex2var_epi16(one, first, next);
                pair[2 * half + 1] = _mm512_permutex2var_epi16(one, last, next);
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                uint32_t two;
                std::memcpy(&two, rounded + r * chunk + s, sizeof two);
                const auto w = (__m512bh)_mm512_set1_epi32(static_cast<int>(two));
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], w, (__m512bh)pair[v]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) store(out + r * p.d + c + v * lanes, (Lanes)acc[r][v]);
    }
}
#endif

template <Number type, int rows>
inline void add_values(const Attend& p, int64_t at, int64_t count, const float* weight, float* out,
                       const Ahead& ahead) {
#if defined(__AVX512BF16__)
    if constexpr (type == Number::bfloat16)
        if (p.more && p.d % 64 == 0) return add_pairs<rows>(p, at, count, weight, out, ahead);
#endif
    constexpr int64_t columns = vectors<rows> * lanes;
    for (int64_t c = 0; c < p.d; c += columns) {
        const auto kernel = c + columns <= p.d ? add_columns<type, rows, true> : add_columns<type, rows, false>;
        kernel(p, at, count, c, weight, out, ahead);
    }
}

// Scores to weights, for the new maximum of the row; returns what the sums so far are multiplied with.
inline float soften(float* score, int64_t seen, int64_t count, const uint8_t* mask, float* largest, float* total) {
    for (int64_t s = seen; s < (count + lanes - 1) / lanes * lanes; s++) score[s] = none;
    for (int64_t s = 0; mask && s < count; s++) score[s] = mask[s] ? score[s] : none;
    Lanes high = fill(*largest);
    for (int64_t s = 0; s < count; s += lanes) high = max(load(score + s), high);
    const float top = vectors::largest_of(high);
    const float factor = *largest == none ? 0.0f : vectors::power_of_two(fill(*largest - top))[0];
    Lanes sum{};
    const float base = top == none ? 0.0f : top;  // a NaN, which is no maximum, shows in the sum of the weights
    for (int64_t s = 0; s < count; s += lanes) {
        const Lanes weight = vectors::power_of_two(load(score + s) - base);
        sum += weight;
        store(score + s, weight);
    }
    *largest = top;
    *total = *total * factor + vectors::sum(sum);
    return factor;
}

// The result of a query row: sums over the values, divided by the sum of their weights, which are powers of two of
// scores less the largest; of a row that sees nothing, 0.
template <Number type>
inline void write_row(const Attend& p, int64_t unit, int64_t row, const float* sums, float largest, float total) {
    const int64_t b = unit / p.heads, head = unit % p.heads, group = row / p.tokens, token = row % p.tokens;
    const int64_t query_head = head * p.groups + group;
    const int64_t to = ((b * p.tokens + token) * p.heads * p.groups + query_head) * p.d;
    if (p.sinks && total != 0) total += std::exp2(p.sinks[query_head] - largest);
    const float inverse = total == 0 ? 0.0f : 1 / total;
    for (int64_t c = 0; c < p.d; c += lanes)
        write<type>(p.out, to + c, rounded<type>(load(sums + c) * inverse), std::min(lanes, p.d - c));
}

// `rows` query rows of one part of a head, from `first` on. While keys are multiplied, their values are fetched, and
// while these are added up, the keys behind them, after the last of the part those of `next`: once, by the first rows.
template <Number type, int rows>
void attend_rows(const Attend& p, int64_t unit, int64_t part, int64_t first, const Ahead& next, float* scratch) {
    const int64_t width = padded(p.d), queries = query_width<type>(p);
    const int64_t from = part * p.part, start = unit * p.room * p.d;
    const int64_t length = std::min(p.before + p.tokens, from + p.part);
    const auto place = [&](const void* x, int64_t token) {
        return static_cast<const char*>(x) + (start + token * p.d) * bytes<type>;
    };
    float *q = scratch, *out = q + rows * queries, *score = out + rows * width;
    float largest[rows], total[rows];
    for (int r = 0; r < rows; r++) largest[r] = none, total[r] = 0;
    std::fill(q, score, 0.0f);
    take_queries<type>(p, unit * p.rows() + first, rows, q);
    for (int64_t at = from; at < length; at += chunk) {
        const int64_t count = std::min(chunk, length - at);
        if (p.mask && p.tokens == 1) {  // padding, mostly, is not read
            const uint8_t* mask = p.mask_of(unit, 0, at);
            if (std::none_of(mask, mask + count, [](uint8_t sees) { return sees != 0; })) continue;
        }
        const char* values = first ? nullptr : place(p.values, at);
        const int64_t behind = length - at - chunk;
        const Ahead ahead = first ? Ahead{} : behind > 0 ? Ahead{place(p.keys, at + chunk), behind} : next;
        scores<type, rows>(p, unit, at, count, q, score, values);
        for (int r = 0; r < rows; r++) {
            // Without a mask, a token sees itself and none after it.
            const int64_t seen = p.mask ? count : p.before + (first + r) % p.tokens + 1 - at;
            const uint8_t* mask = p.mask ? p.mask_of(unit, first + r, at) : nullptr;
            const float factor =
                soften(score + r * chunk, std::clamp(seen, int64_t{0}, count), count, mask, largest + r, total + r);
            for (int64_t c = 0; c < width; c++) out[r * width + c] *= factor;
        }
        add_values<type, rows>(p, start + at * p.d, count, score, out, ahead);
    }
    for (int r = 0; r < rows; r++) {
        if (!p.partial) {
            write_row<type>(p, unit, first + r, out + r * width, largest[r], total[r]);
        } else {
            float* to = p.partial_row(unit, part, first + r);
            std::copy(out + r * width, out + (r + 1) * width, to);
            to[width] = largest[r], to[width + 1] = total[r];
        }
    }
}

template <Number type>
void attend_of(const Attend& p, int64_t first, int64_t last) {
    std::vector<float> memory(most_rows * (query_width<type>(p) + padded(p.d) + chunk));
    const auto keys_of = [&](int64_t i) -> Ahead {
        const int64_t unit = i / p.parts(), from = i % p.parts() * p.part;
        return {static_cast<const char*>(p.keys) + (unit * p.room + from) * p.d * bytes<type>,
                p.before + p.tokens - from};
    };
    for (int64_t i = first; i < last; i++) {
        const int64_t unit = i / p.parts(), part = i % p.parts();
        const Ahead next = i + 1 < p.units ? keys_of(i + 1) : Ahead{};  // mostly this thread's
        for (int64_t row = 0; row < p.rows();) {
            const int64_t left = p.rows() - row;
            if (left >= 4)
                attend_rows<type, 4>(p, unit, part, row, next, memory.data()), row += 4;
            else if (left >= 2)
                attend_rows<type, 2>(p, unit, part, row, next, memory.data()), row += 2;
            else
                attend_rows<type, 1>(p, unit, part, row, next, memory.data()), row += 1;
        }
    }
}

void attend(const Attend& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? attend_of<Number::float32> : attend_of<Number::bfloat16>)(p, first, last);
}

template <Number type>
void merge_of(const Attend& p, int64_t first, int64_t last) {
    const int64_t width = padded(p.d);
    std::vector<float> sums(width);
    for (int64_t i = first; i < last; i++) {
        const int64_t unit = i / p.rows(), row = i % p.rows();
        float largest = none, total = 0;
        for (int64_t part = 0; part < p.parts(); part++)
            largest = std::max(largest, p.partial_row(unit, part, row)[width]);
        std::fill(sums.begin(), sums.end(), 0.0f);
        const float base = largest == none ? 0.0f : largest;
        for (int64_t part = 0; part < p.parts(); part++) {
            const float* from = p.partial_row(unit, part, row);
            const float factor = vectors::power_of_two(fill(from[width] - base))[0];  // 0 where it sees nothing of it
            total += factor * from[width + 1];
            for (int64_t c = 0; c < width; c += lanes)
                store(sums.data() + c, load(sums.data() + c) + factor * load(from + c));
        }
        write_row<type>(p, unit, row, sums.data(), largest, total);
    }
}

void merge(const Attend& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? merge_of<Number::float32> : merge_of<Number::bfloat16>)(p, first, last);
}

}  // namespace
}  // namespace ptq::steps
