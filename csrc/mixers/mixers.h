// The kernels of one level: included after PTQ_LEVEL, the name of its table, is defined. Sixteen lanes at every level,
// so that the numbers are the same.
#include <cmath>
#include <vector>

#include "common/softmax.h"
#include "mixers/kernels.h"
#include "mixers/scan.h"
#include "steps/numbers.h"

namespace ptq::mixers {
namespace {

inline Lanes silu(Lanes x) {
    return vectors::times_sigmoid(x, x);
}

template <Number type>
void conv_of(const Conv& p, int64_t first, int64_t last) {
    using Element = std::conditional_t<type == Number::float32, float, uint16_t>;
    const int64_t blocks = (p.channels + lanes - 1) / lanes;
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t c = unit % blocks * lanes, row = unit / blocks * p.channels + c;
        const int64_t count = std::min(lanes, p.channels - c);
        Lanes sum = p.bias ? read<type>(p.bias, c, count) : Lanes{};
        const Lanes x = read<type>(p.x, row, count);
        for (int64_t w = 0; w < p.width; w++) {
            const int64_t from = p.room + 1 - p.width + w;  // in the old state with x behind it
            Lanes seen{}, weight{};
            for (int64_t i = 0; i < count; i++) {
                seen[i] = from < p.room ? at<type>(p.state, (row + i) * p.room + from) : x[i];
                weight[i] = at<type>(p.weight, (c + i) * p.width + w);
            }
            sum = fma(seen, weight, sum);
        }
        auto* state = static_cast<Element*>(p.state) + row * p.room;
        for (int64_t i = 0; i < count; i++, state += p.room) {
            std::memmove(state, state + 1, (p.room - 1) * sizeof(Element));
            state[p.room - 1] = static_cast<const Element*>(p.x)[row + i];
        }
        sum = rounded<type>(sum);
        write<type>(p.y, row, p.silu ? rounded<type>(silu(sum)) : sum, count);
    }
}

void conv(const Conv& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? conv_of<Number::float32> : conv_of<Number::bfloat16>)(p, first, last);
}

template <Number type>
void window_of(const Window& p, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
        const int64_t token = row % p.tokens, seen = std::min(p.width, token + 1);
        for (int64_t c = 0; c < p.channels; c += lanes) {
            const int64_t count = std::min(lanes, p.channels - c);
            Lanes sum = p.bias ? load(p.bias + c, count) : Lanes{};
            for (int64_t w = p.width - seen; w < p.width; w++) {
                const Lanes x = read<type>(p.x, (row + 1 - p.width + w) * p.apart + c, count);
                sum = fma(x, load(p.weight + w * p.channels + c, count), sum);
            }
            sum = rounded<type>(sum);
            write<type>(p.y, row * p.channels + c, p.silu ? rounded<type>(silu(sum)) : sum, count);
        }
    }
}

void window(const Window& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? window_of<Number::float32> : window_of<Number::bfloat16>)(p, first, last);
}

// d numbers as floats, times `scale`; with `norm` of length 1 before.
template <Number type>
inline void vector_of(const void* from, int64_t start, int64_t d, bool norm, float scale, float* to) {
    Lanes squares{};
    for (int64_t i = 0; i < d; i += lanes) {
        const Lanes x = read<type>(from, start + i, std::min(lanes, d - i));
        squares = fma(x, x, squares);
        std::memcpy(to + i, &x, std::min(lanes, d - i) * sizeof(float));
    }
    if (norm) scale *= 1.0f / std::sqrt(vectors::sum(squares) + 1e-6f);
    for (int64_t i = 0; i < d; i++) to[i] *= scale;
}

