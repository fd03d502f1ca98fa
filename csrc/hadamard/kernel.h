// The transform of one unit, for any vector length: included once per level, after PTQ_LEVEL (the name of the level)
// is defined. Only additions, subtractions and one scaling, in an order that the level does not change: all levels
// give the same bits.
//
// A dense factor of order K is applied by the method of four Russians: the 16 signed sums of each 4 inputs are made
// once, and each output adds K / 4 of them, found by its code, instead of K products.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "hadamard/units.h"

#if defined(__AVX512F__)
#define PTQ_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define PTQ_VECTOR_BYTES 32
#else
#define PTQ_VECTOR_BYTES 16
#endif

namespace ptq::hadamard {
namespace {

template <class T>
struct Simd {
    typedef T Vector __attribute__((vector_size(PTQ_VECTOR_BYTES)));
    typedef T Unaligned __attribute__((vector_size(PTQ_VECTOR_BYTES), aligned(alignof(T)), may_alias));
    static constexpr int lanes = PTQ_VECTOR_BYTES / sizeof(T);
};
template <class T>
using Vector = typename Simd<T>::Vector;

template <class T>
inline Vector<T> load(const T* p) {
    return *reinterpret_cast<const typename Simd<T>::Unaligned*>(p);
}
template <class T>
inline void store(T* p, Vector<T> v) {
    *reinterpret_cast<typename Simd<T>::Unaligned*>(p) = v;
}

// --- Sylvester ------------------------------------------------------------------------------------------------------

// Lane i of a pair (i, i + stride) becomes x[i] + x[i + stride], the other x[i] - x[i + stride].
template <class T, int stride, std::size_t... i>
inline Vector<T> stage_in_vector(Vector<T> x, std::index_sequence<i...>) {
    constexpr Vector<T> sign = {((i & stride) ? T(-1) : T(1))...};
    return __builtin_shufflevector(x, x, static_cast<int>(i ^ stride)...) + x * sign;
}

template <class T, int stages>
inline Vector<T> stages_in_vector(Vector<T> x) {
    constexpr auto lanes = std::make_index_sequence<Simd<T>::lanes>();
    if constexpr (stages > 0) x = stage_in_vector<T, 1>(x, lanes);
    if constexpr (stages > 1) x = stage_in_vector<T, 2>(x, lanes);
    if constexpr (stages > 2) x = stage_in_vector<T, 4>(x, lanes);
    if constexpr (stages > 3) x = stage_in_vector<T, 8>(x, lanes);
    return x;
}

// `radix` vectors at distance `stride`, after `stages` steps inside each of them.
template <class T, int radix, int stages>
inline void butterfly(T* x, int64_t stride) {
    Vector<T> v[radix];
#pragma GCC unroll 16
    for (int r = 0; r < radix; r++) v[r] = stages_in_vector<T, stages>(load(x + r * stride));
#pragma GCC unroll 4
    for (int half = 1; half < radix; half *= 2)
#pragma GCC unroll 16
        for (int r = 0; r < radix; r++)
            if (!(r & half)) {
                const Vector<T> a = v[r], b = v[r + half];
                v[r] = a + b;
                v[r + half] = a - b;
            }
#pragma GCC unroll 16
    for (int r = 0; r < radix; r++) store(x + r * stride, v[r]);
}

template <class T, int radix, int stages = 0>
void pass(T* x, int64_t width, int64_t stride) {
    for (int64_t i = 0; i < width; i += radix * stride)
        for (int64_t j = i; j < i + stride; j += Simd<T>::lanes) butterfly<T, radix, stages>(x + j, stride);
}

// Stages first, 2 first, 4 first, ... below `end` on each `end` elements of x[width].
template <class T>
void sylvester(T* x, int64_t width, int64_t first, int64_t end) {
    constexpr int lanes = Simd<T>::lanes, all = lanes == 16 ? 4 : lanes == 8 ? 3 : lanes == 4 ? 2 : 1;
    if (first < lanes && end > first) {
        if (end < lanes) {  // first is 1 here: only the steps inside a vector, and not all of them
            if (end == 2) return pass<T, 1, 1>(x, width, lanes);
            if constexpr (lanes > 4)
                if (end == 4) return pass<T, 1, 2>(x, width, lanes);
            if constexpr (lanes > 8) return pass<T, 1, 3>(x, width, lanes);
        }
        if (end >= 8 * lanes)
            pass<T, 8, all>(x, width, lanes), first = 8 * lanes;
        else if (end == 4 * lanes)
            pass<T, 4, all>(x, width, lanes), first = 4 * lanes;
        else if (end == 2 * lanes)
            pass<T, 2, all>(x, width, lanes), first = 2 * lanes;
        else
            pass<T, 1, all>(x, width, lanes), first = lanes;
    }
    for (; first * 8 <= end; first *= 8) pass<T, 8>(x, width, first);
    if (first * 4 == end) pass<T, 4>(x, width, first);
    if (first * 2 == end) pass<T, 2>(x, width, first);
}

// --- dense factors --------------------------------------------------------------------------------------------------

constexpr int64_t table_groups = 24;  // 24 groups x 16 sums x 64 bytes: half of the L1 cache

template <class T>
inline void make_sums(const T* x, int64_t stride, T* table) {
    constexpr int lanes = Simd<T>::lanes;
    const Vector<T> a = load(x), b = load(x + stride), c = load(x + 2 * stride), d = load(x + 3 * stride);
    const Vector<T> ab[4] = {a + b, b - a, a - b, -a - b}, cd[4] = {c + d, d - c, c - d, -c - d};
#pragma GCC unroll 16
    for (int code = 0; code < 16; code++) store(table + code * lanes, ab[code & 3] + cd[code >> 2]);
}

// out[row] (+)= the sum over `groups` of the table's entries that the row's codes name; `rows` at a time so that
// additions do not wait for each other. A code is 8 times the number of its entry, so it is an address as it stands.
template <class T, int rows>
inline void add_rows(T* out, const uint8_t* codes, int64_t k, int64_t groups, const T* table, bool fresh) {
    constexpr int lanes = Simd<T>::lanes;
    Vector<T> sum[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r] = fresh ? Vector<T>{} : load(out + r * lanes);
    const char* entries = reinterpret_cast<const char*>(table);
    for (int64_t g = 0; g < groups; g++, entries += 16 * PTQ_VECTOR_BYTES, codes += k)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            sum[r] += load(reinterpret_cast<const T*>(entries + int64_t{codes[r]} * (PTQ_VECTOR_BYTES / 8)));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) store(out + r * lanes, sum[r]);
}

// x[outer, K, stride] <- factor x[.], one vector of lanes at a time. scratch: the table, then out[K].
template <class T>
void dense(T* x, int64_t outer, int64_t k, int64_t stride, const uint8_t* codes, T* scratch) {
    constexpr int lanes = Simd<T>::lanes;
    T *table = scratch, *out = scratch + table_groups * 16 * lanes;
    for (int64_t o = 0; o < outer; o++)
        for (int64_t j = 0; j < stride; j += lanes) {
            T* column = x + o * k * stride + j;
            for (int64_t g = 0; g < k / 4; g += table_groups) {
                const int64_t groups = std::min(table_groups, k / 4 - g);
                for (int64_t i = 0; i < groups; i++)
                    make_sums(column + 4 * (g + i) * stride, stride, table + i * 16 * lanes);
                int64_t row = 0;
                for (; row + 8 <= k; row += 8)
                    add_rows<T, 8>(out + row * lanes, codes + g * k + row, k, groups, table, g == 0);
                for (; row < k; row += 4)
                    add_rows<T, 4>(out + row * lanes, codes + g * k + row, k, groups, table, g == 0);
            }
            for (int64_t row = 0; row < k; row++) store(column + row * stride, load(out + row * lanes));
        }
}

// --- units ----------------------------------------------------------------------------------------------------------

struct Bfloat16 {
    uint16_t bits;
};
template <class T>
inline T widen(T x) {
    return x;
}
inline float widen(Bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
template <class T>
inline void narrow(T x, T* to) {
    *to = x;
}
inline void narrow(float x, Bfloat16* to) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// in[count] -> buffer, or back: times `scale`, and times signs[count] where there are some.
template <class S, class T>
inline void read_vector(T* to, const S* from, int64_t count, T scale, const T* signs) {
    if (signs)
        for (int64_t i = 0; i < count; i++) to[i] = widen(from[i]) * (scale * signs[i]);
    else
        for (int64_t i = 0; i < count; i++) to[i] = widen(from[i]) * scale;
}
template <class S, class T>
inline void write_vector(S* to, const T* from, int64_t count, const T* signs) {
    if (signs)
        for (int64_t i = 0; i < count; i++) narrow(from[i] * signs[i], to + i);
    else
        for (int64_t i = 0; i < count; i++) narrow(from[i], to + i);
}

template <class T>
void transform(T* buffer, const Problem& p, const Cut& c, T* scratch) {
    int64_t rows = p.order / p.doublings, outer = 1;
    for (int64_t i = 0; i < rows; i++) sylvester(buffer + i * c.width, c.width, c.first, c.first * p.doublings);
    for (int f = 0; f < p.factors; f++) {
        const int64_t k = p.factor_order[f];
        rows /= k;
        dense(buffer, outer, k, rows * c.width, p.codes[f], scratch);
        outer *= k;
    }
}

// rows: `vector` is the number of a vector of `order` elements
template <class S, class T>
void unit_rows(const Problem& p, const Cut& c, int64_t vector, T* buffer, T* scratch, T scale) {
    const S* in = static_cast<const S*>(p.in) + vector * p.order;
    S* out = static_cast<S*>(p.out) + vector * p.order;
    const T* signs = p.signs ? static_cast<const T*>(p.signs) + vector % p.blocks * p.order : nullptr;
    if constexpr (std::is_same_v<S, T>) buffer = out;
    read_vector(buffer, in, p.order, scale, p.transpose ? nullptr : signs);
    transform(buffer, p, c, scratch);
    if (!std::is_same_v<S, T> || (p.transpose && signs))
        write_vector(out, buffer, p.order, p.transpose ? signs : nullptr);
}

// gathered: several vectors, interleaved so that 2^m elements of each make one line
template <class S, class T>
void unit_gathered(const Problem& p, const Cut& c, int64_t unit, T* buffer, T* scratch, T scale) {
    const int64_t first = unit * c.vectors, count = std::min(c.vectors, p.outer * p.blocks - first);
    const int64_t rows = p.order / p.doublings;
    if (count < c.vectors) std::memset(buffer, 0, sizeof(T) * c.width * rows);
    for (int64_t v = 0; v < count; v++) {
        const S* in = static_cast<const S*>(p.in) + (first + v) * p.order;
        const T* signs =
            p.signs && !p.transpose ? static_cast<const T*>(p.signs) + (first + v) % p.blocks * p.order : nullptr;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < p.doublings; j++) {
                const int64_t e = i * p.doublings + j;
                buffer[i * c.width + v * p.doublings + j] = widen(in[e]) * (signs ? scale * signs[e] : scale);
            }
    }
    transform(buffer, p, c, scratch);
    for (int64_t v = 0; v < count; v++) {
        S* out = static_cast<S*>(p.out) + (first + v) * p.order;
        const T* signs =
            p.signs && p.transpose ? static_cast<const T*>(p.signs) + (first + v) % p.blocks * p.order : nullptr;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < p.doublings; j++) {
                const int64_t e = i * p.doublings + j;
                const T y = buffer[i * c.width + v * p.doublings + j];
                narrow(signs ? y * signs[e] : y, out + e);
            }
    }
}

