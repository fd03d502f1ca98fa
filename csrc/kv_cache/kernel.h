// The KV cache kernels of one level: included after PTQ_LEVEL, the name of its table, is defined.
#include "common/bits.h"
#include "kv_cache/attend.h"

namespace ptq::kv_cache {
namespace {

struct Grid {
    float scale, minimum;
    bool finite;
};

// kv_ops.quantize: scale and minimum of one token.
inline Grid grid(const float* x, int64_t d, int bits, float clip) {
    Lanes low{}, high{}, poison{};
    for (int64_t i = 0; i < d; i += lanes) {
        const Lanes v = load(x + i, std::min(lanes, d - i));
        low = min(low, v), high = max(high, v), poison += v * 0.0f;
    }
    float l = 0, h = 0;
    for (int i = 0; i < lanes; i++) l = std::min(l, low[i]), h = std::max(h, high[i]);
    l *= clip, h *= clip;
    const float top = static_cast<float>((1 << bits) - 1);
    const float scale = rounded_to_bfloat16(h - l < 1e-30f ? 1.0f : h / top - l / top),
                minimum = rounded_to_bfloat16(l);
    const float check = sum(poison) + scale * 0.0f + minimum * 0.0f;
    return {scale, minimum, check == 0};
}

// Codes of one token, as bytes; what lies between d and the next multiple of 32 is zero.
inline void quantize(const float* x, int64_t d, int bits, const Grid& g, uint8_t* codes) {
    std::memset(codes + d / 32 * 32, 0, 64);
    if (!g.finite) return void(std::memset(codes, 0, d));
    const Lanes inverse = fill(1 / g.scale), minimum = fill(g.minimum);
    const Lanes top = fill(static_cast<float>((1 << bits) - 1));
    for (int64_t i = 0; i < d; i += lanes) {
        const int64_t count = std::min(lanes, d - i);
        const Lanes q = (load(x + i, count) - minimum) * inverse;
        vectors::store_codes(codes + i, nearest(min(max(q, Lanes{}), top)), count);
    }
}

template <int PLANE>
void store_plane(const uint8_t* codes, int64_t d, int below, uint32_t* to, int64_t stride) {
    constexpr int fields = 32 / PLANE;
    for (int64_t c = 0; c < d; c += fields, to += stride) {
        uint32_t word = 0;
        for (int i = 0; i < fields; i++) word |= ((codes[c + i] >> below) & ((1u << PLANE) - 1)) << (i * PLANE);
        *to = word;
    }
}

void append(const Append& p, int64_t first, int64_t last) {
    const Side& to = p.to;
    const int64_t per_head = p.block_count(), count = words(to.d, to.bits);
    const int64_t stride = to.channel_major ? chunk : block_tokens;
    std::vector<uint8_t> codes(to.d + 64);
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t head = unit / per_head, block = p.first_block() + unit % per_head, index = block / blocks;
        const int64_t begin = std::max(p.start, block * block_tokens);
        const int64_t end = std::min(p.start + p.count, (block + 1) * block_tokens);
        uint32_t* words_at = to.codes_of(index, head) + block % blocks * block_tokens * (to.channel_major ? 1 : count);
        for (int64_t t = begin; t < end; t++) {
            const float* x = p.x + (head * p.count + t - p.start) * to.d;
            const Grid g = grid(x, to.d, to.bits, p.clip);
            quantize(x, to.d, to.bits, g, codes.data());
            uint32_t* word = words_at + t % block_tokens;
            if (to.bits == 8) store_plane<8>(codes.data(), to.d, 0, word, stride);
            if (to.bits == 4 || to.bits == 6) store_plane<4>(codes.data(), to.d, 0, word, stride);
            if (to.bits <= 3) store_plane<2>(codes.data(), to.d, 0, word, stride);
            word += (to.d * widest_plane(to.bits) + 31) / 32 * stride;  // the second plane
            if (to.bits == 6) store_plane<2>(codes.data(), to.d, 4, word, stride);
            if (to.bits == 3) store_plane<1>(codes.data(), to.d, 2, word, stride);
            uint16_t* scales = to.scales_of(index, head) + t % chunk;
            scales[0] = g.finite ? to_bfloat16(g.scale) : 0x7fc0;
            scales[chunk] = g.finite ? to_bfloat16(g.minimum) : 0x7fc0;
        }
    }
}

template <int BITS>
void dequantize_block(const Dequantize& p, int64_t head, int64_t block) {
    const Side& from = p.from;
    const int64_t index = block / blocks, within = block % blocks, d = from.d;
    const Words at = words_of<BITS>(from, index, head, within);
    const uint16_t* scales = from.scales_of(index, head) + within * block_tokens;
    const Lanes scale = load(scales), minimum = load(scales + chunk);
    const int64_t begin = block * block_tokens, count = std::min(block_tokens, p.length - begin);
    float* out = p.out + (head * p.length + begin) * d;
    for (int64_t c = 0; c < d; c += 4) {
        Lanes x[4];
        const Fields<BITS> fields(at, c);
        for (int i = 0; i < 4; i++) x[i] = fields.get(i) * scale + minimum;
        const int64_t width = std::min(int64_t{4}, d - c);
        for (int64_t t = 0; t < count; t++)
            for (int64_t i = 0; i < width; i++) out[t * d + c + i] = x[i][t];
    }
}

void dequantize(const Dequantize& p, int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t head = unit / p.block_count(), block = unit % p.block_count();
        with_bits<2, 3, 4, 6, 8>(p.from.bits, [&]<int bits>() { dequantize_block<bits>(p, head, block); });
    }
}

}  // namespace

const Kernels PTQ_LEVEL{append, dequantize, attend, merge};

}  // namespace ptq::kv_cache
