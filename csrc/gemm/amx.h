// Many tokens on the matrix units of x86 (AMX): panels.h for integers and pairs, included by panels_amx.cpp alone.
//
// A unit's tile of x is sixteen tokens by sixteen steps, its tile of a panel sixteen steps by sixteen rows: as panels
// have them. One instruction adds their product to sixteen tokens by sixteen rows of sums, in sixteen cycles. Where a
// group ends, sums leave the tiles through memory, and are scaled while the next group is multiplied.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "gemm/panels_steps.h"

namespace ptq::gemm {
namespace {

constexpr int64_t tile_tokens = 16, tile_steps = 16;
constexpr int64_t tile_numbers = tile_tokens * tile_rows;  // of sums

template <Mode mode>
using Sum = std::conditional_t<mode == Mode::quads, SignedInts, Lanes>;

// Steps of a tile: half of sixteen where groups are not whole tiles.
int64_t depth_of(const Product& p) {
    const int64_t columns = tile_steps * columns_of(p.mode);
    return p.w.columns % columns || (p.w.groups > 1 && p.w.group_columns % columns) ? tile_steps / 2 : tile_steps;
}

// --- x ---------------------------------------------------------------------------------------------------------------

// A token in the tiles of x: [panel, block of tokens, tile, token, step].
template <class Write>
void pack_token(const Product& p, int64_t b, int64_t j, const Write& write) {
    const int64_t depth = depth_of(p), each = columns_of(p.mode);
    for (int64_t column = 0; column < p.w.columns;) {
        const int64_t end = panel_at(p, column).end;
        uint32_t* to = p.packed + place(p, column, end, b) + j * depth;
        for (; column < end; column += depth * each, to += tile_tokens * depth)
            for (int64_t i = 0; i < depth; i += 8) write(to + i, column + i * each);
    }
}

// The sums of a token over the groups, times `byte_offset` and -1.
void pack_offsets(const Panels& w, const int8_t* q, int32_t* offset) {
    for (int64_t g = 0; g < w.groups; g++, offset += tile_tokens) {
        Eight sum{};
        const int64_t end = std::min(w.columns, (g + 1) * w.group_columns);
        for (int64_t column = g * w.group_columns; column < end; column += 32)
            sum = (Eight)_mm256_dpbusd_epi32((__m256i)sum, _mm256_set1_epi8(1), load_vector<__m256i>(q + column));
        uint32_t total = 0;
        for (int i = 0; i < 8; i++) total += sum[i];
        *offset = -w.byte_offset * static_cast<int32_t>(total);
    }
}

void pack(const Product& p, int64_t first, int64_t last) {
    std::vector<int8_t> spare(p.mode == Mode::quads ? p.w.columns : 0);
    for (int64_t i = first * tile_tokens; i < last * tile_tokens; i++) {
        const int64_t b = i / tile_tokens, j = i % tile_tokens;
        if (p.mode == Mode::quads) {
            const int8_t* q = row_of(p.from, i, p.w.columns, spare.data());
            pack_token(p, b, j, [&](uint32_t* to, int64_t column) { std::memcpy(to, q + column, 32); });
            pack_offsets(p.w, q, p.offset + b * p.w.groups * tile_tokens + j);
        } else {
            pack_token(p, b, j, [&](uint32_t* to, int64_t column) {
                const Eight steps = eight_steps<Mode::pairs>(p, i, column);
                std::memcpy(to, &steps, sizeof steps);
            });
        }
    }
}

// --- tiles -----------------------------------------------------------------------------------------------------------

// The tiles of this thread, as long as it lives: 0 to 2 are sums, 4 is of x, 5 to 7 of a panel. Then as they were
// found, for torch uses them, too.
class Tiles {
  public:
    explicit Tiles(int64_t depth) {
        _tile_storeconfig(&found);
        Config wanted{1, 0, {}, {}, {}};
        for (int i : {0, 1, 2, 4, 5, 6, 7}) wanted.bytes[i] = 64, wanted.rows[i] = 16;
        wanted.bytes[4] = static_cast<uint16_t>(4 * depth);
        for (int i : {5, 6, 7}) wanted.rows[i] = static_cast<uint8_t>(depth);
        load(wanted);
    }
    ~Tiles() { found.palette ? load(found) : _tile_release(); }
    Tiles(const Tiles&) = delete;