// columns: panel `unit % panels` of block `unit / panels`
template <class S, class T>
void unit_columns(const Problem& p, const Cut& c, int64_t unit, T* buffer, T* scratch, T scale) {
    const int64_t block = unit / c.panels, first = unit % c.panels * c.vectors;
    const int64_t count = std::min(c.vectors, p.inner - first), at = block * p.order * p.inner + first;
    const S* in = static_cast<const S*>(p.in) + at;
    S* out = static_cast<S*>(p.out) + at;
    const T* signs = p.signs ? static_cast<const T*>(p.signs) + block % p.blocks * p.order : nullptr;
    if (count < c.vectors) std::memset(buffer, 0, sizeof(T) * c.vectors * p.order);
    for (int64_t i = 0; i < p.order; i++) {
        read_vector(buffer + i * c.vectors, in + i * p.inner, count, signs && !p.transpose ? scale * signs[i] : scale,
                    static_cast<const T*>(nullptr));
    }
    transform(buffer, p, c, scratch);
    for (int64_t i = 0; i < p.order; i++) {
        T* row = buffer + i * c.vectors;
        if (signs && p.transpose)
            for (int64_t j = 0; j < count; j++) row[j] *= signs[i];
        write_vector(out + i * p.inner, row, count, static_cast<const T*>(nullptr));
    }
}

