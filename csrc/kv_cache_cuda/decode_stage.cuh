// What a warp of the decode kernel (decode.cuh) asks memory for: the codes and scales of 16 tokens at a time, some
// stages ahead; and the queries. A lane copies into shared memory exactly those codes that it will read itself, so that
// no lane waits for another. No torch here.
#pragma once

#include "kv_cache_cuda/rooms.cuh"

namespace ptq::kv_cache_cuda {

constexpr int decode_warps = 4;

// The blocks of 16 tokens of this warp: every (decode_warps * splits)th of the context, so that all warps have work
// where a mask hides the end of it. Those that nobody sees are left out.
class Blocks {
    int count = 0;  // taken so far
    uint32_t seen = 0, anybody = 0;
    static constexpr int at_once = 4;

    PTQ_DEVICE int block(const Attend& p, const BlockRows& rows, int i) const {
        return ((count + i) * p.splits + rows.index) * decode_warps + warp();
    }
    // What the mask says of row `row` and tokens 2 g + j of the next blocks: bit 4 block + 2 j.
    PTQ_DEVICE uint32_t row_sees(const Attend& p, const BlockRows& rows, int row) const {
        uint32_t found[at_once][2], bits = 0;
        const uint8_t* mask = p.mask + rows.head / p.kv_heads * p.mask_batch + row % p.tokens * int64_t{p.length};
        PTQ_UNROLL
        for (int i = 0; i < at_once; i++) PTQ_UNROLL
        for (int j = 0; j < 2; j++) {  // always a load: all are on their way at once
            const int token = block(p, rows, i) * block_tokens + lane() / 4 * 2 + j;
            found[i][j] = mask[token < p.length ? token : 0] != 0;  // a bool that is true need not be 1
        }
        PTQ_UNROLL
        for (int i = 0; i < at_once; i++) bits |= (found[i][0] | found[i][1] << 2) << (4 * i);
        return bits;
    }
    PTQ_DEVICE void look(const Attend& p, const BlockRows& rows) {
        const int row = rows.first + lane() % 4 * 2;
        seen = row_sees(p, rows, row);
        seen |= (p.tokens > 1 ? row_sees(p, rows, row + 1) : seen) << 1;
        anybody = seen;
        PTQ_UNROLL
        for (int shift = 16; shift; shift /= 2) anybody |= shuffle_xor(anybody, shift);
    }

  public:
    struct Next {
        int block;      // of the context, or -1: there is no more
        uint32_t seen;  // four bits: whether row 2 t + i % 2 sees token 2 g + i / 2
    };
    PTQ_DEVICE Next next(const Attend& p, const BlockRows& rows) {
        for (;;) {
            const int at = block(p, rows, 0), token = at * block_tokens + lane() / 4 * 2;
            if (at * block_tokens >= p.length) return {-1, 0};
            if (p.mask && count % at_once == 0) look(p, rows);
            const bool taken = !p.mask || anybody & 15;
            const uint32_t there = (token < p.length ? 3 : 0) | (token + 1 < p.length ? 12 : 0);
            const Next found{at, p.mask ? seen & there : there};
            count++, seen >>= 4, anybody >>= 4;
            if (taken) return found;
        }
    }
};

// One stage in shared memory. Lanes are 4 g + t.
//   keys    tokens 2 g and 2 g + 1 of words 4 step + t
//   values  tokens 4 t .. 4 t + 3 of words 8 set + g
// and of the narrow planes what belongs to them; the scales and minima of tokens 2 g and 2 g + 1; what is seen of them.
template <int bits, int most_d>
struct Stage {
    static constexpr int width = wide_plane(bits);
    static constexpr bool has_narrow = width < bits;
    static constexpr int steps = (most_d * width / 32 + 3) / 4, sets = (most_d * width / 32 + 7) / 8;
    static constexpr int values_at = 32 * 8 * steps * (1 + has_narrow);
    static constexpr int scales_at = values_at + 32 * 16 * sets * (1 + has_narrow);
    static constexpr int seen_at = scales_at + 32 * 16, bytes = seen_at + 32 * 4;
    static constexpr int stages = bytes <= 3072 ? 4 : bytes <= 6144 ? 3 : 2;

    PTQ_DEVICE static uint8_t* key(uint8_t* stage, int step, bool narrow) {
        return stage + ((narrow * steps + step) * 32 + lane()) * 8;
    }
    PTQ_DEVICE static uint8_t* value(uint8_t* stage, int set, bool narrow) {
        return stage + values_at + ((narrow * sets + set) * 32 + lane()) * 16;
    }
    PTQ_DEVICE static uint8_t* scales(uint8_t* stage) { return stage + scales_at + lane() * 16; }
    PTQ_DEVICE static uint32_t* seen(uint8_t* stage) { return reinterpret_cast<uint32_t*>(stage + seen_at) + lane(); }

