// The scales of a strip, included by panels.h.
#pragma once

#include <limits>

#include "gemm/block.h"
#include "gemm/panels_kernels.h"

namespace ptq::gemm {
namespace {

// Of integers, as floats: [group, tile, 16]; multiples, then the steps that they count: [tile, 16].
template <int tiles>
void load_scales(const Panels& w, int64_t tile, float* to) {
    for (int64_t g = 0; g < w.groups; g++)
        for (int64_t r = 0; r < tiles; r++, to += tile_rows)
            if (w.multiples)
                store(to, converted<Lanes>(tiles::load_multiples(w.multiples, w.groups, tile + r, g)));
            else
                store(to, scale_at(w, tile + r, g));
    for (int64_t r = 0; w.multiples && r < tiles; r++, to += tile_rows)
        store(to, tiles::load_steps(w.multiples, w.groups, tile + r));
}

// Those of a strip to come.
inline void fetch_scales(const Panels& w, int64_t tile, int64_t tiles) {
    const int64_t bytes = tile_rows * (w.multiples ? 1 + w.groups : 2 * w.groups);
    const auto* from = w.multiples ? w.multiples : reinterpret_cast<const uint8_t*>(w.scale);
    for (int64_t i = 0; from && i < tiles * bytes; i += 64) __builtin_prefetch(from + tile * bytes + i, 0, 2);
}

// Totals of integer scales, to floats: step [tile, 16].
template <int tiles>
void count_steps(const float* step, float* total, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        for (int r = 0; r < tiles; r++, total += tile_rows)
            store(total, converted<Lanes>(load_vector<SignedInts>(total)) * load(step + r * tile_rows));
}

// Floats: sums are kept in the unit of the group that they are in, its scale. Where scales of a row are zero, the
// numbers of the panel are cleared; where they are too different, or not finite, groups are added one by one.
struct Scales {
    bool zeros, apart;
};

constexpr float widest = 1 << 30;  // between the scales of a row

template <int tiles>
Scales find_ratios(const Panels& w, int64_t tile, float* ratio) {
    Scales found{false, false};
    for (int r = 0; r < tiles; r++) {
        Lanes last{}, low = fill(std::numeric_limits<float>::max()), high{};
        SignedInts usual = SignedInts{} - 1, zeros{};
        for (int64_t g = 0; g < w.groups; g++) {
            const Lanes scale = scale_at(w, tile + r, g);
            const Lanes size = (Lanes)((SignedInts)scale & INT32_MAX), one = fill(1.0f);
            const SignedInts zero = size == 0.0f;
            store(ratio + (g * tiles + r) * tile_rows, chosen(zero | (last == 0.0f), one, last / scale));
            last = chosen(zero, last, scale);
            zeros |= zero, usual &= size <= std::numeric_limits<float>::max();
            low = min(low, chosen(zero, low, size)), high = max(high, size);
        }
        store(ratio + (w.groups * tiles + r) * tile_rows, last);
        usual &= (high <= low * widest) | (high == 0.0f);
        for (int64_t i = 0; i < tile_rows; i++) found.zeros |= zeros[i] != 0, found.apart |= usual[i] == 0;
    }
    if (found.apart)
        for (int64_t i = 0; i < w.groups * tiles * tile_rows; i++) ratio[i] = 1.0f;
    return found;
}

// The numbers of a panel whose scales are zero.
template <Mode mode, int tiles>
void clear_zeros(const Panels& w, int64_t tile, const Columns& c, int32_t* panel) {
    for (int64_t column = c.column; column < c.end; column += columns_of(mode), panel += tiles * tile_rows)
        for (int r = 0; r < tiles; r++) {
            const Lanes scale = scale_at(w, tile + r, column / w.group_columns);
            const SignedInts kept = load_vector<SignedInts>(panel + r * tile_rows) & (scale != 0.0f);
            store_vector(panel + r * tile_rows, kept);
        }
}

// The sums of a group, which has ended, are added to those before.
template <int tiles>
void add_group(const Panels& w, int64_t tile, int64_t group, int64_t tokens, float* total, float* sum) {
    for (int64_t t = 0; t < tokens; t++)
        for (int r = 0; r < tiles; r++, total += tile_rows, sum += tile_rows) {
            const Lanes scale = scale_at(w, tile + r, group);
            store(sum, fma(scale, load(total), load(sum)));
            store(total, Lanes{});
        }
}

}  // namespace
}  // namespace ptq::gemm
