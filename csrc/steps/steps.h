// The kernels of one level: included after PTQ_LEVEL, the name of its table, is defined. Sixteen lanes at every level,
// so that the numbers are the same, but for attention over bfloat16 keys (`scores.h`).
#include <cmath>

#include "steps/attend.h"
#include "steps/numbers.h"

namespace ptq::steps {
namespace {

template <Number type>
void norm_of(const Norm& p, int64_t first, int64_t last) {
    constexpr int chains = 4;
    for (int64_t token = first; token < last; token++) {
        const int64_t start = token * p.k;
        Lanes acc[chains] = {};
        int64_t i = 0;
        for (; i + chains * lanes <= p.k; i += chains * lanes)
#pragma GCC unroll 4
            for (int c = 0; c < chains; c++) {
                const Lanes x = read<type>(p.x, start + i + c * lanes);
                acc[c] += x * x;
            }
        for (; i < p.k; i += lanes) {
            const Lanes x = read<type>(p.x, start + i, std::min(lanes, p.k - i));
            acc[0] += x * x;
        }
        const float total = vectors::sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
        const float inverse = 1.0f / std::sqrt(total / static_cast<float>(p.k) + p.eps);
        for (i = 0; i < p.k; i += lanes) {
            const int64_t count = std::min(lanes, p.k - i);
            Lanes y = read<type>(p.x, start + i, count) * inverse;
            if (p.round_first) y = rounded<type>(y);
            y *= read<type>(p.gain, i, count) + p.offset;
            write<type>(p.y, start + i, rounded<type>(y), count);
        }
    }
}

void norm(const Norm& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? norm_of<Number::float32> : norm_of<Number::bfloat16>)(p, first, last);
}

template <Number type>
void rotary_of(const Rotary& p, const void* x, const void* cos, const void* sin, void* y) {
    const int64_t half = p.d / 2;
    for (int64_t i = 0; i < half; i += lanes) {
        const int64_t count = std::min(lanes, half - i);
        const Lanes low = read<type>(x, i, count), high = read<type>(x, half + i, count);
        const Lanes first =
            rounded<type>(low * read<type>(cos, i, count)) + rounded<type>(-high * read<type>(sin, i, count));
        const Lanes second = rounded<type>(high * read<type>(cos, half + i, count)) +
                             rounded<type>(low * read<type>(sin, half + i, count));
        write<type>(y, i, rounded<type>(first), count);
        write<type>(y, half + i, rounded<type>(second), count);
    }
}

void rotary(const Rotary& p, const void* x, const void* cos, const void* sin, void* y) {
    (p.type == Number::float32 ? rotary_of<Number::float32> : rotary_of<Number::bfloat16>)(p, x, cos, sin, y);
}

// Of each two neighbours, minus the second and the first.
inline Lanes quarter_turn(const Lanes& x) {
#if defined(__AVX512F__)
    const Lanes swapped = (Lanes)_mm512_maskz_permute_ps(0xffff, (__m512)x, 0xb1);
#elif defined(__AVX2__)
    const Lanes swapped{_mm256_permute_ps(x.low, 0xb1), _mm256_permute_ps(x.high, 0xb1)};
#else
    Lanes swapped{};
    for (int i = 0; i < lanes; i++) swapped[i] = x[i ^ 1];
#endif
    static constexpr float sign[lanes] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    return swapped * load(sign);
}

template <Number type, Number table>
void pairs_of(const Rotary& p, const void* x, const void* cos, const void* sin, void* y) {
    for (int64_t i = 0; i < p.d; i += lanes) {
        const int64_t count = std::min(lanes, p.d - i);
        const Lanes z = read<type>(x, i, count);
        const Lanes sum = rounded<table>(z * read<table>(cos, i, count)) +
                          rounded<table>(quarter_turn(z) * read<table>(sin, i, count));
        write<type>(y, i, rounded<type>(sum), count);
    }
}

void rotary_pairs(const Rotary& p, const void* x, const void* cos, const void* sin, void* y) {
    constexpr Number narrow = Number::bfloat16, wide = Number::float32;
    (p.type == wide ? pairs_of<wide, wide>
     : p.wide       ? pairs_of<narrow, wide>
                    : pairs_of<narrow, narrow>)(p, x, cos, sin, y);
}

// (1 + tanh(z / 2)) / 2 is 1 / (1 + e^-z), here for z / 2 = sqrt(2 / pi) (x + 0.044715 x³).
inline Lanes activated(Lanes x, Gate kind) {
    if (kind == Gate::sigmoid) return vectors::times_sigmoid(Lanes{} + 1.0f, x);
    return vectors::times_sigmoid(x, kind == Gate::gelu ? 1.5957691216f * (x + 0.044715f * (x * x * x)) : x);
}

template <Number type>
inline Lanes clamped(Lanes gate, Lanes up, float alpha, Lanes limit) {
    gate = chosen(gate > limit, limit, gate);  // a NaN stays
    up = chosen(up > limit, limit, chosen(up < -limit, -limit, up));
    const Lanes share = rounded<type>(vectors::times_sigmoid(Lanes{} + 1.0f, rounded<type>(gate * alpha)));
    return rounded<type>(up + 1.0f) * rounded<type>(gate * share);
}

template <Number type>
void gated_of(const Gated& p, int64_t first, int64_t last) {
    const Lanes limit = rounded<type>(fill(p.limit));
    for (int64_t i = first * lanes; i < std::min(p.size, last * lanes); i += lanes) {
        const int64_t count = std::min(lanes, p.size - i);
        const Lanes gate = read<type>(p.gate, i, count), up = read<type>(p.up, i, count);
        const Lanes y = p.kind == Gate::clamped ? clamped<type>(gate, up, p.alpha, limit)
                                                : rounded<type>(activated(gate, p.kind)) * up;
        write<type>(p.y, i, rounded<type>(y), count);
    }
}

void gated(const Gated& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? gated_of<Number::float32> : gated_of<Number::bfloat16>)(p, first, last);
}

template <Number type>
void sum_of(const Sum& p, int64_t first, int64_t last) {
    for (int64_t i = first * lanes; i < std::min(p.size, last * lanes); i += lanes) {
        const int64_t count = std::min(lanes, p.size - i);
        write<type>(p.y, i, rounded<type>(read<type>(p.a, i, count) + read<type>(p.b, i, count)), count);
    }
}

void sum(const Sum& p, int64_t first, int64_t last) {
    (p.type == Number::float32 ? sum_of<Number::float32> : sum_of<Number::bfloat16>)(p, first, last);
}

}  // namespace

const Kernels PTQ_LEVEL{norm, rotary, rotary_pairs, gated, sum, attend, merge};

}  // namespace ptq::steps
