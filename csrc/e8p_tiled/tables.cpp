#include "e8p_tiled/tables.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <vector>

#include "e8p_tiled/layout.h"

namespace ptq::e8p_tiled {
namespace {

using Vector = std::array<int, 8>;
typedef std::array<Vector, 256> Points;

// All vectors of eight of these numbers, lexicographically.
std::vector<Vector> product(const std::vector<int>& numbers) {
    std::vector<Vector> all{Vector{}};
    for (int j = 0; j < 8; j++) {
        std::vector<Vector> longer;
        for (Vector v : all)
            for (int number : numbers) v[j] = number, longer.push_back(v);
        all = std::move(longer);
    }
    return all;
}

int norm(const Vector& v) {
    int sum = 0;
    for (int x : v) sum += x * x;
    return sum;
}

// T0 of quip_sharp/e8p.py: four times the absolute vectors, coordinate 7 negative where their sum is odd.
Points e8p_points() {
    std::vector<Vector> inner, outer;
    for (const Vector& v : product({2, 6, 10})) {
        if (norm(v) <= 160) inner.push_back(v);
        if (norm(v) == 192 && *std::max_element(v.begin(), v.end()) == 6) outer.push_back(v);
    }
    std::stable_sort(inner.begin(), inner.end(), [](const Vector& a, const Vector& b) { return norm(a) < norm(b); });
    for (size_t i = 0; i < outer.size(); i++)
        if (i % 2 == 0 || i == 1) inner.push_back(outer[i]);
    Points points;
    std::copy_n(inner.begin(), points.size(), points.begin());
    for (Vector& v : points) {
        int sum = 0;
        for (int x : v) sum += x;
        if (sum / 4 % 2) v[7] = -v[7];
    }
    return points;
}

// T1: twice the points of the residual book: 0, the roots of E8, and all but one of +-2 e_i.
Points residual_points() {
    std::vector<Vector> roots;
    for (const Vector& v : product({-2, -1, 0, 1, 2})) {
        const auto count = [&v](int x) { return std::count(v.begin(), v.end(), x); };
        const bool halves = count(1) + count(-1) == 8 && count(-1) % 2 == 0, wholes = count(0) == 6 && norm(v) == 8;
        if (halves || wholes) roots.push_back(v);
    }
    Points points{};
    std::copy(roots.begin(), roots.end(), points.begin() + 1);
    for (int i = 0; i < 15; i++) points[1 + roots.size() + i][i / 2] = i % 2 ? -4 : 4;
    return points;
}

int parity(int x) {
    return __builtin_popcount(x) & 1;
}

void number_bytes(Tables& t, const Points& residual) {
    constexpr int places[] = {4, 5, 2, 3, 0, 1, 6};
    for (int m = 0; m < 256; m++) {
        const int p = parity(m), signs = m ^ p;
        int byte = p << 7;
        for (int i = 0; i < 7; i++) byte |= (signs >> places[i] & 1) << i;
        t.tile_signs[m] = static_cast<uint8_t>(byte), t.stored_signs[byte] = static_cast<uint8_t>(m);
    }
    int counts[2] = {};
    for (int a = 0; a < 256; a++) {
        const int odd = residual[a][0] & 1, count = counts[odd]++;
        const int byte = (count & 31) | odd << 5 | count >> 5 << 6;
        t.tile_residual[a] = static_cast<uint8_t>(byte), t.stored_residual[byte] = static_cast<uint8_t>(a);
    }
}

// The number of (a, b) among the pairs that were asked for before, or the next one.
int number_of(std::vector<std::array<int, 2>>& pairs, int a, int b) {
    const auto at = std::find(pairs.begin(), pairs.end(), std::array<int, 2>{a, b}) - pairs.begin();
    if (at == static_cast<int64_t>(pairs.size())) pairs.push_back({a, b});
    if (at > 15) std::abort();
    return static_cast<int>(at);
}

// The points of a stage to `values`, of a table: [book].
template <size_t count>
void add_values(Tables& t, const int (&points)[2][count], uint8_t* (*of)(Values&, int stage)) {
    for (int bits = 2; bits <= 4; bits++)
        for (int stage = 0; stage < stages(bits); stage++) {
            const auto& from = points[bits == 3 && stage == 1 ? residual_book : e8p_book];
            uint8_t* to = of(t.values[bits - 2], stage);
            for (size_t i = 0; i < count; i++)
                to[i] = static_cast<uint8_t>((stage ? 0 : offset_of(bits)) + multiplier(bits, stage) * from[i]);
        }
}

void two_look_ups(Tables& t, const Points& e8p, const Points& residual) {
    std::vector<std::array<int, 2>> pairs, kinds[2];
    for (int a = 0; a < 256; a++)
        for (int i = 0; i < 4; i++) {
            const int at = number_of(pairs, e8p[a][2 * i], e8p[a][2 * i + 1]);
            t.pairs[e8p_book][i / 2][a] |= static_cast<uint8_t>(at << i % 2 * 4);
            const Vector& v = residual[t.stored_residual[a]];
            const int kind = number_of(kinds[a >> 5 & 1], v[2 * i], v[2 * i + 1]);
            t.pairs[residual_book][i / 2][a] |= static_cast<uint8_t>(kind << i % 2 * 4);
        }
    pairs.resize(16), kinds[0].resize(16), kinds[1].resize(16);
    int points[2][128];
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 64; i++) {
            const int point = pairs[i & 15][half], sign = i >> (4 + half) & 1;
            points[e8p_book][64 * half + i] = 1 + (sign ? -point : point);
            points[residual_book][64 * half + i] = kinds[i >> 5 & 1][i & 15][half];
        }
    add_values(t, points, [](Values& v, int stage) { return v.pairs[stage][0]; });
    for (int s = 0; s < 128; s++) t.last_signs[s] = static_cast<uint8_t>((s >> 6 & 1) << 4 | parity(s) << 5);
}

void nibbles(Tables& t, const Points& e8p, const Points& residual) {
    // E8P: bits 0 and 1: 2, 6 or 10; bit 2: negative; bit 3: p. Residual: the point + 4.
    constexpr int places[] = {4, 5, 2, 3, 0, 1, 6};
    for (int a = 0; a < 256; a++) {
        for (int j = 0; j < 8; j++) {
            const int x = e8p[a][j];
            const uint32_t e8p_nibble = static_cast<uint32_t>((std::abs(x) - 2) / 4 | (x < 0) << 2);
            const auto residual_nibble = static_cast<uint32_t>(residual[t.stored_residual[a]][j] + 4);
            t.nibbles[e8p_book][a] |= e8p_nibble << 4 * j;
            t.nibbles[residual_book][a] |= residual_nibble << 4 * j;
        }
        const uint32_t p = a >> 7;
        for (int i = 0; i < 7; i++) t.sign_nibbles[a] |= static_cast<uint32_t>(a >> i & 1) << (4 * places[i] + 2);
        t.sign_nibbles[a] |= static_cast<uint32_t>(parity(a & 127)) << (4 * 7 + 2) | p * 0x88888888u;
    }
    int points[2][16];
    for (int i = 0; i < 16; i++) {
        const int size = 2 + 4 * (i & 3), shift = i & 8 ? -1 : 1;
        points[e8p_book][i] = (i & 4 ? -size : size) + shift;
        points[residual_book][i] = i - 4;
    }
    add_values(t, points, [](Values& v, int stage) { return v.nibbles[stage]; });
}

Tables build() {
    Tables t{};
    const Points e8p = e8p_points(), residual = residual_points();
    number_bytes(t, residual);
    two_look_ups(t, e8p, residual);
    nibbles(t, e8p, residual);
    return t;
}

}  // namespace

const Tables& tables() {
    static const Tables t = build();
    return t;
}

}  // namespace ptq::e8p_tiled
