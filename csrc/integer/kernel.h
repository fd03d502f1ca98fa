// The integer kernels of one level: included after PTQ_LEVEL, the name of its table, is defined.
#include "integer/lanes.h"

namespace ptq::integer {
namespace {

constexpr float tiny = 1e-30f;  // integer_ops.TINY

// --- scales -----------------------------------------------------------------------------------------------------------

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
    *scale = bfloat16(full);
    for (int64_t i = 0; i < p.steps; i += lanes) {
        Lanes s{};
        for (int64_t j = 0; j < lanes; j++) s[j] = bfloat16(full * p.shrink[std::min(i + j, p.steps - 1)]);
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

// --- codes ------------------------------------------------------------------------------------------------------------

void round(const Round& p, int64_t first, int64_t last) {
    const int64_t groups = p.k / p.size;
    const Lanes top = fill(static_cast<float>((1 << p.bits) - 1));
    for (int64_t g = first * groups; g < last * groups; g++) {
        const Lanes inverse = fill(1 / p.scale[g]), zero = fill(p.zero[g]);
        const float* w = p.w + g * p.size;
        uint8_t* codes = p.codes + g * p.size;
        int64_t i = 0;
        for (; i + lanes <= p.size; i += lanes) store_codes(codes + i, quantise(load(w + i), inverse, zero, top), lanes);
        if (i < p.size) store_codes(codes + i, quantise(load(w + i, p.size - i), inverse, zero, top), p.size - i);
    }
}

void ldlq(const Ldlq& p, int64_t first, int64_t last) {
    constexpr int64_t vectors = ldlq_strip / lanes;
    const Lanes top = fill(static_cast<float>((1 << p.bits) - 1));
    std::vector<float> errors(p.c * ldlq_strip);
    for (int64_t strip = first; strip < last; strip++) {
        const int64_t from = strip * ldlq_strip, width = std::min(ldlq_strip, p.n - from);
        const auto read = [&](const float* row, int64_t v) {
            return load(row + from + v * lanes, std::clamp(width - v * lanes, int64_t{0}, lanes));
        };
        for (int64_t j = p.c - 1; j >= 0; j--) {
            Lanes target[vectors];
            for (int64_t v = 0; v < vectors; v++) target[v] = read(p.target + j * p.n, v);
            for (int64_t i = p.c - 1; i > j; i--) {
                const Lanes f = fill(p.factor[j * p.c + i]);
                for (int64_t v = 0; v < vectors; v++) target[v] += f * load(&errors[i * ldlq_strip + v * lanes]);
            }
            for (int64_t v = 0; v * lanes < width; v++) {
                const int64_t count = std::min(lanes, width - v * lanes), row = p.group[j] * p.n;
                const Lanes s = read(p.scale + row, v), z = read(p.zero + row, v);
                const Lanes q = quantise(target[v], 1.0f / s, z, top);
                const Lanes e = read(p.w + j * p.n, v) - (q - z) * s;
                store(&errors[j * ldlq_strip + v * lanes], e);
                std::memcpy(p.error + j * p.n + from + v * lanes, &e, count * sizeof(float));
                store_codes(p.codes + j * p.n + from + v * lanes, q, count);
            }
        }
    }
}

// --- bytes ------------------------------------------------------------------------------------------------------------

inline int64_t packed_size(int64_t k, int bits) { return (k * bits + 7) / 8; }

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

template <int bits>
void unpack_row(const uint8_t* packed, uint8_t* codes, int64_t k) {  // codes: room for a multiple of 8
    constexpr uint64_t mask = (1 << bits) - 1;
    const auto write = [](uint8_t* to, uint64_t x) {
        for (int j = 0; j < 8; j++) to[j] = static_cast<uint8_t>(x >> (j * bits) & mask);
    };
    int64_t i = 0;
    for (; i + 8 <= k; i += 8, packed += bits) {
        uint64_t x = 0;
        std::memcpy(&x, packed, bits);
        write(codes + i, x);
    }
    if (i == k) return;
    uint64_t x = 0;
    std::memcpy(&x, packed, packed_size(k - i, bits));
    write(codes + i, x);
}

using PackRow = void(const uint8_t*, uint8_t*, int64_t);
constexpr PackRow* pack_rows[] = {pack_row<2>, pack_row<3>, pack_row<4>, pack_row<5>,
                                  pack_row<6>, pack_row<7>, pack_row<8>};
constexpr PackRow* unpack_rows[] = {unpack_row<2>, unpack_row<3>, unpack_row<4>, unpack_row<5>,
                                    unpack_row<6>, unpack_row<7>, unpack_row<8>};

void pack(const Pack& p, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        pack_rows[p.bits - 2](p.codes + row * p.k, p.packed + row * packed_size(p.k, p.bits), p.k);
}

// --- linear -----------------------------------------------------------------------------------------------------------

// w[k] of one row, then zeros up to a multiple of the lanes.
void dequantise_row(const Linear& p, int64_t row, uint8_t* codes, float* w) {
    const int64_t groups = p.k / p.size;
    unpack_rows[p.bits - 2](p.codes + row * packed_size(p.k, p.bits), codes, p.k);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = row * groups + g;
        const float scale = from_bits(static_cast<uint32_t>(p.scale[at]) << 16);
        const float zero = p.zero ? p.zero[at] : static_cast<float>(1 << (p.bits - 1));
        for (int64_t i = g * p.size; i < (g + 1) * p.size; i++) w[i] = (codes[i] - zero) * scale;
    }
}

// `rows` rows of W with `tokens` rows of x. Each sum has its own lanes, so it does not depend on what is beside it.
template <int tokens>
void dots(const Linear& p, const float* w, int64_t stride, int64_t token, int64_t row, int64_t rows) {
    Lanes total[tokens][linear_rows]{};
    const auto add = [&](int64_t i, int64_t count) {
        Lanes x[tokens];
        for (int t = 0; t < tokens; t++) {
            const float* from = p.x + (token + t) * p.k + i;
            x[t] = count == lanes ? load(from) : load(from, count);
        }
        for (int r = 0; r < linear_rows; r++) {
            const Lanes v = load(w + r * stride + i);
            for (int t = 0; t < tokens; t++) total[t][r] += x[t] * v;
        }
    };
    int64_t i = 0;
    for (; i + lanes <= p.k; i += lanes) add(i, lanes);
    if (i < p.k) add(i, p.k - i);
    for (int t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++)
            p.out[(token + t) * p.n + row + r] = sum(total[t][r]) + (p.bias ? p.bias[row + r] : 0.0f);
}

void linear(const Linear& p, int64_t first, int64_t last) {
    const int64_t stride = (p.k + lanes - 1) / lanes * lanes;
    std::vector<uint8_t> codes(stride);
    std::vector<float> w(linear_rows * stride);
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t row = unit * linear_rows, rows = std::min(linear_rows, p.n - row);
        for (int64_t r = 0; r < rows; r++) dequantise_row(p, row + r, codes.data(), w.data() + r * stride);
        int64_t token = 0;
        for (; token + 4 <= p.t; token += 4) dots<4>(p, w.data(), stride, token, row, rows);
        for (; token < p.t; token++) dots<1>(p, w.data(), stride, token, row, rows);
    }
}

}  // namespace

const Kernels PTQ_LEVEL{fit, round, ldlq, pack, linear};

}  // namespace ptq::integer
