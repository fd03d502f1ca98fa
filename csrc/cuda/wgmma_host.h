// wgmma.h on a CPU, for tests. Bulk copies land, and products are computed, as late as they may (when somebody waits
// for them) or at once: an A that is overwritten too early, or a tile, shows in one of the two.
#pragma once

#include "cuda/device_host.h"

namespace ptq::cuda {

constexpr bool has_wgmma = true;

struct alignas(8) Barrier {
    uint8_t arrivals, missing, parity, unused;
    int32_t bytes;  // that are still to be copied
};

inline uint32_t shared_offset(const void* p) {
    return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - machine.shared);
}

inline void wake(const Barrier* b) {
    for (Fiber& f : machine.fibers)
        if (f.awaits == b) f.awaits = nullptr, f.waiting = false;
}
inline void complete(Barrier* b) {
    if (b->missing || b->bytes) return;
    b->missing = b->arrivals;
    b->parity ^= 1;
    wake(b);
}
inline void barrier_init(Barrier* b, int arrivals) {
    if (reinterpret_cast<uintptr_t>(b) % alignof(Barrier)) fail("misaligned barrier");
    *b = {static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0, 0};
}
inline void barriers_ready() {}
inline void barrier_arrive(Barrier* b) {
    if (!b->missing) fail("more arrivals at a barrier than it has in a phase");
    b->missing--;
    complete(b);
}
inline void barrier_expect(Barrier* b, int bytes) {
    b->bytes += bytes;
    barrier_arrive(b);
}
inline void land(const BulkCopy& c) {
    Barrier* b = static_cast<Barrier*>(c.barrier);
    std::memcpy(c.to, c.from, c.bytes);
    b->bytes -= c.bytes;
    complete(b);
}
inline void copy_bulk(void* to, const void* from, int bytes, Barrier* b) {
    if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16)
        fail("misaligned bulk copy");
    const BulkCopy c{to, from, bytes, b};
    if (machine.backwards) return land(c);
    machine.bulk.push_back(c);
    wake(b);
}
inline void barrier_wait(Barrier* b, int parity) {
    while (b->parity == parity) {
        std::vector<BulkCopy> all;
        all.swap(machine.bulk);
        bool moved = false;
        for (const BulkCopy& c : all) {
            if (c.barrier == b)
                land(c), moved = true;
            else
                machine.bulk.push_back(c);
        }
        if (moved) continue;
        machine.fibers[machine.current].awaits = b;
        pause();
    }
}

inline void leave_registers() {}
inline void take_registers() {}
inline void keep(float&) {}
inline void wgmma_fence() {
    warp_barrier();
}
inline void wgmma_commit() {
    exchange(7, nullptr, 0, [](Exchange& e) { e.products.emplace_back(); });
}
template <int pending>
void wgmma_wait() {
    exchange(8, nullptr, 0, [](Exchange& e) {
        while (e.products.size() > pending + 1) {
            for (const Product& p : e.products.front()) p.compute(p);
            e.products.erase(e.products.begin());
        }
    });
}

// What a warp multiplies: the registers of its lanes, and a tile of tokens.
template <int kind, class C, class Compute>
void issue(C (&c)[16][4], const uint32_t (&a)[4], uint64_t tokens, bool adds, Compute compute) {
    static_assert(sizeof(void*) == 8);
    if ((tokens >> 32 & 0x3fff) != 64 || tokens >> 62 != 1)
        fail("this tile of wgmma is not of 128-byte rows, swizzled");
    const uint64_t all[4] = {reinterpret_cast<uintptr_t>(c), reinterpret_cast<uintptr_t>(a), tokens, adds};
    uint32_t in[8];
    std::memcpy(in, all, sizeof all);
    exchange(kind, in, 8, [compute](Exchange& e) {
        Product p{};
        for (int l = 0; l < 32; l++) {
            uint64_t of_lane[4];
            std::memcpy(of_lane, e.in[l], sizeof of_lane);
            if (l && (of_lane[2] != p.tokens || of_lane[3] != p.adds)) fail("lanes multiply different tiles");
            p.c[l] = reinterpret_cast<void*>(of_lane[0]);
            p.a[l] = reinterpret_cast<const uint32_t*>(of_lane[1]);
            p.tokens = of_lane[2], p.adds = of_lane[3];
        }
        p.compute = compute;
        if (machine.backwards)
            p.compute(p);
        else
            e.products.back().push_back(p);
    });
}
// Byte `byte` of the 32 of token `row` that a descriptor shows: the swizzle acts on the bits of the address.
inline const uint8_t* tile_byte(uint64_t tokens, int row, int byte) {
    uint32_t address = static_cast<uint32_t>(tokens & 0x3fff) << 4;
    address += static_cast<uint32_t>(tokens >> 32 & 0x3fff) * 16 * (row / 8) + 128 * (row % 8) + byte;
    return machine.shared + (address ^ (address >> 7 & 7) << 4);
}
// c = sum(c, left numbers, right numbers) of a row and a token; columns in two halves, as the registers of A have them.
template <class C, class Number, int depth, class Left, class Right, class Sum>
void compute_products(const Product& p, Left left, Right right, Sum sum) {
    constexpr int each = depth / 8;  // numbers in a word
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 64; i++) {
            const int row = l / 4 + (i % 4 >= 2 ? 8 : 0), token = i / 4 * 8 + 2 * (l % 4) + i % 2;
            Number lefts[depth], rights[depth];
            for (int k = 0; k < depth; k++) {
                const int t = k % (depth / 2) / each, half = k >= depth / 2;
                lefts[k] = left(p.a[row % 8 * 4 + t][(row >= 8) + 2 * half], 32 / each * (k % each));
                rights[k] = right(tile_byte(p.tokens, token, 32 / depth * k));
            }
            C& c = static_cast<C*>(p.c[l])[i];
            c = sum(p.adds ? c : C{}, lefts, rights);
        }
}

template <class T>
void wgmma(float (&c)[16][4], const uint32_t (&a)[4], uint64_t tokens, bool adds) {
    issue<6>(c, a, tokens, adds, [](const Product& p) {
        compute_products<float, double, 16>(
            p, [](uint32_t word, int shift) { return widen(T{static_cast<uint16_t>(word >> shift)}); },
            [](const uint8_t* at) {
                T number;
                std::memcpy(&number, at, 2);
                return widen(number);
            },
            [](float sum, const double* lefts, const double* rights) {
                for (int half = 0; half < 16; half += 8) {
                    double terms[9];
                    for (int k = 0; k < 8; k++) terms[k] = lefts[half + k] * rights[half + k];
                    terms[8] = sum;
                    sum = cut_sum(terms);
                }
                return sum;
            });
    });
}
inline void wgmma_s8(int32_t (&c)[16][4], const uint32_t (&a)[4], uint64_t tokens, bool adds) {
    issue<9>(c, a, tokens, adds, [](const Product& p) {
        compute_products<int32_t, int, 32>(
            p, [](uint32_t word, int shift) { return static_cast<int8_t>(word >> shift); },
            [](const uint8_t* at) { return static_cast<int8_t>(*at); },
            [](int32_t sum, const int* lefts, const int* rights) {
                for (int k = 0; k < 32; k++) sum += lefts[k] * rights[k];
                return sum;
            });
    });
}

}  // namespace ptq::cuda
