// Attention of a few query tokens over plain keys and values: one pass over them, chunk by chunk, with a running
// maximum (flash attention, arXiv 2205.14135). A unit is one head of keys: up to `most_rows` query rows share what is
// read. Included once per level. Sums are float32, and the same for any number of threads and query tokens.
#include "integer/softmax.h"
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

// score[r, s] = q[r] . key[s] for sixteen tokens, or the first `count` of them. `key`: room for them as floats.
template <Number type>
inline void score_block(const Attend& p, const void* keys, int64_t at, int64_t count, const float* q, int64_t rows,
                        float* key, float* score) {
    const int64_t width = padded(p.d);
    for (int64_t s = 0; s < count; s++)
        for (int64_t c = 0; c < p.d; c += lanes)
            store(key + s * width + c, read<type>(keys, at + s * p.d + c, std::min(lanes, p.d - c)));
    for (int64_t r = 0; r < rows; r++) {
        Lanes total[lanes];
#pragma GCC unroll 4
        for (int first = 0; first < lanes; first += together) {
            Lanes sum[together] = {};
            for (int64_t c = 0; c < width; c += lanes) {
                const Lanes x = load(q + r * width + c);
#pragma GCC unroll 16
                for (int s = 0; s < together; s++) sum[s] = fma(x, load(key + (first + s) * width + c), sum[s]);
            }
#pragma GCC unroll 16
            for (int s = 0; s < together; s++) total[first + s] = sum[s];
        }
        integer::sums(total, score + r * chunk);
    }
}

// Vectors of columns of values at once.
template <int rows>
constexpr int vectors = std::clamp(together / rows, 1, 4);

// out[r, c] += sum over tokens of weight[r, s] * value[s, c] for `vectors` of columns of the values, from `from` on;
// with `whole` there are so many, else the last vectors may be short.
template <Number type, int rows, bool whole>
inline void add_columns(const Attend& p, const void* values, int64_t at, int64_t count, int64_t from,
                        const float* weight, float* out) {
    const int64_t width = padded(p.d);
    constexpr int wide = vectors<rows>;
    int64_t left[wide];
    for (int64_t c = 0; c < wide; c++) left[c] = whole ? lanes : std::clamp(p.d - from - c * lanes, int64_t{0}, lanes);
    Lanes acc[rows][wide];
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++)
            acc[r][c] = whole || left[c] ? load(out + r * width + from + c * lanes) : Lanes{};
    for (int64_t s = 0; s < count; s++) {
        Lanes w[rows];
        for (int r = 0; r < rows; r++) w[r] = fill(weight[r * chunk + s]);
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++) {
            const Lanes x = read<type>(values, at + s * p.d + from + c * lanes, whole ? lanes : left[c]);
            for (int r = 0; r < rows; r++) acc[r][c] = fma(w[r], x, acc[r][c]);
        }
    }
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < wide; c++)
            if (whole || left[c]) store(out + r * width + from + c * lanes, acc[r][c]);
}

template <Number type, int rows>
inline void add_values(const Attend& p, const void* values, int64_t at, int64_t count, const float* weight,
                       float* out) {
    constexpr int64_t columns = vectors<rows> * lanes;
    for (int64_t c = 0; c < p.d; c += columns)
        (c + columns <= p.d ? add_columns<type, rows, true> : add_columns<type, rows, false>)(p, values, at, count, c,
                                                                                              weight, out);
}

