// The kernels of one level: included after PTQ_LEVEL, the name of its table, is defined. Sixteen lanes at every level,
// so that the numbers are the same.
#include <cmath>

#include "integer/lanes.h"
#include "steps/kernels.h"

namespace ptq::steps {
namespace {

using integer::Lanes;
using integer::lanes;

typedef uint16_t Words __attribute__((vector_size(32)));
typedef uint32_t Dwords __attribute__((vector_size(64)));

// Sixteen numbers, or the first `count` and then zeros.
template <Number type>
inline Lanes read(const void* from, int64_t at, int64_t count = lanes) {
    if constexpr (type == Number::float32) {
        return integer::load(static_cast<const float*>(from) + at, count);
    } else {
        Words words{};
        const auto* x = static_cast<const uint16_t*>(from) + at;
        if (count == lanes)
            std::memcpy(&words, x, sizeof words);
        else
            std::memcpy(&words, x, count * sizeof(uint16_t));
        return (Lanes)(__builtin_convertvector(words, Dwords) << 16);
    }
}

// To the type, to the nearest, halves to even; still as floats.
template <Number type>
inline Lanes rounded(Lanes x) {
    if constexpr (type == Number::float32) return x;
    const Dwords bits = (Dwords)x, nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    return (Lanes)(x == x ? nearest : Dwords{} + 0x7fc00000u);
}

template <Number type>
inline void write(void* to, int64_t at, Lanes x, int64_t count = lanes) {  // x is rounded
    if constexpr (type == Number::float32) {
        std::memcpy(static_cast<float*>(to) + at, &x, count * sizeof(float));
    } else {
        const Words words = __builtin_convertvector((Dwords)x >> 16, Words);
        std::memcpy(static_cast<uint16_t*>(to) + at, &words, count * sizeof(uint16_t));
    }
}

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
        const float total = integer::sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
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

}  // namespace

const Kernels PTQ_LEVEL{norm, rotary};

}  // namespace ptq::steps
