// Keys and values as `attend` wants them. Included once per level, into an anonymous namespace.
#pragma once

#include <cstring>

#include "gemm/transpose.h"
#include "prefill/kernels.h"
#include "steps/numbers.h"

namespace ptq::prefill {
namespace {

// Steps [at, at + 8) of the d numbers from `from` on, zeros behind the last.
template <Mode mode, Number type>
inline gemm::Eight read_steps(const void* from, int64_t at, int64_t d) {
    constexpr int64_t size = type == Number::float32 ? 4 : 2, each = numbers_of(mode), numbers = 8 * each;
    const int64_t count = std::min(numbers, d - at * each);
    gemm::Eight x{};
    if (count <= 0) return x;
    const char* start = static_cast<const char*>(from) + at * each * size;
    if constexpr (type == Number::bfloat16 && mode == Mode::floats) {
        typedef uint16_t Words __attribute__((vector_size(16)));
        Words words{};
        std::memcpy(&words, start, count * size);
        return __builtin_convertvector(words, gemm::Eight) << 16;
    }
    if (count == numbers)
        std::memcpy(&x, start, sizeof x);
    else
        std::memcpy(&x, start, count * size);
    return x;
}

inline const void* number_at(const Attention& p, const Heads& x, int64_t at) {
    return static_cast<const char*>(x.data) + at * (p.type == Number::float32 ? 4 : 2);
}

// What lies behind the last key stays: its scores are hidden.
template <Mode mode, Number type>
void pack_keys(const Attention& p, int64_t from, int64_t count, uint32_t* to) {
    const int64_t steps = p.key_steps();
    for (int64_t s = 0; s < count; s += 8)
        for (int64_t i = 0; i < steps; i += 8) {
            gemm::Eight x[8];
            for (int64_t j = 0; j < 8; j++)
                x[j] = read_steps<mode, type>(number_at(p, p.keys, from + std::min(s + j, count - 1) * p.keys.token), i,
                                              p.d);
            gemm::transpose(x);
            for (int64_t j = 0; j < std::min(int64_t{8}, steps - i); j++)
                std::memcpy(to + (s / panel * steps + i + j) * panel + s % panel, &x[j], sizeof x[j]);
        }
}

template <Mode mode, Number type>
void pack_values(const Attention& p, int64_t from, int64_t count, uint32_t* to) {
    constexpr int64_t each = numbers_of(mode), whole = each * depth_of(mode);
    const int64_t width = p.value_width(), end = (count + whole - 1) / whole * whole;
    for (int64_t c = 0; c < width; c += lanes) {
        const int64_t start = c / panel * panel, step = std::min(panel, width - start);
        const int64_t columns = std::clamp(p.value_d - c, int64_t{0}, lanes);
        uint32_t* column = to + start * p.value_steps() + c - start;
        for (int64_t s = 0; s < end; s += each, column += step) {
            Dwords x{};
            for (int64_t i = 0; i < each && s + i < count; i++) {
                const int64_t at = from + (s + i) * p.values.token + c;
                const auto y = (Dwords)steps::read<type>(p.values.data, at, columns);
                x |= each == 2 && i == 0 ? y >> 16 : y;
            }
            store_vector(column, x);
        }
    }
}

template <Mode mode, Number type>
void pack_of(const Attention& p, int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t head = p.first + unit / p.chunks(), index = unit % p.chunks(), at = index * chunk;
        const int64_t count = std::min(chunk, p.length - at);
        const auto start = [&](const Heads& x) {
            return head / p.heads * x.batch + head % p.heads * x.head + at * x.token;
        };
        pack_keys<mode, type>(p, start(p.keys), count, p.keys_of(head, index));
        pack_values<mode, type>(p, start(p.values), count, p.values_of(head, index));
    }
}

void pack(const Attention& p, int64_t first, int64_t last) {
    if (p.mode == Mode::tiles)
        pack_of<Mode::tiles, Number::bfloat16>(p, first, last);
    else if (p.mode == Mode::pairs)
        pack_of<Mode::pairs, Number::bfloat16>(p, first, last);
    else if (p.type == Number::bfloat16)
        pack_of<Mode::floats, Number::bfloat16>(p, first, last);
    else
        pack_of<Mode::floats, Number::float32>(p, first, last);
}

}  // namespace
}  // namespace ptq::prefill
