// The transform of one unit, for any vector length: included once per level, after PTQ_LEVEL (the name of the level)
// is defined. Only additions, subtractions and one scaling, in an order that the level does not change: all levels
// give the same bits.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#include "common/bfloat16.h"
#include "hadamard/dense.h"
#include "hadamard/sylvester.h"
#include "hadamard/units.h"

namespace ptq::hadamard {
namespace {

struct Bfloat16 {
    uint16_t bits;
};
template <class T>
inline T widen(T x) {
    return x;
}
inline float widen(Bfloat16 x) {
    return from_bfloat16(x.bits);
}
template <class T>
inline void narrow(T x, T* to) {
    *to = x;
}
inline void narrow(float x, Bfloat16* to) {
    to->bits = to_bfloat16(x);
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
template <class S, class D, class T>
void unit_rows(const Problem& p, const Cut& c, int64_t vector, T* buffer, T* scratch, T scale) {
    const S* in = static_cast<const S*>(p.in) + vector * p.order;
    D* out = static_cast<D*>(p.out) + vector * p.order;
    const T* signs = p.signs ? static_cast<const T*>(p.signs) + vector % p.sign_vectors * p.order : nullptr;
    if constexpr (std::is_same_v<D, T>) buffer = out;
    read_vector(buffer, in, p.order, scale, p.transpose ? nullptr : signs);
    transform(buffer, p, c, scratch);
    if (!std::is_same_v<D, T> || (p.transpose && signs))
        write_vector(out, buffer, p.order, p.transpose ? signs : nullptr);
}

// gathered: several vectors, interleaved so that 2^m elements of each make one line
template <class S, class D, class T>
void unit_gathered(const Problem& p, const Cut& c, int64_t unit, T* buffer, T* scratch, T scale) {
    const int64_t first = unit * c.vectors, count = std::min(c.vectors, p.outer * p.blocks - first);
    const int64_t rows = p.order / p.doublings;
    if (count < c.vectors) std::memset(buffer, 0, sizeof(T) * c.width * rows);
    for (int64_t v = 0; v < count; v++) {
        const S* in = static_cast<const S*>(p.in) + (first + v) * p.order;
        const T* signs =
            p.signs && !p.transpose ? static_cast<const T*>(p.signs) + (first + v) % p.sign_vectors * p.order : nullptr;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < p.doublings; j++) {
                const int64_t e = i * p.doublings + j;
                buffer[i * c.width + v * p.doublings + j] = widen(in[e]) * (signs ? scale * signs[e] : scale);
            }
    }
    transform(buffer, p, c, scratch);
    for (int64_t v = 0; v < count; v++) {
        D* out = static_cast<D*>(p.out) + (first + v) * p.order;
        const T* signs =
            p.signs && p.transpose ? static_cast<const T*>(p.signs) + (first + v) % p.sign_vectors * p.order : nullptr;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < p.doublings; j++) {
                const int64_t e = i * p.doublings + j;
                const T y = buffer[i * c.width + v * p.doublings + j];
                narrow(signs ? y * signs[e] : y, out + e);
            }
    }
}

// columns: panel `unit % panels` of block `unit / panels`
template <class S, class D, class T>
void unit_columns(const Problem& p, const Cut& c, int64_t unit, T* buffer, T* scratch, T scale) {
    const int64_t block = unit / c.panels, first = unit % c.panels * c.vectors;
    const int64_t count = std::min(c.vectors, p.inner - first), at = block * p.order * p.inner + first;
    const S* in = static_cast<const S*>(p.in) + at;
    D* out = static_cast<D*>(p.out) + at;
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

// From elements S to elements D, computed in T.
template <class S, class D, class T>
void run(const Problem& p, int64_t first, int64_t last) {
    const Cut c = cut(p);
    const T scale = static_cast<T>(p.scale);
    int64_t widest = 0;
    for (int f = 0; f < p.factors; f++) widest = std::max(widest, p.factor_order[f]);
    const int64_t buffer_size = p.order / p.doublings * c.width;
    const int64_t scratch_size = dense_scratch<T>(widest);
    const auto round = [](int64_t n) { return (n * sizeof(T) + 63) / 64 * 64; };
    char* memory = static_cast<char*>(std::aligned_alloc(64, round(buffer_size) + round(scratch_size)));
    if (!memory) throw std::bad_alloc();
    T *buffer = reinterpret_cast<T*>(memory), *scratch = reinterpret_cast<T*>(memory + round(buffer_size));
    const auto unit = p.inner > 1 ? unit_columns<S, D, T> : c.vectors > 1 ? unit_gathered<S, D, T> : unit_rows<S, D, T>;
    for (int64_t u = first; u < last; u++) unit(p, c, u, buffer, scratch, scale);
    std::free(memory);
}

}  // namespace

void PTQ_LEVEL(const Problem& p, int64_t first, int64_t last) {
    if (p.storage == Storage::float32) return run<float, float, float>(p, first, last);
    if (p.storage == Storage::float64) return run<double, double, double>(p, first, last);
    if (p.storage == Storage::bfloat16) return run<Bfloat16, Bfloat16, float>(p, first, last);
    run<Bfloat16, float, float>(p, first, last);
}

}  // namespace ptq::hadamard
