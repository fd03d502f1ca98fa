// Vectors of numbers: those of the compiler where a register holds them, else halves of halves until one does. gcc
// keeps a vector that is wider than a register in memory, and copies it there in pieces. Included once per level, into
// an anonymous namespace.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ptq {
namespace {

// Sums that were not taken apart into registers would be many times slower.
#define PTQ_INLINE [[gnu::always_inline]] inline

#if defined(__AVX512F__)
constexpr int register_bytes = 64;
#elif defined(__AVX2__)
constexpr int register_bytes = 32;
#else
constexpr int register_bytes = 16;
#endif

template <class T, int bytes>
struct Vector {
    typedef T type __attribute__((vector_size(bytes)));
};
template <class T, int bytes>
struct Halves;
template <class T, int bytes>
using Numbers = std::conditional_t<bytes <= register_bytes, typename Vector<T, bytes>::type, Halves<T, bytes>>;
template <class V>
concept Split = requires { typename V::Half; };

template <class V>
PTQ_INLINE V load_vector(const void* from) {
    if constexpr (Split<V>) {
        const auto* at = static_cast<const uint8_t*>(from);
        return {load_vector<typename V::Half>(at), load_vector<typename V::Half>(at + sizeof(V) / 2)};
    } else {
        V x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }
}
template <class V>
PTQ_INLINE void store_vector(void* to, const V& x) {
    if constexpr (Split<V>) {
        store_vector(to, x.low), store_vector(static_cast<uint8_t*>(to) + sizeof(V) / 2, x.high);
    } else {
        std::memcpy(to, &x, sizeof x);
    }
}

template <class T, int bytes>
struct Halves {
    using Half = Numbers<T, bytes / 2>;
    Half low, high;

    template <class U>
    PTQ_INLINE explicit operator Halves<U, bytes>() const {  // the same bits
        return {(Numbers<U, bytes / 2>)low, (Numbers<U, bytes / 2>)high};
    }
    typedef T Element __attribute__((may_alias));
    PTQ_INLINE Element& operator[](int64_t i) { return reinterpret_cast<Element*>(this)[i]; }
    PTQ_INLINE Element operator[](int64_t i) const { return reinterpret_cast<const Element*>(this)[i]; }

    PTQ_INLINE Halves operator-() const { return {-low, -high}; }
    PTQ_INLINE Halves operator~() const { return {~low, ~high}; }

#define PTQ_OPERATOR(op)                                                     \
    PTQ_INLINE friend Halves operator op(const Halves& a, const Halves& b) { \
        return {a.low op b.low, a.high op b.high};                           \
    }                                                                        \
    template <class S>                                                       \
        requires std::is_arithmetic_v<S>                                     \
    PTQ_INLINE friend Halves operator op(const Halves& a, S b) {             \
        return {a.low op static_cast<T>(b), a.high op static_cast<T>(b)};    \
    }                                                                        \
    template <class S>                                                       \
        requires std::is_arithmetic_v<S>                                     \
    PTQ_INLINE friend Halves operator op(S a, const Halves& b) {             \
        return {static_cast<T>(a) op b.low, static_cast<T>(a) op b.high};    \
    }                                                                        \
    template <class S>                                                       \
    PTQ_INLINE Halves& operator op## = (const S& b) {                        \
        return *this = *this op b;                                           \
    }
    PTQ_OPERATOR(+)
    PTQ_OPERATOR(-)
    PTQ_OPERATOR(*)
    PTQ_OPERATOR(/)
    PTQ_OPERATOR(&)
    PTQ_OPERATOR(|)
    PTQ_OPERATOR(^)
    PTQ_OPERATOR(<<)
    PTQ_OPERATOR(>>)
#undef PTQ_OPERATOR

#define PTQ_COMPARISON(op)                                                                   \
    PTQ_INLINE friend Halves<int32_t, bytes> operator op(const Halves& a, const Halves& b) { \
        return {a.low op b.low, a.high op b.high};                                           \
    }                                                                                        \
    template <class S>                                                                       \
        requires std::is_arithmetic_v<S>                                                     \
    PTQ_INLINE friend Halves<int32_t, bytes> operator op(const Halves& a, S b) {             \
        return {a.low op static_cast<T>(b), a.high op static_cast<T>(b)};                    \
    }
    PTQ_COMPARISON(<)
    PTQ_COMPARISON(>)
    PTQ_COMPARISON(<=)
    PTQ_COMPARISON(>=)
    PTQ_COMPARISON(==)
    PTQ_COMPARISON(!=)
#undef PTQ_COMPARISON
};

// Numbers to integers, towards zero, or integers to numbers.
template <class To, class From>
PTQ_INLINE To converted(const From& x) {
    if constexpr (Split<To>)
        return {converted<typename To::Half>(x.low), converted<typename To::Half>(x.high)};
    else
        return __builtin_convertvector(x, To);
}
// a where the comparison holds, else b.
template <class M, class V>
PTQ_INLINE V chosen(const M& mask, const V& a, const V& b) {
    if constexpr (Split<V>)
        return {chosen(mask.low, a.low, b.low), chosen(mask.high, a.high, b.high)};
    else
        return mask ? a : b;
}

// What f gives for the registers of x, or of x and y together.
template <class V, class... W, class F>
PTQ_INLINE V by_register(const F& f, const V& x, const W&... y) {
    if constexpr (Split<V>)
        return {by_register<typename V::Half>(f, x.low, y.low...), by_register<typename V::Half>(f, x.high, y.high...)};
    else
        return f(x, y...);
}

}  // namespace
}  // namespace ptq
