// The kernels of one level: included after PTQ_LEVEL, the name of its table, is defined.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "e8p/kernels.h"

namespace ptq::e8p {
namespace {

#if defined(__AVX512F__)
#define PTQ_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define PTQ_VECTOR_BYTES 32
#else
#define PTQ_VECTOR_BYTES 16
#endif
typedef float Lanes __attribute__((vector_size(PTQ_VECTOR_BYTES)));  // one number of each of several vectors
typedef int32_t Ints __attribute__((vector_size(PTQ_VECTOR_BYTES)));
constexpr int64_t lanes = PTQ_VECTOR_BYTES / sizeof(float);

inline Lanes load(const float* from, int64_t count = lanes) {  // the first `count`, then zeros
    Lanes x{};
    std::memcpy(&x, from, count * sizeof(float));
    return x;
}
inline Lanes fill(float x) {
    return Lanes{} + x;
}
inline Lanes min(Lanes a, Lanes b) {
    return a < b ? a : b;
}
inline Lanes absolute(Lanes x) {
    return reinterpret_cast<Lanes>(reinterpret_cast<Ints>(x) & 0x7fffffff);
}
inline Lanes tree(const Lanes* x) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
inline bool any_greater(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
#else
    const Ints greater = a > b;
    return (greater[0] | greater[1] | greater[2] | greater[3]) != 0;
#endif
}

// --- search ----------------------------------------------------------------------------------------------------------

// The best pairs (entry, shift) of some vectors, in order: minus half the squared distance, and entry + 256 shift.
template <int count>
struct Best {
    Lanes value[count];
    Ints entry[count];

