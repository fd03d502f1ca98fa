// The scan of a state space, included once per level. The state stays in registers for sixteen tokens, two rows of a
// head at a time.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "common/softmax.h"
#include "mixers/kernels.h"
#include "steps/numbers.h"

namespace ptq::mixers {
namespace {

using steps::read;
using steps::rounded;
using steps::write;

// One number of a tensor.
template <Number type>
inline float at(const void* from, int64_t i) {
    if constexpr (type == Number::float32) return static_cast<const float*>(from)[i];
    return from_bfloat16(static_cast<const uint16_t*>(from)[i]);
}

constexpr int64_t chunk_tokens = 16;
#if defined(__AVX512F__)
constexpr int scan_vectors = 8;
#else
constexpr int scan_vectors = 2;
#endif

// Memory of a thread, on the lines of the cache: vectors that lie on two of them are read in twice the time.
class Memory {
  public:
    explicit Memory(int64_t count) : held_(count + lanes) {}
    float* data() {
        const auto place = reinterpret_cast<uintptr_t>(held_.data()), line = sizeof(float) * lanes;
        return held_.data() + (line - place % line) % line / sizeof(float);
    }

  private:
    std::vector<float> held_;
};

// Sixteen tokens of one head, or fewer, as floats.
struct Chunk {
    int64_t tokens, d, n;  // n: of B and C here, a multiple of sixteen, with zeros at the end
    float *x, *b, *c;      // [16, d] times the step, [16, n], [16, n]
    float decay[chunk_tokens];
};

// `rows` times `vectors` of a state whose rows are `width` apart; `last`: numbers of the last vector. What they give is
// added to `sums`, in the order of the columns.
template <int rows, int vectors>
inline void scan_columns(const Chunk& p, float* state, int64_t width, int64_t row, int64_t column, int64_t last,
                         Lanes (*sums)[chunk_tokens]) {
    Lanes held[rows][vectors];
    float* const given = state + row * width + column;
    const auto size = [&](int v) { return v + 1 < vectors ? lanes : last; };
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) held[r][v] = load(given + r * width + v * lanes, size(v));
    for (int64_t t = 0; t < p.tokens; t++) {
        const float *const b = p.b + t * p.n + column, *const c = p.c + t * p.n + column;
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            const Lanes x = fill(p.x[t * p.d + row + r]);
            Lanes y = sums[r][t];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
                held[r][v] = fma(x, load(b + v * lanes), held[r][v] * p.decay[t]);
                y = fma(held[r][v], load(c + v * lanes), y);
            }
            sums[r][t] = y;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(given + r * width + v * lanes, held[r][v], size(v));
}

// The numbers that rows [row, row + rows) give, into y [16, d].
template <int rows>
inline void scan_rows(const Chunk& p, float* state, int64_t width, int64_t row, float* y) {
    Lanes sums[rows][chunk_tokens] = {};
    int64_t column = 0;
    for (; column + scan_vectors * lanes <= width; column += scan_vectors * lanes)
        scan_columns<rows, scan_vectors>(p, state, width, row, column, lanes, sums);
    for (; column < width; column += lanes)
        scan_columns<rows, 1>(p, state, width, row, column, std::min(lanes, width - column), sums);
    for (int r = 0; r < rows; r++) {
        float all[chunk_tokens];
        if (p.tokens == 1)
            all[0] = vectors::sum(sums[r][0]);
        else
            vectors::sums(sums[r], all);
        for (int64_t t = 0; t < p.tokens; t++) y[t * p.d + row + r] = all[t];
    }
}

// log(1 + e^x), between the limits.
inline float step_of(float x, float low, float high) {
    x = x > 20 ? x : std::log1p(std::exp(x));
    return std::min(std::max(x, low), high);
}

template <Number type>
void scan_of(const Scan& p, int64_t first, int64_t last) {
    const int64_t n = (p.n + lanes - 1) / lanes * lanes;
    Memory memory(2 * chunk_tokens * (p.d + n));
    float* const start = memory.data();
    Chunk chunk{0, p.d, n, start, start + chunk_tokens * p.d, start + chunk_tokens * (p.d + n), {}};
    float* const y = chunk.c + chunk_tokens * n;
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t head = unit % p.heads, row = unit / p.heads * p.tokens, group = head / p.groups;
        const float skip = p.skip ? p.skip[head] : 0.0f, bias = p.bias ? p.bias[head] : 0.0f;
        float* const state = p.state + unit * p.d * p.n;
        for (int64_t from = 0; from < p.tokens; from += chunk_tokens) {
            chunk.tokens = std::min(chunk_tokens, p.tokens - from);
            for (int64_t t = 0; t < chunk.tokens; t++) {
                const int64_t token = row + from + t, x = token * p.x_apart + head * p.d;
                const float step = step_of(at<type>(p.dt, token * p.dt_apart + head) + bias, p.low, p.high);
                chunk.decay[t] = std::exp(step * p.a[head]);
                for (int64_t i = 0; i < p.d; i += lanes) {
                    const int64_t count = std::min(lanes, p.d - i);
                    store(chunk.x + t * p.d + i, read<type>(p.x, x + i, count) * step, count);
                }
                for (int64_t i = 0; i < n; i += lanes) {
                    const int64_t count = std::min(lanes, p.n - i), place = group * p.n + i;
                    store(chunk.b + t * n + i, read<type>(p.b, token * p.b_apart + place, count));
                    store(chunk.c + t * n + i, read<type>(p.c, token * p.c_apart + place, count));
                }
            }
            int64_t i = 0;
            for (; i + 2 <= p.d; i += 2) scan_rows<2>(chunk, state, p.n, i, y);
            if (i < p.d) scan_rows<1>(chunk, state, p.n, i, y);
            for (int64_t t = 0; t < chunk.tokens; t++) {
                const int64_t token = row + from + t, x = token * p.x_apart + head * p.d;
                for (i = 0; i < p.d; i += lanes) {
                    const int64_t count = std::min(lanes, p.d - i);
                    const Lanes sum = fma(read<type>(p.x, x + i, count), fill(skip), load(y + t * p.d + i, count));
                    store(p.y + (token * p.heads + head) * p.d + i, sum, count);
                }
            }
        }
    }
}

void scan(const Scan& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? scan_of<Number::float32> : scan_of<Number::bfloat16>)(p, first, last);
}

}  // namespace
}  // namespace ptq::mixers
