// The kernels of one level: included after PTQ_LEVEL, the name of its table, is defined.
#include <utility>

#include "common/ldlq.h"
#include "minifloat/lanes.h"

namespace ptq::minifloat {
namespace {

constexpr float tiny = 1e-30f;  // minifloat_ops.TINY
constexpr int factors = 32;     // minifloat_ops.FACTORS
constexpr int powers[] = {-2, -1, 0, 1};

// --- scales ----------------------------------------------------------------------------------------------------------

template <class T>
float absmax(const T* x, int64_t count) {  // NaN where a number is not finite
    Lanes most{}, poison{};
    for (int64_t i = 0; i < count; i += lanes) {
        const Lanes v = load(x + i, count - i);
        most = max(most, magnitude(v)), poison += v * 0.0f;
    }
    float found = 0;
    for (int i = 0; i < lanes; i++) found = std::max(found, most[i]);
    return sum(poison) == 0 ? found : std::numeric_limits<float>::quiet_NaN();
}

// Squared errors of a group under 16 scales at once, one in each lane; `unit` keeps the squares from underflowing.
template <class T>
Lanes squared_errors(const Rounder& round, const T* x, int64_t count, Lanes scale, float unit) {
    const Lanes inverse = 1.0f / scale;
    Lanes total{};
    for (int64_t i = 0; i < count; i++) {
        const Lanes v = fill(number(x + i));
        const Lanes e = (round(v * inverse).value * scale - v) * unit;
        total += e * e;
    }
    return total;
}

template <class T>
float fitted(const Rounder& round, Element e, const T* x, int64_t count, bool power, bool search, float most) {
    if (!(most >= tiny)) return most == most ? 1.0f : most;
    Lanes candidates[factors / lanes] = {};
    int vectors = 1;
    const float full = most / largest_of(e);
    if (power) {
        const int base = static_cast<int>(std::bit_cast<uint32_t>(most) >> 23) - 127 - e.top();
        if (!search) return std::ldexp(1.0f, base);
        for (int i = 0; i < lanes; i++) candidates[0][i] = std::ldexp(1.0f, base + powers[std::min(i, 3)]);
    } else {
        if (!search) return rounded_to_bfloat16(full);
        vectors = factors / lanes;
        for (int i = 0; i < factors; i++)
            candidates[i / lanes][i % lanes] = rounded_to_bfloat16(full * (static_cast<float>(i + 1) / 16));
    }
    float best = std::numeric_limits<float>::infinity(), scale = candidates[0][0];
    for (int v = 0; v < vectors; v++) {
        const Lanes errors = squared_errors(round, x, count, candidates[v], 1 / most);
        for (int i = 0; i < lanes; i++)
            if (errors[i] < best) best = errors[i], scale = candidates[v][i];
    }
    return scale;
}

void fit(const Fit& p, int64_t first, int64_t last) {
    const int64_t groups = p.k / p.size;
    const Rounder round(p.element);
    for (int64_t g = first * groups; g < last * groups; g++) {
        const float* x = p.w + g * p.size;
        p.scale[g] = fitted(round, p.element, x, p.size, p.power, p.search, absmax(x, p.size));
    }
}

// --- codes -----------------------------------------------------------------------------------------------------------

template <class T>
void nearest_row(const Nearest& p, const Rounder& round, int64_t row) {
    const int64_t groups = p.k / p.size;
    double error = 0, energy = 0;
    for (int64_t g = row * groups; g < (row + 1) * groups; g++) {
        const T* x = static_cast<const T*>(p.w) + g * p.size;
        uint8_t* codes = p.codes + g * p.size;
        const float most = absmax(x, p.size), s = fitted(round, p.element, x, p.size, p.power, p.search, most);
        p.scale[g] = s;
        const Lanes scale = fill(s), inverse = fill(1 / s), unit = fill(most >= tiny ? 1 / most : 0.0f);
        Lanes errors{}, squares{};
        for (int64_t i = 0; i < p.size; i += lanes) {
            const Lanes v = load(x + i, p.size - i);
            const Rounded found = round(v * inverse);
            store_codes(codes + i, found.code, p.size - i);
            const Lanes e = (found.value * scale - v) * unit, u = v * unit;
            errors += e * e, squares += u * u;
        }
        const double square = static_cast<double>(most) * most;
        error += sum(errors) * square, energy += sum(squares) * square;
    }
    p.error[row] = error, p.energy[row] = energy;
}

void nearest(const Nearest& p, int64_t first, int64_t last) {
    const Rounder round(p.element);
    for (int64_t row = first; row < last; row++)
        p.bfloat16 ? nearest_row<uint16_t>(p, round, row) : nearest_row<float>(p, round, row);
}

void encode(const Encode& p, int64_t first, int64_t last) {
    const int64_t groups = p.k / p.size;
    const Rounder round(p.element);
    for (int64_t g = first * groups; g < last * groups; g++) {
        const Lanes inverse = fill(1 / p.scale[g]);
        const float* x = p.w + g * p.size;
        for (int64_t i = 0; i < p.size; i += lanes)
            store_codes(p.codes + g * p.size + i, round(load(x + i, p.size - i) * inverse).code, p.size - i);
    }
}

void decode(const Decode& p, int64_t first, int64_t last) {
    const int64_t groups = p.k / p.size;
    const int half = 1 << (p.element.bits() - 1);
    float values[256] = {};
    for (int code = 0; code < half; code++) {
        const int field = code >> p.element.mantissa, fraction = code & ((1 << p.element.mantissa) - 1);
        const int whole = fraction + (field ? 1 << p.element.mantissa : 0);
        values[code] =
            std::ldexp(static_cast<float>(whole), std::max(field, 1) - p.element.bias() - p.element.mantissa);
        values[code + half] = -values[code];
    }
    for (int64_t g = first * groups; g < last * groups; g++)
        for (int64_t i = g * p.size; i < (g + 1) * p.size; i++) p.w[i] = values[p.codes[i]] * p.scale[g];
}

void ldlq(const Ldlq& p, int64_t first, int64_t last) {
    const Rounder round(p.element);
    ldlq_strips(p, first, last, [&](const Lanes& target, const Lanes& w, const auto& of) {
        const Lanes s = of(p.scale);
        const Rounded found = round(target * (1.0f / s));
        return std::pair((Dwords)found.code, w - found.value * s);
    });
}

}  // namespace

const Kernels PTQ_LEVEL{fit, nearest, encode, decode, ldlq};

}  // namespace ptq::minifloat
