// LDLQ within a block of columns: each is rounded, from the last to the first, and its error goes to those before it
// (`ptq.weights.rounding`). Kernels include it once per instruction set, so all is in an anonymous namespace; host code
// takes the size of a strip alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/sixteen.h"

namespace ptq {
namespace {

constexpr int64_t ldlq_strip = 64;  // rows of W that one unit takes

// Strips [first, last) of a `Ldlq` of a format. `round(target, w, of)` gives codes and errors of sixteen rows; `of`
// reads their numbers of [g, n].
template <class Ldlq, class Round>
void ldlq_strips(const Ldlq& p, int64_t first, int64_t last, const Round& round) {
    constexpr int64_t vectors = ldlq_strip / lanes;
    std::vector<float> errors(p.c * ldlq_strip);
    for (int64_t strip = first; strip < last; strip++) {
        const int64_t from = strip * ldlq_strip, width = std::min(ldlq_strip, p.n - from);
        const auto read = [&](const float* row, int64_t v) {
            return load(row + from + v * lanes, std::clamp(width - v * lanes, int64_t{0}, lanes));
        };
        for (int64_t j = p.c - 1; j >= 0; j--) {
            Lanes target[vectors];
            for (int64_t v = 0; v < vectors; v++) target[v] = read(p.target + j * p.n, v);
            for (int64_t i = p.c - 1; i > j; i--) {
                const Lanes f = fill(p.factor[j * p.c + i]);
                for (int64_t v = 0; v < vectors; v++) target[v] += f * load(&errors[i * ldlq_strip + v * lanes]);
            }
            for (int64_t v = 0; v * lanes < width; v++) {
                const int64_t count = std::min(lanes, width - v * lanes), at = j * p.n + from + v * lanes;
                const auto of = [&](const float* numbers) { return read(numbers + p.group[j] * p.n, v); };
                const auto [codes, error] = round(target[v], read(p.w + j * p.n, v), of);
                store(&errors[j * ldlq_strip + v * lanes], error);
                store(p.error + at, error, count);
                store_bytes(p.codes + at, codes, count);
            }
        }
    }
}

}  // namespace
}  // namespace ptq
