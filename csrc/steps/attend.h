// Attention of a few query tokens over plain keys and values: one pass over them, chunk by chunk, with a running
// maximum (flash attention, arXiv 2205.14135). A unit is one part of a head of keys: up to `most_rows` query rows share
// what is read. Parts are merged afterwards, in their order. Included once per level. Sums are float32, and the same
// for any number of threads and, of finite numbers, of query tokens.
#include <cstring>

#include "common/softmax.h"
#include "steps/numbers.h"

namespace ptq::steps {
namespace {

constexpr int64_t chunk = 128, most_rows = 4;  // tokens; rows
#if defined(__AVX512F__)
constexpr int together = 16;  // sums of sixteen numbers that are kept in registers
#else
constexpr int together = 4;
#endif
constexpr float none = -std::numeric_limits<float>::infinity();

// score[r, s] = q[r] . key[s] for as many tokens as make sixteen scores. Of tokens from `count` on, whatever.
template <Number type, int rows, bool whole>
inline void score_tile(const Attend& p, int64_t at, int64_t count, const float* q, float* score) {
    constexpr int tile = lanes / rows, step = std::max(1, together / rows);  // tokens; tokens at once
    const int64_t width = padded(p.d), d = p.d;
    Lanes total[lanes];
#pragma GCC unroll 16
    for (int first = 0; first < tile; first += step) {
        int64_t from[step];
        for (int t = 0; t < step; t++) from[t] = at + std::min<int64_t>(first + t, count - 1) * d;
        Lanes acc[rows][step] = {};
        for (int64_t c = 0; c < width; c += lanes) {
            Lanes key[step];
#pragma GCC unroll 16
            for (int t = 0; t < step; t++)
                key[t] = read<type>(p.keys, from[t] + c, whole ? lanes : std::min(lanes, d - c));
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const Lanes x = load(q + r * width + c);
#pragma GCC unroll 16
                for (int t = 0; t < step; t++) acc[r][t] = fma(x, key[t], acc[r][t]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int t = 0; t < step; t++) total[r * tile + first + t] = acc[r][t];
    }
    float sum[lanes];
    vectors::sums(total, sum);
    for (int r = 0; r < rows; r++) std::memcpy(score + r * chunk, sum + r * tile, tile * sizeof(float));
}

// The same for `count` tokens.
template <Number type, int rows>
inline void score_block(const Attend& p, int64_t at, int64_t count, const float* q, float* score) {
    constexpr int tile = lanes / rows;
    const auto kernel = p.d % lanes ? score_tile<type, rows, false> : score_tile<type, rows, true>;
    for (int64_t s = 0; s < count; s += tile) kernel(p, at + s * p.d, count - s, q, score + s);
}

// Vectors of columns of values at once.
template <int rows>
constexpr int vectors = std::clamp(together / rows, 1, 4);

// out[r, c] += sum over tokens of weight[r, s] * value[s, c] for `vectors` of columns of the values, from `from` on;
// with `whole` there are so many, else the last vectors may be short.
template <Number type, int rows, bool whole>
inline void add_columns(const Attend& p, int64_t at, int64_t count, int64_t from, const float* weight, float* out) {
    const int64_t width = padded(p.d);
    constexpr int wide = vectors<rows>;
    int64_t left[wide];
    for (int64_t c = 0; c < wide; c++) left[c] = whole ? lanes : std::clamp(p.d - from - c * lanes, int64_t{0}, lanes);
    Lanes acc[rows][wide];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++)
            acc[r][c] = whole || left[c] ? load(out + r * width + from + c * lanes) : Lanes{};
    for (int64_t s = 0; s < count; s++) {
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

template <Number type, int rows>
inline void add_values(const Attend& p, int64_t at, int64_t count, const float* weight, float* out) {
    constexpr int64_t columns = vectors<rows> * lanes;
    for (int64_t c = 0; c < p.d; c += columns)
        (c + columns <= p.d ? add_columns<type, rows, true> : add_columns<type, rows, false>)(p, at, count, c, weight,
                                                                                              out);
}

inline void fetch(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// Scores to weights, for the new maximum of the row; returns what the sums so far are multiplied with.
inline float soften(float* score, int64_t seen, int64_t count, const uint8_t* mask, float* largest, float* total) {
    for (int64_t s = seen; s < (count + lanes - 1) / lanes * lanes; s++) score[s] = none;
    for (int64_t s = 0; mask && s < count; s++) score[s] = mask[s] ? score[s] : none;
    Lanes high = fill(*largest);
    for (int64_t s = 0; s < count; s += lanes) {
        const Lanes x = load(score + s);
        high = chosen(x <= high, high, x);
    }
    float top = high[0];
    for (int i = 1; i < lanes; i++) top = high[i] <= top ? top : high[i];
    const float factor = *largest == none ? 0.0f : vectors::exponential(fill(*largest - top))[0];
    Lanes sum{};
    const float base = top == none ? 0.0f : top;  // a NaN, which is no maximum, shows in the sum of the weights
    for (int64_t s = 0; s < count; s += lanes) {
        const Lanes weight = vectors::exponential(load(score + s) - base);
        sum += weight;
        store(score + s, weight);
    }
    *largest = top;
    *total = *total * factor + vectors::sum(sum);
    return factor;
}

// The result of a query row: sums over the values, divided by the sum of their weights; of a row that sees nothing, 0.
template <Number type>
inline void write_row(const Attend& p, int64_t unit, int64_t row, const float* sums, float total) {
    const int64_t b = unit / p.heads, head = unit % p.heads, group = row / p.tokens, token = row % p.tokens;
    const int64_t to = (((b * p.tokens + token) * p.heads + head) * p.groups + group) * p.d;
    const float inverse = total == 0 ? 0.0f : 1 / total;
    for (int64_t c = 0; c < p.d; c += lanes)
        write<type>(p.out, to + c, rounded<type>(load(sums + c) * inverse), std::min(lanes, p.d - c));
}

// `rows` query rows of one part of a head, from `first` on.
template <Number type, int rows>
void attend_rows(const Attend& p, int64_t unit, int64_t part, int64_t first, float* scratch) {
    const int64_t width = padded(p.d), from = part * part_tokens;
    const int64_t length = std::min(p.before + p.tokens, from + part_tokens);
    float *q = scratch, *out = q + rows * width, *score = out + rows * width;
    float largest[rows], total[rows];
    for (int r = 0; r < rows; r++) largest[r] = none, total[r] = 0;
    std::fill(q, score, 0.0f);
    for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < p.d; c += lanes) {
            const int64_t count = std::min(lanes, p.d - c);
            const Lanes x = read<type>(p.q, (unit * p.rows() + first + r) * p.d + c, count) * p.scaling;
            store(q + r * width + c, x, count);
        }
    constexpr int64_t size = type == Number::float32 ? 4 : 2;
    const int64_t start = unit * p.room * p.d;
    for (int64_t at = from; at < length; at += chunk) {
        const int64_t count = std::min(chunk, length - at);
        if (p.mask && p.tokens == 1) {  // padding, mostly, is not read
            const uint8_t* mask = p.mask_of(unit, 0, at);
            if (std::none_of(mask, mask + count, [](uint8_t sees) { return sees != 0; })) continue;
        }
        for (int64_t s = 0; s < count; s += lanes) {
            if (first == 0) {  // what comes next, a little at a time
                const int64_t next = std::min(lanes, p.before + p.tokens - at - chunk - s);
                fetch(static_cast<const char*>(p.values) + (start + (at + s) * p.d) * size,
                      std::min(lanes, count - s) * p.d * size);
                fetch(static_cast<const char*>(p.keys) + (start + (at + chunk + s) * p.d) * size, next * p.d * size);
            }
            score_block<type, rows>(p, start + (at + s) * p.d, std::min(lanes, count - s), q, score + s);
        }
        for (int r = 0; r < rows; r++) {
            // Without a mask, a token sees itself and none after it.
            const int64_t seen = p.mask ? count : p.before + (first + r) % p.tokens + 1 - at;
            const uint8_t* mask = p.mask ? p.mask_of(unit, first + r, at) : nullptr;
            const float factor =
                soften(score + r * chunk, std::clamp(seen, int64_t{0}, count), count, mask, largest + r, total + r);
            for (int64_t c = 0; c < width; c++) out[r * width + c] *= factor;
        }
        add_values<type, rows>(p, start + at * p.d, count, score, out);
    }
    for (int r = 0; r < rows; r++) {
        if (!p.partial) {
            write_row<type>(p, unit, first + r, out + r * width, total[r]);
        } else {
            float* to = p.partial_row(unit, part, first + r);
            std::copy(out + r * width, out + (r + 1) * width, to);
            to[width] = largest[r], to[width + 1] = total[r];
        }
    }
}

template <Number type>
void attend_of(const Attend& p, int64_t first, int64_t last) {
    std::vector<float> memory(2 * most_rows * padded(p.d) + most_rows * chunk);
    for (int64_t i = first; i < last; i++) {
        const int64_t unit = i / p.parts(), part = i % p.parts();
        for (int64_t row = 0; row < p.rows();) {
            const int64_t left = p.rows() - row;
            if (left >= 4)
                attend_rows<type, 4>(p, unit, part, row, memory.data()), row += 4;
            else if (left >= 2)
                attend_rows<type, 2>(p, unit, part, row, memory.data()), row += 2;
            else
                attend_rows<type, 1>(p, unit, part, row, memory.data()), row += 1;
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
        for (int64_t part = 0; part < p.parts(); part++) {
            const float high = p.partial_row(unit, part, row)[width];
            largest = high <= largest ? largest : high;
        }
        std::fill(sums.begin(), sums.end(), 0.0f);
        const float base = largest == none ? 0.0f : largest;
        for (int64_t part = 0; part < p.parts(); part++) {
            const float* from = p.partial_row(unit, part, row);
            const float factor = vectors::exponential(fill(from[width] - base))[0];  // 0 where it sees nothing of it
            total += factor * from[width + 1];
            for (int64_t c = 0; c < width; c += lanes)
                store(sums.data() + c, load(sums.data() + c) + factor * load(from + c));
        }
        write_row<type>(p, unit, row, sums.data(), total);
    }
}

void merge(const Attend& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? merge_of<Number::float32> : merge_of<Number::bfloat16>)(p, first, last);
}

}  // namespace
}  // namespace ptq::steps