    Best() {
        std::fill_n(value, count, fill(-std::numeric_limits<float>::infinity()));
        std::fill_n(entry, count, Ints{});
    }
    void insert(Lanes key, int32_t number) {
        if (count > 1 && !any_greater(key, value[count - 1])) return;
        Ints here{}, id = Ints{} + number;
        for (int i = 0; i < count; i++) {  // from its place on everything moves down, equals too
            here |= key > value[i];
            const Lanes v = value[i];
            const Ints e = entry[i];
            value[i] = here ? key : v, key = here ? v : key;
            entry[i] = here ? id : e, id = here ? e : id;
        }
    }
};

template <int count>
Best<count> search_e8p(const Lanes* y, const Table& table) {
    Best<count> best;
    for (int shift = 0; shift < 2; shift++) {
        Lanes size[dim], square[dim];
        Ints parity{};
        for (int j = 0; j < dim; j++) {
            const Lanes z = y[j] - (shift ? -1.0f : 1.0f);
            parity ^= z < 0.0f;
            size[j] = absolute(z), square[j] = z * z;
        }
        const Lanes half_square = tree(square) * 0.5f;
        const Lanes twice[2] = {parity ? fill(2.0f) : Lanes{}, parity ? Lanes{} : fill(2.0f)};
        for (int a = 0; a < entries; a++) {
            Lanes term[dim];
            for (int j = 0; j < dim; j++) term[j] = size[j] * table.size[a][j];
            const Lanes least = min(min(min(term[0], term[1]), min(term[2], term[3])),
                                    min(min(term[4], term[5]), min(term[6], term[7])));
            const Lanes key = ((tree(term) - table.half_norm[a]) - half_square) - least * twice[table.odd[a]];
            best.insert(key, a + entries * shift);
        }
    }
    return best;
}

Best<1> search_plain(const Lanes* y, const Table& table) {
    Best<1> best;
    Lanes term[dim];
    for (int j = 0; j < dim; j++) term[j] = y[j] * y[j];
    const Lanes half_square = tree(term) * 0.5f;
    for (int a = 0; a < entries; a++) {
        for (int j = 0; j < dim; j++) term[j] = y[j] * table.point[a][j];
        best.insert((tree(term) - table.half_norm[a]) - half_square, a);
    }
    return best;
}

// --- codes -----------------------------------------------------------------------------------------------------------

// The codes of the nearest points of pairs (entry, shift).
Ints e8p_codes(const Lanes* y, Ints entry, const Table& table) {
    Ints codes;
    for (int i = 0; i < lanes; i++) {
        const int a = entry[i] & 0xff, negative = entry[i] >> 8;
        const float shift = negative ? -1.0f : 1.0f;
        int signs = table.odd[a] << 7, flip = 0;
        float least = std::numeric_limits<float>::infinity();
        for (int j = 0; j < dim; j++) {
            const float z = y[j][i] - shift, term = (z < 0 ? -z : z) * table.size[a][j];
            signs ^= (z < 0) << j;
            if (term < least) least = term, flip = j;
        }
        signs ^= __builtin_parity(signs) << flip;
        codes[i] = a << 8 | (signs ^ negative);
    }
    return codes;
}

inline void e8p_point(int32_t code, const Table& table, float* point) {
    const int a = code >> 8 & 0xff, p = __builtin_parity(code & 0xff), signs = (code & 0xff) ^ p;
    const float shift = p ? -1.0f : 1.0f;
    for (int j = 0; j < dim; j++) point[j] = (signs >> j & 1 ? -table.point[a][j] : table.point[a][j]) + shift;
}

// scale * (m0 P0 + m1 P1).
inline void value_of(int32_t code, const Book& book, float* w) {
    float first[dim], second[dim] = {};
    e8p_point(code, book.first, first);
    if (book.bits == 3) std::memcpy(second, book.second.point[code >> 16 & 0xff], sizeof second);
    if (book.bits == 4) e8p_point(code >> 16, book.second, second);
    for (int j = 0; j < dim; j++) w[j] = (first[j] * book.multiplier[0] + second[j] * book.multiplier[1]) * book.scale;
}

// What is left of y behind the first stage, in units of the second.
inline void residual(const Lanes* y, Ints codes, const Book& book, Lanes* rest) {
    alignas(64) float points[dim][lanes];
    for (int i = 0; i < lanes; i++) {
        float point[dim];
        e8p_point(codes[i], book.first, point);
        for (int j = 0; j < dim; j++) points[j][i] = point[j];
    }
    for (int j = 0; j < dim; j++) rest[j] = (y[j] - load(points[j]) * book.multiplier[0]) / book.multiplier[1];
}

template <int count>
Ints two_stages(const Lanes* y, const Book& book) {
    Lanes z[dim];
    for (int j = 0; j < dim; j++) z[j] = y[j] / book.multiplier[0];
    const Best<count> firsts = search_e8p<count>(z, book.first);
    Lanes best = fill(-std::numeric_limits<float>::infinity());
    Ints codes{};
    for (int i = 0; i < count; i++) {
        const Ints first = e8p_codes(z, firsts.entry[i], book.first);
        Lanes rest[dim];
        residual(y, first, book, rest);
        const Best<1> second = book.bits == 3 ? search_plain(rest, book.second) : search_e8p<1>(rest, book.second);
        const Ints code = book.bits == 3 ? second.entry[0] : e8p_codes(rest, second.entry[0], book.second);
        const Ints nearer = second.value[0] > best;
        best = nearer ? second.value[0] : best;
        codes = nearer ? (first | code << 16) : codes;
    }
    return codes;
}

// The codes of vectors, coordinate by coordinate.
Ints codes_of(const Lanes* x, const Book& book) {
    Lanes y[dim];
    for (int j = 0; j < dim; j++) y[j] = x[j] * book.inverse;
    if (book.bits == 2) return e8p_codes(y, search_e8p<1>(y, book.first).entry[0], book.first);
    switch (book.candidates) {
        case 1:
            return two_stages<1>(y, book);
        case 2:
            return two_stages<2>(y, book);
        case 4:
            return two_stages<4>(y, book);
        default:
            return two_stages<max_candidates>(y, book);
    }
}

// --- kernels ---------------------------------------------------------------------------------------------------------

void round(const Round& p, int64_t first, int64_t last) {
    const int64_t end = std::min(last * strip, p.vectors);
    for (int64_t from = first * strip; from < end; from += lanes) {
        const int64_t count = std::min(lanes, end - from);
        Lanes x[dim] = {};
        for (int64_t i = 0; i < count; i++)
            for (int j = 0; j < dim; j++) x[j][i] = p.w[(from + i) * dim + j];
        const Ints codes = codes_of(x, *p.book);
        std::memcpy(p.codes + from, &codes, count * sizeof(int32_t));
    }
}

// Eight columns of some rows: codes and errors.
void round_columns(const Ldlq& p, const Lanes* target, int64_t column, int64_t from, int64_t count, Lanes* error) {
    const Ints codes = codes_of(target, *p.book);
    std::memcpy(p.codes + column / dim * p.n + from, &codes, count * sizeof(int32_t));
    alignas(64) float values[dim][lanes];
    for (int64_t i = 0; i < lanes; i++) {
        float value[dim];
        value_of(codes[i], *p.book, value);
        for (int j = 0; j < dim; j++) values[j][i] = value[j];
    }
    for (int j = 0; j < dim; j++) {
        const int64_t at = (column + j) * p.n + from;
        error[j] = load(p.w + at, count) - load(values[j]);
        std::memcpy(p.error + at, &error[j], count * sizeof(float));
    }
}

void ldlq(const Ldlq& p, int64_t first, int64_t last) {
    const int64_t end = std::min(last * strip, p.n);
    std::vector<Lanes> target(p.c);
    for (int64_t from = first * strip; from < end; from += lanes) {
        const int64_t count = std::min(lanes, end - from);
        for (int64_t j = 0; j < p.c; j++) target[j] = load(p.target + j * p.n + from, count);
        for (int64_t s = p.c - dim; s >= 0; s -= dim) {
            Lanes error[dim];
            round_columns(p, &target[s], s, from, count, error);
            for (int64_t i = 0; i < s; i++)
                for (int j = dim - 1; j >= 0; j--) target[i] += error[j] * p.factor[(s + j) * p.c + i];
        }
    }
}

void decode(const Decode& p, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) value_of(p.codes[i], *p.book, p.w + i * dim);
}

}  // namespace

const Kernels PTQ_LEVEL{round, ldlq, decode};

}  // namespace ptq::e8p