  private:
    struct alignas(64) Config {
        uint8_t palette, row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    static void load(const Config& config) {
        asm volatile("" ::"r"(&config) : "memory");  // the compiler knows of its first bytes alone
        _tile_loadconfig(&config);
    }
    Config found;
};

// Sums += a tile of x times some row tiles of a panel. The numbers of tiles are part of the instructions.
template <Mode mode, int tiles>
PTQ_INLINE void multiply_tiles(const uint32_t* x, int64_t depth, const int32_t* panel) {
    constexpr int64_t step = tiles * tile_rows * 4;
#define PTQ_MULTIPLY(sum, weights, r)                                       \
    if constexpr (r < tiles) {                                              \
        _tile_loadd(weights, panel + r * tile_rows, step);                  \
        if constexpr (mode == Mode::quads) _tile_dpbsud(sum, 4, weights);   \
        if constexpr (mode == Mode::pairs) _tile_dpbf16ps(sum, 4, weights); \
    }
    _tile_loadd(4, x, 4 * depth);
    PTQ_MULTIPLY(0, 5, 0)
    PTQ_MULTIPLY(1, 6, 1)
    PTQ_MULTIPLY(2, 7, 2)
#undef PTQ_MULTIPLY
}

// Sums from memory, to memory [tile, token, row], and zeros.
template <int tiles>
PTQ_INLINE void load_sums(const int32_t* from) {
    _tile_loadd(0, from, 64);
    if constexpr (tiles > 1) _tile_loadd(1, from + tile_numbers, 64);
    if constexpr (tiles > 2) _tile_loadd(2, from + 2 * tile_numbers, 64);
}
template <int tiles>
PTQ_INLINE void store_sums(int32_t* to) {
    _tile_stored(0, to, 64);
    if constexpr (tiles > 1) _tile_stored(1, to + tile_numbers, 64);
    if constexpr (tiles > 2) _tile_stored(2, to + 2 * tile_numbers, 64);
}
template <int tiles>
PTQ_INLINE void clear_sums() {
    _tile_zero(0);
    if constexpr (tiles > 1) _tile_zero(1);
    if constexpr (tiles > 2) _tile_zero(2);
}

// --- groups ----------------------------------------------------------------------------------------------------------

// The sums of a group, to be scaled and added to the totals.
struct Group {
    const int32_t* sums;  // [tile, token, row]
    const float* scale;   // [tile, row]
    const uint8_t* zero;  // [tile, `zero_step`], or null
    int64_t zero_step;
    const int32_t* offset;        // [token], integers only
    float* total;                 // [token, tile, row]
    int64_t token = tile_tokens;  // the next one
};

template <Mode mode, int tiles>
PTQ_INLINE void add_tokens(Group& g, int64_t tokens) {
    for (const int64_t end = std::min(tile_tokens, g.token + tokens); g.token < end; g.token++)
#pragma GCC unroll 3
        for (int r = 0; r < tiles; r++) {
            const auto sum = load_vector<Sum<mode>>(g.sums + r * tile_numbers + g.token * tile_rows);
            float* total = g.total + (g.token * tiles + r) * tile_rows;
            const Lanes scale = load(g.scale + r * tile_rows);
            if constexpr (mode == Mode::quads) {
                SignedInts offset = SignedInts{} + g.offset[g.token];
                if (g.zero) offset *= integer_tiled::load_zero(g.zero + r * g.zero_step);
                store(total, scaled(load(total), scale, sum + offset));
            } else {
                store(total, fma(scale, sum, load(total)));
            }
        }
}

// A block of tokens and the columns of a panel: whole groups, or a part of one.
template <Mode mode, int tiles>
void multiply_block(const Block& b, int64_t depth, int32_t* sums) {
    const int64_t count = b.blocks * column_step / columns_of(mode) / depth, each = (tile_tokens + count - 1) / count;
    const auto* panel = reinterpret_cast<const int32_t*>(b.codes);
    const uint32_t* x = b.x;
    Group before{};
    for (int64_t g = 0; g < std::max(b.groups, int64_t{1}); g++) {
        b.begins ? clear_sums<tiles>() : load_sums<tiles>(b.open);
        for (int64_t i = 0; i < count; i++, x += tile_tokens * depth, panel += depth * tiles * tile_rows) {
            b.ahead->next();
            multiply_tiles<mode, tiles>(x, depth, panel);
            add_tokens<mode, tiles>(before, each);
        }
        if (!b.ends) return store_sums<tiles>(b.open);
        int32_t* const to = sums + g % 2 * tiles * tile_numbers;
        store_sums<tiles>(to);
        before = {to,
                  b.scale + g * tiles * tile_rows,
                  b.zero ? b.zero + g * tile_rows : nullptr,
                  b.zero_step,
                  b.offset + g * b.offset_step,
                  b.total,
                  0};
    }
    add_tokens<mode, tiles>(before, tile_tokens);
}

// --- a strip ---------------------------------------------------------------------------------------------------------

struct Scratch {
    int32_t* panel;  // [panel_steps, panel_tiles, 16]
    int32_t* sums;   // [2, panel_tiles, 16, 16]
    int32_t* open;   // [block of tokens, panel_tiles, 16, 16]: of a group that began in the panel before
    float* total;    // [tokens, panel_tiles, 16]
    float* scale;    // [groups, panel_tiles, 16]
};

// Row tiles and tokens of y.
struct Part {
    int64_t tile, first, last;
};

template <Mode mode, int tiles>
void multiply_panel(const Product& p, const Scratch& scratch, const Part& part, const Columns& c, Ahead& ahead) {
    const auto [tile, first, last] = part;
    const Panels& w = p.w;
    const Results results{p.token_scale, p.bias, p.out, p.out_type, p.t, w.n};
    const int64_t group = c.column / w.group_columns, depth = depth_of(p);
    Block b{};
    c.describe(b);
    b.codes = reinterpret_cast<const uint8_t*>(scratch.panel);
    b.x = p.packed + place(p, c.column, c.end, first / tile_tokens);
    b.x_step = (c.end - c.column) / columns_of(mode) * tile_tokens;
    b.scale = scratch.scale + group * tiles * tile_rows;
    b.zero_step = w.groups * tile_rows;
    b.zero = w.zero ? w.zero + tile * b.zero_step + group * tile_rows : nullptr;
    b.offset = p.offset + (first / tile_tokens * w.groups + group) * tile_tokens, b.offset_step = tile_tokens;
    b.total = scratch.total, b.open = scratch.open, b.ahead = &ahead;
    const bool done = c.end == c.all;
    for (int64_t t = first; t < last; t += tile_tokens) {
        if (done) fetch_results<tiles>(results, tile, t, tile_tokens);
        multiply_block<mode, tiles>(b, depth, scratch.sums);
        if (done) finish<tiles>(results, b.total, nullptr, tile, t, std::min(tile_tokens, last - t));
        b.x += b.x_step, b.offset += w.groups * tile_tokens;
        b.total += tiles * tile_numbers, b.open += tiles * tile_numbers;
    }
}

// All of y for some row tiles and tokens. The strip that comes next is fetched meanwhile.
template <Mode mode, int tiles>
void multiply_strip(const Product& p, const Run& run, const Scratch& scratch, const Part& part) {
    const Panels& w = p.w;
    const int64_t blocks = (part.last - part.first + tile_tokens - 1) / tile_tokens;
    load_scales<tiles>(w.scale + part.tile * w.groups * tile_rows, w.groups, scratch.scale);
    std::memset(scratch.total, 0, blocks * tiles * tile_numbers * sizeof(float));
    for (int64_t column = 0; column < w.columns;) {
        const Columns panel = panel_at(p, column);
        w.unpack(w.weight, part.tile, tiles, column, panel.end, scratch.panel);
        column = panel.end;
        const uint8_t* next =
            w.codes + (column == w.columns ? run.likely() % w.strips() * panel_tiles * w.tile_bytes
                                           : part.tile * w.tile_bytes + column / column_step * w.step_bytes);
        const int64_t bytes = (panel.end - panel.column) / column_step * w.step_bytes;
        const int64_t steps = (panel.end - panel.column) / columns_of(mode) / depth_of(p) * blocks;
        Ahead ahead = Ahead::of(next, tiles, w.tile_bytes, bytes, steps);
        multiply_panel<mode, tiles>(p, scratch, part, panel, ahead);
    }
}

template <Mode mode>
void multiply_of(const Product& p, Units& units) {
    const int64_t row_tiles = (p.w.n + tile_rows - 1) / tile_rows, strips = p.w.strips();
    const int64_t panel = panel_steps * panel_tiles * tile_rows, sums = 2 * panel_tiles * tile_numbers;
    const int64_t outputs = p.tokens * panel_tiles * tile_rows;
    const int64_t count = panel + sums + 2 * outputs + p.w.groups * panel_tiles * tile_rows;
    auto* memory = static_cast<int32_t*>(::operator new(4 * count, std::align_val_t{64}));
    int32_t* const open = memory + panel + sums;
    auto* numbers = reinterpret_cast<float*>(open + outputs);
    const Scratch scratch{memory, memory + panel, open, numbers, numbers + outputs};
    {
        const Tiles config(depth_of(p));
        for (Run run{units}; run.next();) {
            const int64_t from = run.unit / strips * p.tokens, to = std::min(p.t, from + p.tokens);
            const int64_t tile = run.unit % strips * panel_tiles;
            constexpr decltype(&multiply_strip<mode, 1>) of[] = {multiply_strip<mode, 1>, multiply_strip<mode, 2>,
                                                                 multiply_strip<mode, 3>};
            of[std::min(panel_tiles, row_tiles - tile) - 1](p, run, scratch, {tile, from, to});
        }
    }
    ::operator delete(memory, std::align_val_t{64});
}

void multiply(const Product& p, Units& units) {
    p.mode == Mode::quads ? multiply_of<Mode::quads>(p, units) : multiply_of<Mode::pairs>(p, units);
}

}  // namespace
}  // namespace ptq::gemm
