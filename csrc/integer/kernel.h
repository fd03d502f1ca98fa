// The integer kernels of one level: included after PTQ_LEVEL, the name of its table, is defined.
#include <utility>

#include "common/ldlq.h"
#include "integer/panel.h"

namespace ptq::integer {
namespace {

constexpr float tiny = 1e-30f;  // integer_ops.TINY

// --- scales ----------------------------------------------------------------------------------------------------------

// Squared errors of a group under 16 scales at once, one in each lane.
inline Lanes squared_errors(const float* x, int64_t count, Lanes scale, Lanes low, Lanes high) {
    const Lanes inverse = 1.0f / scale;
    Lanes total{};
    for (int64_t i = 0; i < count; i++) {
        const Lanes v = fill(x[i]), q = min(max(v * inverse, low), high);
        const Lanes e = ((q + 12582912.0f) - 12582912.0f) * scale - v;  // 1.5 * 2^23: to nearest, of either sign
        total += e * e;
    }
    return total;
}

struct Range {
    float low, high;
    bool finite;
};
inline Range range(const float* x, int64_t count) {  // with zero always inside
    Lanes low{}, high{}, poison{};
    for (int64_t i = 0; i < count; i += lanes) {
        const Lanes v = load(x + i, std::min(lanes, count - i));
        low = min(low, v), high = max(high, v), poison += v * 0.0f;
    }
    float l = 0, h = 0;
    for (int i = 0; i < lanes; i++) l = std::min(l, low[i]), h = std::max(h, high[i]);
    return {l, h, sum(poison) == 0};
}

void fit_group(const Fit& p, const float* x, int64_t count, float* scale, uint8_t* zero) {
    const float top = static_cast<float>((1 << p.bits) - 1), middle = static_cast<float>(1 << (p.bits - 1));
    const Range r = range(x, count);
    const float largest = std::max(r.high, -r.low);
    *scale = r.finite ? 1.0f : std::numeric_limits<float>::quiet_NaN();
    *zero = p.symmetric && r.finite ? static_cast<uint8_t>(middle) : 0;
    if (!r.finite || largest < tiny) return;
    float full = (r.high > -r.low ? -largest : largest) / (middle - 1), z = middle;
    if (!p.symmetric) {
        full = r.high / top - r.low / top;
        z = std::nearbyint(std::min(std::max(-r.low / full, 0.0f), top));
        *zero = static_cast<uint8_t>(z);
    }
    float best = std::numeric_limits<float>::infinity();
    *scale = rounded_to_bfloat16(full);
    for (int64_t i = 0; i < p.steps; i += lanes) {
        Lanes s{};
        for (int64_t j = 0; j < lanes; j++) s[j] = rounded_to_bfloat16(full * p.shrink[std::min(i + j, p.steps - 1)]);
        const Lanes low = fill(-z), high = fill(top - z);
        const Lanes e = squared_errors(x, count, s, low, high);
        for (int64_t j = 0; j < lanes; j++)
            if (e[j] < best) best = e[j], *scale = s[j];
    }
}

void fit(const Fit& p, int64_t first, int64_t last) {
    const int64_t groups = p.k / p.size;
    for (int64_t at = first * groups; at < last * groups; at++)
        fit_group(p, p.w + at * p.size, p.size, p.scale + at, p.zero + at);
}

// --- codes -----------------------------------------------------------------------------------------------------------

void round(const Round& p, int64_t first, int64_t last) {
    const int64_t groups = p.k / p.size;
    const Lanes top = fill(static_cast<float>((1 << p.bits) - 1));
    for (int64_t g = first * groups; g < last * groups; g++) {
        const Lanes inverse = fill(1 / p.scale[g]), zero = fill(p.zero[g]);
        const float* w = p.w + g * p.size;
        uint8_t* codes = p.codes + g * p.size;
        int64_t i = 0;
        for (; i + lanes <= p.size; i += lanes)
            store_codes(codes + i, quantise(load(w + i), inverse, zero, top), lanes);
        if (i < p.size) store_codes(codes + i, quantise(load(w + i, p.size - i), inverse, zero, top), p.size - i);
    }
}

void ldlq(const Ldlq& p, int64_t first, int64_t last) {
    const Lanes top = fill(static_cast<float>((1 << p.bits) - 1));
    ldlq_strips(p, first, last, [&](const Lanes& target, const Lanes& w, const auto& of) {
        const Lanes s = of(p.scale), z = of(p.zero), q = quantise(target, 1.0f / s, z, top);
        return std::pair((Dwords)converted<SignedInts>(q), w - (q - z) * s);
    });
}

// --- bytes -----------------------------------------------------------------------------------------------------------

// Eight codes are `bits` bytes: one 64-bit word at a time.
template <int bits>
void pack_row(const uint8_t* codes, uint8_t* packed, int64_t k) {
    const auto word = [](const uint8_t* from, int64_t count) {
        uint64_t x = 0;
        for (int64_t j = 0; j < count; j++) x |= static_cast<uint64_t>(from[j]) << (j * bits);
        return x;
    };
    int64_t i = 0;
    for (; i + 8 <= k; i += 8, packed += bits) {
        const uint64_t x = word(codes + i, 8);
        std::memcpy(packed, &x, bits);
    }
    const uint64_t x = word(codes + i, k - i);
    std::memcpy(packed, &x, packed_size(k - i, bits));
}

using PackRow = void(const uint8_t*, uint8_t*, int64_t);
constexpr PackRow* pack_rows[] = {pack_row<2>, pack_row<3>, pack_row<4>, pack_row<5>,
                                  pack_row<6>, pack_row<7>, pack_row<8>};

void pack(const Pack& p, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        pack_rows[p.bits - 2](p.codes + row * p.k, p.packed + row * packed_size(p.k, p.bits), p.k);
}

}  // namespace

const Kernels PTQ_LEVEL{fit, round, ldlq, pack, arrange, linear};

}  // namespace ptq::integer