    // Steps and sets lie a constant apart: no addresses to compute.
    PTQ_DEVICE static void ask_keys(const Side& k, const uint32_t* codes, uint8_t* stage, int token) {
        const int words = plane_words(k.d, width), t = lane() % 4;
        const uint32_t *wide = codes + k.at(t, token), *narrow = codes + k.at(words + t / 2, token);
        keep(wide);
        if (has_narrow) keep(narrow);
        PTQ_UNROLL
        for (int step = 0; step < steps; step++) {
            if (4 * step + t >= words) continue;
            copy_async<8>(key(stage, step, false), wide + step * 4 * block_tokens);
            if (has_narrow) copy_async<8>(key(stage, step, true), narrow + step * 2 * block_tokens);
        }
    }
    PTQ_DEVICE static void ask_values(const Side& v, const uint32_t* codes, uint8_t* stage, int token) {
        const int words = plane_words(v.d, width), g = lane() / 4;
        const uint32_t *wide = codes + v.at(g, token), *narrow = codes + v.at(words + g / 2, token);
        keep(wide);
        if (has_narrow) keep(narrow);
        PTQ_UNROLL
        for (int set = 0; set < sets; set++) {
            if (8 * set + g >= words) continue;
            copy_async<16>(value(stage, set, false), wide + set * 8 * chunk);
            if (has_narrow) copy_async<16>(value(stage, set, true), narrow + set * 4 * chunk);
        }
    }
    PTQ_DEVICE static void ask(const Attend& p, int head, const Blocks::Next& next, uint8_t* stage) {
        const int index = next.block / chunk_blocks, token = next.block % chunk_blocks * block_tokens;
        const int pair = token + 2 * (lane() / 4);
        const Side k{p.k.codes, p.k.scales, p.k.heads, p.k.d, bits, false};  // the compiler knows the bits
        const Side v{p.v.codes, p.v.scales, p.v.heads, p.v.d, bits, true};
        ask_keys(k, k.codes_of(index, head), stage, pair);
        const uint16_t *key_scales = k.scales_of(index, head) + pair, *value_scales = v.scales_of(index, head) + pair;
        keep(key_scales);
        keep(value_scales);
        PTQ_UNROLL
        for (int i = 0; i < 2; i++) {
            copy_async<4>(scales(stage) + 4 * i, key_scales + i * chunk);
            copy_async<4>(scales(stage) + 8 + 4 * i, value_scales + i * chunk);
        }
        ask_values(v, v.codes_of(index, head), stage, token + 4 * (lane() % 4));
        *seen(stage) = next.seen;
    }
};

// Eight queries as B operands in shared memory: [part, step, lane, pair of the lane's word].
template <int bits, int most_d, int parts>
struct Queries {
    static constexpr int half = 16 / wide_plane(bits), pairs = most_d / 2, each = most_d / 64;
    static constexpr int bytes = parts * rows_at_once * pairs * 4;
    using T = std::conditional_t<parts == 1, Bfloat16, Half>;
    T x[rows_at_once / decode_warps][each][2];

    PTQ_DEVICE Queries(const Attend& p, const BlockRows& rows) {
        PTQ_UNROLL
        for (int r = 0; r < rows_at_once / decode_warps; r++) PTQ_UNROLL
        for (int i = 0; i < each; i++) PTQ_UNROLL
        for (int j = 0; j < 2; j++) {
            const int row = warp() + r * decode_warps, pair = lane() + 32 * i;
            const int c = pair / half * 2 * half + pair % half + j * half;  // a pair has a channel of either half
            const bool is_there = row < rows.count && c < p.k.d;
            x[r][i][j] = static_cast<const T*>(p.q)[is_there ? rows.query(p, row) + c : 0];
            if (!is_there) x[r][i][j] = T{0};
        }
    }
    PTQ_DEVICE void give(uint32_t* to) const {
        PTQ_UNROLL
        for (int r = 0; r < rows_at_once / decode_warps; r++) PTQ_UNROLL
        for (int i = 0; i < each; i++) {
            const int row = warp() + r * decode_warps, pair = lane() + 32 * i, step = pair / (4 * half);
            float low = widen(x[r][i][0]), high = widen(x[r][i][1]);
            PTQ_UNROLL
            for (int part = 0; part < parts; part++) {
                const uint32_t both = take_part(low) | static_cast<uint32_t>(take_part(high)) << 16;
                to[(part * pairs + step * 4 * half) * 8 + row * 4 * half + pair % (4 * half)] = both;
            }
        }
    }
    // B of product `e` / 2 of a step.
    PTQ_DEVICE static Words2 operand(const uint32_t* queries, int part, int step, int e) {
        return load<Words2>(queries + (part * pairs + step * 4 * half) * 8 + lane() * half + e);
    }
};

}  // namespace ptq::kv_cache_cuda
