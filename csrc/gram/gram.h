// The kernels of one level: included after PTQ_LEVEL, the name of its table, is defined.
#include "gemm/panels_steps.h"
#include "gram/kernels.h"

namespace ptq::gram {
namespace {

// Channels [channel, channel + count) of a step, and zeros.
template <bool pairs>
inline Dwords step_of(const Channels& c, int64_t step, int64_t channel, int64_t count) {
    const auto token = [&](int64_t t) { return t < c.t ? load(c.x + t * c.k + channel, count) : Lanes{}; };
    if constexpr (pairs)
        return bfloat16_bits(token(2 * step)) | bfloat16_bits(token(2 * step + 1)) << 16;
    else
        return c.rounded ? bfloat16_bits(token(step)) << 16 : (Dwords)token(step);
}

template <bool pairs>
void arrange_steps(const Channels& c, int64_t first, int64_t last) {
    for (int64_t step = first; step < last; step++)
        for (int64_t channel = 0; channel < c.k; channel += tile_rows)
            store_vector(c.tiles + channel * c.steps + step * tile_rows,
                         step_of<pairs>(c, step, channel, c.k - channel));
}
void arrange(const Channels& c, int64_t first, int64_t last) {
    c.pairs ? arrange_steps<true>(c, first, last) : arrange_steps<false>(c, first, last);
}

void unpack(const void* weight, int64_t from, int64_t tiles, int64_t column, int64_t end, void* panel) {
    const auto& c = *static_cast<const Channels*>(weight);
    const int64_t columns = c.pairs ? 2 : 1;
    auto* to = static_cast<uint32_t*>(panel);
    for (int64_t step = column / columns; step < end / columns; step++)
        for (int64_t r = 0; r < tiles; r++, to += tile_rows)
            store_vector(to, load_vector<Dwords>(c.tiles + ((from + r) * c.steps + step) * tile_rows));
}

template <gemm::Mode mode>
void pack_steps(const gemm::Product& p, int64_t first, int64_t last) {
    constexpr int64_t each = gemm::tokens_of(mode), columns = gemm::columns_of(mode);
    Channels c = *static_cast<const Channels*>(p.w.weight);
    c.x = static_cast<const float*>(p.x);
    for (int64_t column = 0; column < p.w.columns;) {
        const int64_t begin = column, end = gemm::panel_at(p, column).end;
        for (; column < end; column += columns)
            for (int64_t b = first; b < last; b++) {
                const int64_t channel = b * each, count = std::min(each, p.t - channel);
                const Dwords x = step_of<mode == gemm::Mode::pairs>(c, column / columns, channel, count);
                uint32_t* to = p.packed + gemm::place(p, begin, end, b) + (column - begin) / columns * each;
                std::memcpy(to, &x, each * sizeof *to);
            }
    }
}
void pack(const gemm::Product& p, int64_t first, int64_t last) {
    p.mode == gemm::Mode::pairs ? pack_steps<gemm::Mode::pairs>(p, first, last)
                                : pack_steps<gemm::Mode::floats>(p, first, last);
}

// What is behind the last of `count` channels is not to be read.
void turn(const Channels& c, int64_t count, int64_t first, int64_t last, uint32_t* rows) {
    for (int64_t channel = first * tile_rows; channel < std::min(count, last * tile_rows); channel += tile_rows)
        for (int64_t step = 0; step < c.steps; step += 8) {
            gemm::Eight low[8], high[8];
            for (int64_t i = 0; i < 8; i++) {
                const Dwords x = step_of<true>(c, step + i, channel, count - channel);
                std::memcpy(&low[i], &x, sizeof low[i]);
                std::memcpy(&high[i], reinterpret_cast<const uint32_t*>(&x) + 8, sizeof high[i]);
            }
            gemm::transpose(low), gemm::transpose(high);
            for (int64_t i = 0; i < tile_rows; i++)
                std::memcpy(rows + (channel + i) * c.steps + step, i < 8 ? &low[i] : &high[i - 8], sizeof low[0]);
        }
}

#if defined(__AVX512BF16__)
constexpr bool has_pairs = true;
#else
constexpr bool has_pairs = false;
#endif

}  // namespace

const Kernels PTQ_LEVEL{has_pairs, arrange, unpack, pack, turn};

}  // namespace ptq::gram
