// device.h on a CPU, for tests: every thread of a block is a fiber, and all run in turn up to the next barrier, shuffle
// or mma; blocks run one after the other. What a GPU would leave to chance is made visible:
//   - threads and blocks run forwards or backwards, asynchronous copies land as late or as early as they may
//     (`Schedule`): a missing barrier or wait shows in one of the two
//   - shared memory starts as NaNs and ends at a page that must not be touched; so do the buffers of `guarded`
//   - a misaligned vector access, a barrier that not all threads reach, an access beyond the end, a grid that is too
//     large: errors of `launch`
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cuda/machine_host.h"
#include "cuda/numbers_host.h"

#define PTQ_KERNEL(threads, blocks)
#define PTQ_DEVICE inline
#define PTQ_BOTH inline
#define PTQ_CONSTANT static const
#define PTQ_UNROLL
#define PTQ_ROLLED

namespace ptq::cuda {

inline int thread() {
    return machine.current;
}
inline int lane() {
    return machine.current & 31;
}
inline int warp() {
    return machine.current >> 5;
}
inline int block_x() {
    return static_cast<int>(machine.block[0]);
}
inline int block_y() {
    return static_cast<int>(machine.block[1]);
}
inline int block_z() {
    return static_cast<int>(machine.block[2]);
}
inline uint8_t* shared() {
    return machine.shared;
}

inline void follow_previous() {
    machine.fibers[machine.current].follows = true;
    set_open(true);
}
inline void prefetch(const void* from, int bytes) {
    if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) fail("a misaligned prefetch");
}
inline void prefetch_line(const void*) {}

inline void block_barrier() {
    Machine& m = machine;
    if (++m.at_barrier < m.threads) return pause();
    m.at_barrier = 0;
    for (Fiber& f : m.fibers) f.waiting = false;
}

// Every lane leaves its numbers; the last one to come computes for all.
template <class Compute>
Exchange& exchange(int kind, const uint32_t* in, int count, Compute compute) {
    Exchange& e = machine.warps[warp()];
    if (e.arrived && e.kind != kind) fail("lanes of a warp meet at different instructions");
    e.kind = kind;
    std::memcpy(e.in[lane()], in, 4 * count);
    if (++e.arrived < 32) {
        pause();
        return e;
    }
    e.arrived = 0;
    compute(e);
    for (int l = 0; l < 32; l++) machine.fibers[warp() * 32 + l].waiting = false;
    return e;
}

inline void warp_barrier() {
    exchange(1, nullptr, 0, [](Exchange&) {});
}
template <class T>
T shuffle(T value, int from) {
    static_assert(sizeof(T) == 4);
    uint32_t in[2] = {0, static_cast<uint32_t>(from)};
    std::memcpy(in, &value, 4);
    const Exchange& e = exchange(4, in, 2, [](Exchange& x) {
        for (int l = 0; l < 32; l++) x.out[l][0] = x.in[x.in[l][1] & 31][0];
    });
    std::memcpy(&value, &e.out[lane()][0], 4);
    return value;
}
template <class T>
T shuffle_xor(T value, int mask) {
    return shuffle(value, lane() ^ mask);
}

template <class V>
V load(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % alignof(V)) fail("misaligned load");
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <class V>
void load_once(V& value, const void* from, bool wanted) {
    if (wanted) value = load<V>(from);
}
template <class V>
void store(void* to, V value) {
    if (reinterpret_cast<uintptr_t>(to) % alignof(V)) fail("misaligned store");
    std::memcpy(to, &value, sizeof value);
}

template <int bytes>
void copy_async(void* to, const void* from) {
    static_assert(bytes == 4 || bytes == 8 || bytes == 16);
    if (reinterpret_cast<uintptr_t>(from) % bytes || reinterpret_cast<uintptr_t>(to) % bytes) fail("misaligned copy");
    if (machine.backwards)
        std::memcpy(to, from, bytes);
    else
        machine.fibers[machine.current].copies.back().push_back({to, from, bytes});
}
inline void copy_commit() {
    machine.fibers[machine.current].copies.emplace_back();
}
template <int pending>
void copy_wait() {
    std::vector<std::vector<Copy>>& groups = machine.fibers[machine.current].copies;
    while (groups.size() > pending + 1) {
        for (const Copy& c : groups.front()) std::memcpy(c.to, c.from, c.bytes);
        groups.erase(groups.begin());
    }
}