inline void fetch(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// Scores to weights, for the new maximum of the row; returns what the sums so far are multiplied with.
inline float soften(float* score, int64_t seen, int64_t count, float* largest, float* total) {
    for (int64_t s = seen; s < (count + lanes - 1) / lanes * lanes; s++) score[s] = none;
    Lanes high = fill(*largest);
    for (int64_t s = 0; s < count; s += lanes) {
        const Lanes x = load(score + s);
        high = chosen(x <= high, high, x);  // a NaN wins, so that it shows
    }
    float top = high[0];
    for (int i = 1; i < lanes; i++) top = high[i] <= top ? top : high[i];
    const float factor = *largest == none ? 0.0f : integer::exponential(fill(*largest - top))[0];
    Lanes sum{};
    for (int64_t s = 0; s < count; s += lanes) {
        const Lanes weight = top == none ? Lanes{} : integer::exponential(load(score + s) - top);
        sum += weight;
        store(score + s, weight);
    }
    *largest = top;
    *total = *total * factor + integer::sum(sum);
    return factor;
}

// `rows` query rows of one head, from `first` on.
template <Number type, int rows>
void attend_rows(const Attend& p, int64_t unit, int64_t first, float* scratch) {
    const int64_t width = padded(p.d), length = p.before + p.tokens, all = p.groups * p.tokens;
    float *q = scratch, *out = q + rows * width, *key = out + rows * width, *score = key + lanes * width;
    float largest[rows], total[rows];
    for (int r = 0; r < rows; r++) largest[r] = none, total[r] = 0;
    std::fill(q, key, 0.0f);
    for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < p.d; c += lanes) {
            const int64_t count = std::min(lanes, p.d - c);
            const Lanes x = read<type>(p.q, (unit * all + first + r) * p.d + c, count) * p.scaling;
            store(q + r * width + c, x, count);
        }
    constexpr int64_t size = type == Number::float32 ? 4 : 2;
    const int64_t start = unit * p.room * p.d;
    for (int64_t at = 0; at < length; at += chunk) {
        const int64_t count = std::min(chunk, length - at);
        if (first == 0) {  // what comes next, while this is multiplied
            const int64_t next = std::clamp(length - at - chunk, int64_t{0}, chunk);
            fetch(static_cast<const char*>(p.values) + (start + at * p.d) * size, count * p.d * size);
            fetch(static_cast<const char*>(p.keys) + (start + (at + chunk) * p.d) * size, next * p.d * size);
        }
        for (int64_t s = 0; s < count; s += lanes)
            score_block<type>(p, p.keys, start + (at + s) * p.d, std::min(lanes, count - s), q, rows, key, score + s);
        for (int r = 0; r < rows; r++) {
            const int64_t seen = p.before + (first + r) % p.tokens + 1 - at;  // a token sees itself, and none after it
            const float factor =
                soften(score + r * chunk, std::clamp(seen, int64_t{0}, count), count, largest + r, total + r);
            for (int64_t c = 0; c < width; c++) out[r * width + c] *= factor;
        }
        add_values<type, rows>(p, p.values, start + at * p.d, count, score, out);
    }
    const int64_t b = unit / p.heads, head = unit % p.heads;
    for (int r = 0; r < rows; r++) {
        const int64_t group = (first + r) / p.tokens, token = (first + r) % p.tokens;
        const int64_t to = (((b * p.tokens + token) * p.heads + head) * p.groups + group) * p.d;
        const float inverse = 1 / total[r];
        for (int64_t c = 0; c < p.d; c += lanes)
            write<type>(p.out, to + c, rounded<type>(load(out + r * width + c) * inverse), std::min(lanes, p.d - c));
    }
}

template <Number type>
void attend_of(const Attend& p, int64_t first, int64_t last) {
    const int64_t width = padded(p.d), rows = p.groups * p.tokens;
    std::vector<float> memory((2 * most_rows + lanes) * width + most_rows * chunk);
    for (int64_t unit = first; unit < last; unit++)
        for (int64_t row = 0; row < rows;) {
            const int64_t left = rows - row;
            if (left >= 4)
                attend_rows<type, 4>(p, unit, row, memory.data()), row += 4;
            else if (left >= 2)
                attend_rows<type, 2>(p, unit, row, memory.data()), row += 2;
            else
                attend_rows<type, 1>(p, unit, row, memory.data()), row += 1;
        }
}

void attend(const Attend& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? attend_of<Number::float32> : attend_of<Number::bfloat16>)(p, first, last);
}

}  // namespace
}  // namespace ptq::steps
