// Vectors of the widest registers that a level has: included once per level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

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

}  // namespace
}  // namespace ptq::hadamard