template <class S, class T>
void run(const Problem& p, int64_t first, int64_t last) {
    const Cut c = cut(p);
    const T scale = static_cast<T>(p.scale);
    int64_t widest = 0;
    for (int f = 0; f < p.factors; f++) widest = std::max(widest, p.factor_order[f]);
    const int64_t buffer_size = p.order / p.doublings * c.width;
    const int64_t scratch_size = (table_groups * 16 + widest) * Simd<T>::lanes;
    const auto round = [](int64_t n) { return (n * sizeof(T) + 63) / 64 * 64; };
    char* memory = static_cast<char*>(std::aligned_alloc(64, round(buffer_size) + round(scratch_size)));
    if (!memory) throw std::bad_alloc();
    T *buffer = reinterpret_cast<T*>(memory), *scratch = reinterpret_cast<T*>(memory + round(buffer_size));
    const auto unit = p.inner > 1 ? unit_columns<S, T> : c.vectors > 1 ? unit_gathered<S, T> : unit_rows<S, T>;
    for (int64_t u = first; u < last; u++) unit(p, c, u, buffer, scratch, scale);
    std::free(memory);
}

}  // namespace

void PTQ_LEVEL(const Problem& p, int64_t first, int64_t last) {
    if (p.storage == Storage::float32) return run<float, float>(p, first, last);
    if (p.storage == Storage::float64) return run<double, double>(p, first, last);
    run<Bfloat16, float>(p, first, last);
}

}  // namespace ptq::hadamard