// All tokens, for `vectors` times sixteen columns of the state of one head, from `column` on; the last vector has
// `last` numbers. They are brought together in `memory`, behind a query and a key: rows of the state lie apart by a
// power of two, and few of these would be in the first-level cache at once.
template <Number type, int vectors>
void delta_columns(const Delta& p, int64_t unit, int64_t column, int64_t last, float* memory) {
    constexpr int64_t width = vectors * lanes;
    float* const given = p.state + unit * p.dk * p.dv + column;
    float *const q = memory, *const k = q + p.dk, *const state = k + p.dk;
    const auto size = [&](int c) { return c + 1 < vectors ? lanes : last; };
    const int64_t bytes = (width - lanes + last) * sizeof(float);
    for (int64_t i = 0; i < p.dk; i++) std::memcpy(state + i * width, given + i * p.dv, bytes);
    const float shrunk = 1.0f / std::sqrt(static_cast<float>(p.dk));
    for (int64_t token = 0; token < p.tokens; token++) {
        const int64_t row = (unit / p.heads * p.tokens + token) * p.heads + unit % p.heads;
        const int64_t shared = row / p.groups * p.dk;  // groups divide the heads
        vector_of<type>(p.q, shared, p.dk, p.norm, shrunk, q);
        vector_of<type>(p.k, shared, p.dk, p.norm, 1.0f, k);
        const float decay = std::exp(p.g[row]);
        Lanes known[vectors] = {}, out[vectors] = {}, delta[vectors];
        for (int64_t i = 0; i < p.dk; i++)
#pragma GCC unroll 4
            for (int c = 0; c < vectors; c++) known[c] = fma(load(state + i * width + c * lanes), fill(k[i]), known[c]);
        for (int c = 0; c < vectors; c++) {
            const Lanes value = read<type>(p.v, row * p.dv + column + c * lanes, size(c));
            delta[c] = (value - known[c] * decay) * p.beta[row];
        }
        for (int64_t i = 0; i < p.dk; i++)
#pragma GCC unroll 4
            for (int c = 0; c < vectors; c++) {
                float* const place = state + i * width + c * lanes;
                const Lanes now = fma(fill(k[i]), delta[c], load(place) * decay);
                store(place, now);
                out[c] = fma(now, fill(q[i]), out[c]);
            }
        for (int c = 0; c < vectors; c++)
            write<type>(p.out, row * p.dv + column + c * lanes, rounded<type>(out[c]), size(c));
    }
    for (int64_t i = 0; i < p.dk; i++) std::memcpy(given + i * p.dv, state + i * width, bytes);
}

template <Number type>
void delta_of(const Delta& p, int64_t first, int64_t last) {
    Memory memory((2 + 4 * lanes) * p.dk);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t column = 0;
        for (; column + 4 * lanes <= p.dv; column += 4 * lanes)
            delta_columns<type, 4>(p, unit, column, lanes, memory.data());
        for (; column < p.dv; column += lanes)
            delta_columns<type, 1>(p, unit, column, std::min(lanes, p.dv - column), memory.data());
    }
}

void delta(const Delta& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? delta_of<Number::float32> : delta_of<Number::bfloat16>)(p, first, last);
}

// One group of a row: `gate` and `y` as x, from `start` on and `gate_start` on; `gain` from `column` on.
template <Number type, Number other>
void norm_group(const GatedNorm& p, int64_t start, int64_t gate_start, int64_t column, int64_t k, float* gated) {
    const auto gate = [&](int64_t i, int64_t count) { return silu(read<other>(p.gate, gate_start + i, count)); };
    Lanes squares{};
    for (int64_t i = 0; i < k; i += lanes) {
        const int64_t count = std::min(lanes, k - i);
        const Lanes x = read<type>(p.x, start + i, count), y = p.before ? x * gate(i, count) : x;
        squares += y * y;
        store(gated + i, y, count);
    }
    const float inverse = 1.0f / std::sqrt(vectors::sum(squares) / static_cast<float>(k) + p.eps);
    for (int64_t i = 0; i < k; i += lanes) {
        const int64_t count = std::min(lanes, k - i);
        const Lanes x = rounded<type>(load(gated + i, count) * inverse);
        const Lanes y = rounded<type>(x * read<other>(p.gain, column + i, count));
        write<type>(p.y, start + i, p.before ? y : rounded<type>(y * gate(i, count)), count);
    }
}

template <Number type, Number other>
void norm_of(const GatedNorm& p, int64_t first, int64_t last) {
    const int64_t k = p.k / p.groups;
    std::vector<float> gated(k);
    for (int64_t row = first; row < last; row++)
        for (int64_t i = 0; i < p.k; i += k)
            norm_group<type, other>(p, row * p.k + i, row * p.apart + i, i, k, gated.data());
}

void norm(const GatedNorm& p, int64_t first, int64_t last) {
    if (p.type == Number::bfloat16) return norm_of<Number::bfloat16, Number::bfloat16>(p, first, last);
    const bool same = p.other == Number::float32;
    (same ? norm_of<Number::float32, Number::float32> : norm_of<Number::float32, Number::bfloat16>)(p, first, last);
}

}  // namespace

const Kernels PTQ_LEVEL{conv, window, delta, scan, norm};

}  // namespace ptq::mixers