// As tensor cores add, as far as is known of compute capability 8.0: all terms cut off one bit behind the last place of
// the largest, then the sum cut off. Nothing is rounded to the nearest.
inline float cut_sum(const double (&terms)[9]) {
    double largest = 0, sum = 0;
    bool finite = true;
    for (const double x : terms) {
        largest = std::fmax(largest, std::fabs(x));
        finite = finite && std::isfinite(x);
    }
    const auto cut = [](double x, int last) { return std::ldexp(std::trunc(std::ldexp(x, -last)), last); };
    for (const double x : terms) sum += finite && largest > 0 ? cut(x, std::ilogb(largest) - 24) : x;
    return static_cast<float>(std::isfinite(sum) && sum != 0 ? cut(sum, std::ilogb(sum) - 23) : sum);
}

// Fragments as the PTX manual draws them: g = lane / 4, t = lane % 4; A: rows g and g + 8; B: column g; C: columns 2 t.
template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint32_t in[10] = {a[0], a[1], a[2], a[3], b0, b1};
    std::memcpy(in + 6, c, 16);
    const Exchange& e = exchange(2, in, 10, [](Exchange& x) {
        const auto number = [](uint32_t word, int i) { return widen(T{static_cast<uint16_t>(word >> (16 * i))}); };
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                const int row = l / 4 + (i >= 2 ? 8 : 0), column = 2 * (l % 4) + i % 2;
                float sum;
                std::memcpy(&sum, &x.in[l][6 + i], 4);
                for (int half = 0; half < 2; half++) {
                    double terms[9];
                    for (int k = 0; k < 8; k++)
                        terms[k] = double{number(x.in[row % 8 * 4 + k / 2][(row >= 8) + 2 * half], k % 2)} *
                                   number(x.in[column * 4 + k / 2][4 + half], k % 2);
                    terms[8] = sum;
                    sum = cut_sum(terms);
                }
                std::memcpy(&x.out[l][i], &sum, 4);
            }
    });
    std::memcpy(c, e.out[lane()], 16);
}
// Integers: `depth` columns in two halves, each lane has 32 bits of either. number(word, shift, is_left) is one of
// them.
template <int kind, int depth, class Number>
void mma_integers(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Number number) {
    uint32_t in[10] = {a[0], a[1], a[2], a[3], b0, b1};
    std::memcpy(in + 6, c, 16);
    const Exchange& e = exchange(kind, in, 10, [number](Exchange& x) {
        constexpr int each = depth / 8;  // numbers in a word
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                const int row = l / 4 + (i >= 2 ? 8 : 0), column = 2 * (l % 4) + i % 2;
                uint32_t sum = x.in[l][6 + i];
                for (int k = 0; k < depth; k++) {
                    const int t = k % (depth / 2) / each, shift = 32 / each * (k % each), half = k >= depth / 2;
                    sum += number(x.in[row % 8 * 4 + t][(row >= 8) + 2 * half], shift, true) *
                           number(x.in[column * 4 + t][4 + half], shift, false);
                }
                x.out[l][i] = sum;
            }
    });
    std::memcpy(c, e.out[lane()], 16);
}
inline void mma_u8s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_integers<3, 32>(c, a, b0, b1, [](uint32_t word, int shift, bool is_left) {
        return is_left ? static_cast<int>(word >> shift & 255) : static_cast<int8_t>(word >> shift);
    });
}
inline void mma_s4(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_integers<5, 64>(
        c, a, b0, b1, [](uint32_t word, int shift, bool) { return static_cast<int32_t>(word << (28 - shift)) >> 28; });
}

inline uint32_t transpose(uint32_t word) {
    const Exchange& e = exchange(6, &word, 1, [](Exchange& x) {
        const auto number = [&x](int row, int i) { return x.in[4 * row + i / 2][0] >> (16 * (i % 2)) & 0xffff; };
        for (int l = 0; l < 32; l++) x.out[l][0] = number(2 * (l % 4), l / 4) | number(2 * (l % 4) + 1, l / 4) << 16;
    });
    return e.out[lane()][0];
}

inline int32_t dp4a(uint32_t a, uint32_t b, int32_t c) {
    for (int i = 0; i < 32; i += 8) c += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
    return c;
}
inline uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) out |= static_cast<uint32_t>(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}
inline uint32_t rotate_left(uint32_t x, int by) {
    return std::rotl(x, by & 31);
}
inline uint32_t xor_and(uint32_t a, uint32_t b, uint32_t mask) {
    return (a ^ b) & mask;
}
inline void keep(int&) {}
inline void keep(uint32_t&) {}
template <class T>
void keep(T*&) {}
inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
    return (a & mask) | bits;
}

}  // namespace ptq::cuda
