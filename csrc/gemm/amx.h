// Many tokens on the matrix units of x86 (AMX): panels.h for integers and pairs, included by panels_amx.cpp alone.
//
// A unit's tile of x is sixteen tokens by sixteen steps, its tile of a panel sixteen steps by sixteen rows: as panels
// have them. One instruction adds their product to sixteen tokens by sixteen rows of sums, in sixteen cycles. Where a
// group ends, sums leave the tiles through memory, and are scaled while later groups are multiplied.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "gemm/amx_tiles.h"
#include "gemm/panels_steps.h"

namespace ptq::gemm {
namespace {

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

// Minus the sums of a token over the groups.
void pack_offsets(const Panels& w, const int8_t* q, int32_t* offset) {
    for (int64_t g = 0; g < w.groups; g++, offset += tile_tokens) {
        Eight sum{};
        const int64_t end = std::min(w.columns, (g + 1) * w.group_columns);
        for (int64_t column = g * w.group_columns; column < end; column += 32)
            sum = (Eight)_mm256_dpbusd_epi32((__m256i)sum, _mm256_set1_epi8(1), load_vector<__m256i>(q + column));
        uint32_t total = 0;
        for (int i = 0; i < 8; i++) total += sum[i];
        *offset = -static_cast<int32_t>(total);
    }
}

void pack(const Product& p, int64_t first, int64_t last) {
    std::vector<int8_t> spare(p.mode == Mode::quads ? p.w.columns : 0);
    for (int64_t i = first * tile_tokens; i < last * tile_tokens; i++) {
        const int64_t b = i / tile_tokens, j = i % tile_tokens;
        if (p.rows) {
            const std::vector<uint32_t> none(i < p.t ? 0 : p.row_steps);
            const uint32_t* row = i < p.t ? p.rows + i * p.row_steps : none.data();
            pack_token(p, b, j,
                       [&](uint32_t* to, int64_t column) { std::memcpy(to, row + column / columns_of(p.mode), 32); });
        } else if (p.mode == Mode::quads) {
            const int8_t* q = row_of(p.from, i, p.w.columns, spare.data());
            pack_token(p, b, j, [&](uint32_t* to, int64_t column) { std::memcpy(to, q + column, 32); });
            if (p.w.zero) pack_offsets(p.w, q, p.offset + b * p.w.groups * tile_tokens + j);
        } else {
            pack_token(p, b, j, [&](uint32_t* to, int64_t column) {
                const Eight steps = eight_steps<Mode::pairs>(p, i, column);
                std::memcpy(to, &steps, sizeof steps);
            });
        }
    }
}

// --- groups ----------------------------------------------------------------------------------------------------------

// The sums of a group, to be scaled and added to the totals of a block of tokens.
struct Group {
    const int32_t* sums;    // [tile, token, row]
    const float* scale;     // [tile, row]
    const uint8_t* zero;    // [tile, `zero_step`], or null
    const int32_t* offset;  // [token]: minus the sum of its integers, if there are zeros
    float* total;           // [token, tile, row]
    int64_t first, tokens;  // of the block
    bool begins, ends;      // the totals; results follow
    int64_t token;          // the next one
};

// What all groups of a panel have in common.
struct Common {
    const Product& p;
    int64_t tile, zero_step;  // row tile, to the zeros of the next one
};

// The tokens [token, end). Everything is read before the loop: a compiler fears that totals overlap it.
template <Mode mode, int tiles, bool zeros>
PTQ_INLINE void add_rows(const Common& common, const Group& g, int64_t token, int64_t end) {
    const int32_t* sums = g.sums + token * tile_rows;
    const int32_t* offset = g.offset + token;
    float* total = g.total + token * tiles * tile_rows;
    Lanes scale[tiles];
    SignedInts zero[tiles];
#pragma GCC unroll 3
    for (int r = 0; r < tiles; r++) {
        scale[r] = load(g.scale + r * tile_rows);
        if constexpr (zeros) zero[r] = tiles::load_zero(g.zero + r * common.zero_step) - common.p.w.byte_offset;
    }
    for (; token < end; token++, sums += tile_rows, offset++)
#pragma GCC unroll 3
        for (int r = 0; r < tiles; r++, total += tile_rows) {
            auto sum = load_vector<Sum<mode>>(sums + r * tile_numbers);
            if constexpr (zeros) sum += zero[r] * *offset;
            if constexpr (mode == Mode::quads)
                store(total, scaled(load(total), scale[r], sum));
            else
                store(total, fma(scale[r], sum, load(total)));
        }
}

template <Mode mode, int tiles>
PTQ_INLINE void add_tokens(const Common& common, Group& g, int64_t tokens) {
    if (g.token == g.tokens) return;
    if (g.token == 0 && g.begins) std::memset(g.total, 0, tiles * tile_rows * g.tokens * sizeof(float));
    const int64_t end = std::min(g.tokens, g.token + tokens);
    if (mode == Mode::quads && g.zero)
        add_rows<mode, tiles, mode == Mode::quads>(common, g, g.token, end);
    else
        add_rows<mode, tiles, false>(common, g, g.token, end);
    g.token = end;
    if (g.token < g.tokens || !g.ends) return;
    const Product& p = common.p;
    const Results results{p.token_scale, p.bias, p.out, p.out_type, p.t, p.w.n, p.add};
    finish<tiles>(results, g.total, nullptr, common.tile, g.first, g.tokens);
}

// The two groups before the one that is multiplied: `last` is in the other set of tiles, on its way to `to`; the sums
// of the other have been in memory for long enough to be touched.
struct Before {
    Group group{}, last{};
    int32_t* to = nullptr;
};

// A group, or the part of one that is in a panel: `count` tiles deep. `open`: sums of the part before, or null.
template <Mode mode, int tiles, int set>
void multiply_group(const Common& common, const uint32_t* x, const int32_t* panel, int64_t depth, int64_t count,
                    const int32_t* open, Before& before, Ahead& ahead) {
    const int64_t each = (tile_tokens + count - 1) / count;
    open ? load_sums<tiles, set>(open) : clear_sums<tiles, set>();
    for (int64_t i = 0; i < count; i++, x += tile_tokens * depth, panel += depth * tiles * tile_rows) {
        ahead.next();
        multiply_tiles<mode, tiles, set>(x, depth, panel);
        if (i == 0 && before.to) store_sums<tiles, 1 - set>(before.to);
        add_tokens<mode, tiles>(common, before.group, each);
    }
    add_tokens<mode, tiles>(common, before.group, tile_tokens);
}

// --- strips ----------------------------------------------------------------------------------------------------------

constexpr int64_t most_strips = 8;           // that take turns with a slice
constexpr int64_t slice_bytes = 512 * 1024;  // of x, about: a quarter of the second-level cache

// Strips and tokens of y.
struct Part {
    int64_t strip, end, first, last;
};

struct Scratch {
    int32_t* panel;  // [panel_steps(p), panel_tiles, 16]
    int32_t* sums;   // [2, panel_tiles, 16, 16]
    float* scale;    // [groups of a panel, panel_tiles, 16]
    int32_t* open;   // [strip, tokens, panel_tiles, 16]: sums of a group that began in the panel before
    float* total;    // [strip, tokens, panel_tiles, 16]
};

// The scales of some groups from `group` on.
template <int tiles>
void load_scales(const Panels& w, int64_t tile, int64_t group, int64_t groups, float* to) {
    for (int64_t g = group; g < group + groups; g++)
        for (int64_t r = tile; r < tile + tiles; r++, to += tile_rows) store(to, scale_at(w, r, g));
}

// The columns of a panel, for row tiles from `tile` on and the tokens of a part.
template <Mode mode, int tiles>
void multiply_panel(const Product& p, const Scratch& scratch, const Part& part, int64_t tile, const Columns& c,
                    Ahead ahead) {
    const Panels& w = p.w;
    const Results results{p.token_scale, p.bias, p.out, p.out_type, p.t, w.n};
    const int64_t group = c.column / w.group_columns, depth = depth_of(p), first = part.first / tile_tokens;
    w.unpack(w.weight, tile, tiles, c.column, c.end, scratch.panel);
    Block b{};
    c.describe(b);
    load_scales<tiles>(w, tile, group, std::max(b.groups, int64_t{1}), scratch.scale);
    const Common common{p, tile, w.groups * tile_rows};
    const int64_t count = b.blocks * column_step / columns_of(mode) / depth, groups = std::max(b.groups, int64_t{1});
    const int64_t outputs = tiles * tile_numbers, begins = (tile / panel_tiles - part.strip) * p.tokens * panel_rows;
    const uint32_t* x = p.packed + place(p, c.column, c.end, first);
    float* total = scratch.total + begins;
    int32_t *open = scratch.open + begins, *sums = scratch.sums, *next_sums = sums + outputs;
    Before before;
    bool set = false;
    for (int64_t t = part.first; t < part.last; t += tile_tokens, open += outputs) {
        if (c.end == c.all) fetch_results<tiles>(results, tile, t, tile_tokens);
        for (int64_t g = 0; g < groups; g++, x += count * tile_tokens * depth, set = !set) {
            const auto* panel = scratch.panel + g * count * depth * tiles * tile_rows;
            (set ? multiply_group<mode, tiles, 1> : multiply_group<mode, tiles, 0>)(common, x, panel, depth, count,
                                                                                    b.begins ? nullptr : open, before,
                                                                                    ahead);
            before.group = before.last;
            before.last = {};
            before.to = b.ends ? sums : open;
            if (b.ends)
                before.last = {sums,
                               scratch.scale + g * tiles * tile_rows,
                               w.zero ? w.zero + (tile * w.groups + group + g) * tile_rows : nullptr,
                               p.offset + (t / tile_tokens * w.groups + group + g) * tile_tokens,
                               total,
                               t,
                               std::min(tile_tokens, part.last - t),
                               group + g == 0,
                               c.end == c.all && g + 1 == groups,
                               0};
            std::swap(sums, next_sums);
        }
        if (w.groups > 1) total += outputs;  // else it is written once, and lies in the first-level cache
    }
    set ? store_sums<tiles, 0>(before.to) : store_sums<tiles, 1>(before.to);
    add_tokens<mode, tiles>(common, before.group, tile_tokens);
    add_tokens<mode, tiles>(common, before.last, tile_tokens);
}

// All of y for a part. The columns go in slices, whose x stays in the second-level cache for all strips.
template <Mode mode>
void multiply_part(const Product& p, const Scratch& scratch, const Part& part) {
    const Panels& w = p.w;
    const int64_t tokens = (part.last - part.first + tile_tokens - 1) / tile_tokens * tile_tokens;
    const int64_t panels = std::max(int64_t{1}, slice_bytes / (tokens * panel_steps(p) * 4));
    const int64_t row_tiles = (w.n + tile_rows - 1) / tile_rows;
    for (int64_t begin = 0, end = 0; begin < w.columns; begin = end) {
        for (int64_t i = 0; i < panels && end < w.columns; i++) end = panel_at(p, end).end;
        for (int64_t strip = part.strip; strip < part.end; strip++)
            for (int64_t column = begin; column < end;) {
                const Columns c = panel_at(p, column);
                column = c.end;
                const int64_t tile = strip * panel_tiles, tiles = std::min(panel_tiles, row_tiles - tile);
                // What comes next is fetched meanwhile.
                const int64_t next = column < end ? strip : strip + 1 < part.end ? strip + 1 : part.strip;
                const int64_t place = column < end ? column : strip + 1 < part.end ? begin : end % w.columns;
                const int64_t bytes = (c.end - c.column) / column_step * w.step_bytes;
                const int64_t depths = (c.end - c.column) / columns_of(mode) / depth_of(p);
                const Ahead ahead =
                    Ahead::of(w.codes + next * panel_tiles * w.tile_bytes + place / column_step * w.step_bytes,
                              std::min(panel_tiles, row_tiles - next * panel_tiles), w.tile_bytes, bytes,
                              depths * tokens / tile_tokens);
                constexpr decltype(&multiply_panel<mode, 1>) of[] = {multiply_panel<mode, 1>, multiply_panel<mode, 2>,
                                                                     multiply_panel<mode, 3>};
                of[tiles - 1](p, scratch, part, tile, c, ahead);
            }
    }
}

// The strips that are not right of the diagonal for all tokens before `last`.
int64_t strips_before(const Product& p, int64_t last) {
    return p.diagonal < 0 ? p.strips() : (p.diagonal + last + panel_rows - 1) / panel_rows;
}

template <Mode mode>
void multiply_of(const Product& p, Units& units) {
    const int64_t strips = p.strips(), outputs = most_strips * p.tokens * panel_rows;
    constexpr int64_t panel = panel_vectors(mode) * tile_rows, sums = 2 * panel_tiles * tile_numbers;
    constexpr int64_t scales = panel_vectors(mode) * tile_rows * 4 / column_step;
    auto* memory =
        static_cast<int32_t*>(::operator new(4 * (panel + sums + scales + 2 * outputs), std::align_val_t{64}));
    auto* numbers = reinterpret_cast<float*>(memory + panel + sums + outputs);
    const Scratch scratch{memory, memory + panel, numbers, memory + panel + sums, numbers + scales};
    {
        const TileRegisters registers(depth_of(p), std::min(tile_tokens, p.t));
        for (int64_t first, last; units.take(first, last);)
            for (int64_t end; first < last; first = end) {
                const int64_t run = first / strips, from = run * p.tokens, to = std::min(p.t, from + p.tokens);
                end = std::min({last, first + most_strips, (run + 1) * strips});
                const int64_t needed = std::min((end - 1) % strips + 1, strips_before(p, to));
                multiply_part<mode>(p, scratch, {first % strips, needed, from, to});
            }
    }
    ::operator delete(memory, std::align_val_t{64});
}

void multiply(const Product& p, Units& units) {
    p.mode == Mode::quads ? multiply_of<Mode::quads>(p, units) : multiply_of<Mode::pairs>(p, units);
}

}  // namespace
}  // namespace ptq::gemm
