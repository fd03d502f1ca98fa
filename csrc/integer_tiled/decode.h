// The kernels for few tokens, of one level: included after PTQ_LEVEL, the name of its table, is defined.
// Sixteen rows lie in the sixteen lanes of a vector; a row tile is read once, for up to four tokens at a time.
#include "integer/lanes.h"
#include "integer_tiled/kernels.h"
#include "integer_tiled/layout.h"

namespace ptq::integer_tiled {
namespace {

using integer::fill;
using integer::fma;
using integer::Lanes;
using integer::SignedInts;

constexpr int64_t ahead = 4096;           // bytes that are fetched before they are needed: measured on Zen 5
constexpr int64_t segment_blocks = 2048;  // 65536 columns: 255 * 128 * 65536 is below 2^31

inline void fetch(const uint8_t* block, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(block + ahead + i, 0, 3);
}

inline int32_t load_int(const int8_t* from) {
    int32_t x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// acc + the products of four codes of each row with four activations. `wide`: codes may have eight bits.
template <bool wide>
inline SignedInts dot(SignedInts acc, Dwords codes, int32_t activations) {
#if defined(__AVX512VNNI__)
    return (SignedInts)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(activations));
#elif defined(__AVX512BW__)
    const __m512i q = _mm512_set1_epi32(activations), c = (__m512i)codes, ones = _mm512_set1_epi16(1);
    if constexpr (!wide) {  // 2 * 127 * 128 fits into the int16 sums
        return acc + (SignedInts)_mm512_madd_epi16(_mm512_maddubs_epi16(c, q), ones);
    } else {
        const __m512i mask = _mm512_set1_epi8(15), high = _mm512_and_si512(_mm512_srli_epi16(c, 4), mask);
        const __m512i low = _mm512_maddubs_epi16(_mm512_and_si512(c, mask), q);
        return acc + (SignedInts)_mm512_madd_epi16(low, ones) +
               (SignedInts)_mm512_madd_epi16(_mm512_maddubs_epi16(high, q), _mm512_set1_epi16(16));
    }
#elif defined(__AVX2__)
    const __m256i q = _mm256_set1_epi32(activations), ones = _mm256_set1_epi16(1);
    __m256i c[2], sum[2];
    std::memcpy(c, &codes, sizeof c);
    for (int h = 0; h < 2; h++) {
        if constexpr (!wide) {
            sum[h] = _mm256_madd_epi16(_mm256_maddubs_epi16(c[h], q), ones);
        } else {
            const __m256i mask = _mm256_set1_epi8(15), high = _mm256_and_si256(_mm256_srli_epi16(c[h], 4), mask);
            const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(c[h], mask), q);
            sum[h] = _mm256_add_epi32(_mm256_madd_epi16(low, ones),
                                      _mm256_madd_epi16(_mm256_maddubs_epi16(high, q), _mm256_set1_epi16(16)));
        }
    }
    SignedInts total;
    std::memcpy(&total, sum, sizeof total);
    return acc + total;
#else
    for (int j = 0; j < 4; j++) {
        const int32_t q = static_cast<int8_t>(static_cast<uint32_t>(activations) >> 8 * j);
        acc += (SignedInts)(codes >> 8 * j & 255u) * q;
    }
    return acc;
#endif
}

// --- results
// ----------------------------------------------------------------------------------------------------------

typedef uint16_t Words __attribute__((vector_size(32)));

// Scales (bfloat16) and zeros of the rows of a tile. (gcc 12 takes `__builtin_convertvector` of bytes from memory apart
// into scalars.)
inline Lanes load_scale(const uint16_t* from) {
#if defined(__AVX512F__)
    __m256i words;
    std::memcpy(&words, from, sizeof words);
    return (Lanes)((SignedInts)_mm512_maskz_cvtepu16_epi32(0xffff, words) << 16);
#else
    Dwords x;
    for (int r = 0; r < tile_rows; r++) x[r] = static_cast<uint32_t>(from[r]) << 16;
    return (Lanes)x;
#endif
}
inline SignedInts load_zero(const uint8_t* from) {
#if defined(__AVX512F__)
    __m128i bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return (SignedInts)_mm512_maskz_cvtepu8_epi32(0xffff, bytes);
#else
    SignedInts x;
    for (int r = 0; r < tile_rows; r++) x[r] = from[r];
    return x;
#endif
}

// The first `count` of sixteen results, from element `at` on.
inline void store_result(void* out, Number type, int64_t at, Lanes y, int64_t count) {
    if (type == Number::float32) {
        if (count == tile_rows) return integer::store(static_cast<float*>(out) + at, y);
        std::memcpy(static_cast<float*>(out) + at, &y, count * sizeof(float));
        return;
    }
    const Dwords bits = (Dwords)y, nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const Words words = __builtin_convertvector(y == y ? nearest : Dwords{} + 0x7fc0u, Words);
    std::memcpy(static_cast<uint16_t*>(out) + at, &words, count * sizeof(uint16_t));
}

inline Lanes load_bias(const float* bias, int64_t row, int64_t count) {
    return bias ? integer::load(bias + row, count) : Lanes{};
}

// --- quantised tokens
// -------------------------------------------------------------------------------------------------

void sums(const Sums& p, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        for (int64_t g = 0; g < p.groups; g++) {
            const int8_t* q = p.q + t * p.q_stride + g * p.size;
            int32_t sum = 0;
            for (int64_t i = 0; i < p.size; i++) sum += q[i];
            p.sums[t * p.groups + g] = sum;
        }
}

// The integers of `blocks` super-blocks.
template <int bits, int tokens>
inline void integers(const uint8_t* block, int64_t blocks, const int8_t* q, int64_t stride, SignedInts total[tokens]) {
    constexpr int chains = tokens > 2 ? 2 : 4;  // independent sums hide the latency of `dot`
    SignedInts acc[tokens][chains] = {};
    for (int64_t b = 0; b < blocks; b++, block += block_bytes(bits), q += block_columns) {
        fetch(block, block_bytes(bits));
        Dwords codes[quads];
        unpack_block<bits>(block, codes);
#pragma GCC unroll 8
        for (int i = 0; i < quads; i++)
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++)
                acc[t][i % chains] = dot<(bits > 7)>(acc[t][i % chains], codes[i], load_int(q + t * stride + 4 * i));
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        total[t] = acc[t][0];
        for (int c = 1; c < chains; c++) total[t] += acc[t][c];
    }
}

// A group of more than 65536 columns: its integers may need 64 bits.
template <int bits>
Lanes long_group(const Weight& w, const uint8_t* block, const int8_t* q, SignedInts zero, int64_t sum) {
    int64_t total[tile_rows];
    for (int r = 0; r < tile_rows; r++) total[r] = -zero[r] * sum;
    for (int64_t b = 0; b < w.group_blocks; b += segment_blocks) {
        SignedInts part[1];
        integers<bits, 1>(block + b * block_bytes(bits), std::min(segment_blocks, w.group_blocks - b),
                          q + b * block_columns, 0, part);
        for (int r = 0; r < tile_rows; r++) total[r] += part[0][r];
    }
    Lanes result;
    for (int r = 0; r < tile_rows; r++) result[r] = static_cast<float>(total[r]);
    return result;
}

template <int bits, int tokens>
void quantized_tile(const Quantized& p, int64_t tile, int64_t from) {
    const Weight& w = p.w;
    const uint8_t* block = w.tiles + tile * w.groups * w.group_blocks * block_bytes(bits);
    const int8_t* q = p.q + from * p.q_stride;
    Lanes y[tokens] = {};
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t at = tile * w.groups + g;
        const Lanes scale = load_scale(w.scale + at * tile_rows);
        const SignedInts zero = w.zero ? load_zero(w.zero + at * tile_rows) : SignedInts{} + (1 << (bits - 1));
        const int32_t* sum = p.sums + from * w.groups + g;
        if (w.group_blocks > segment_blocks) [[unlikely]] {
            for (int t = 0; t < tokens; t++)
                y[t] += scale * long_group<bits>(w, block, q + t * p.q_stride, zero, sum[t * w.groups]);
        } else {
            SignedInts total[tokens];
            integers<bits, tokens>(block, w.group_blocks, q, p.q_stride, total);
            for (int t = 0; t < tokens; t++)
                y[t] += scale * __builtin_convertvector(total[t] - zero * sum[t * w.groups], Lanes);
        }
        block += w.group_blocks * block_bytes(bits);
        q += w.group_blocks * block_columns;
    }
    const int64_t row = tile * tile_rows, count = std::min(tile_rows, w.n - row);
    const Lanes bias = load_bias(p.bias, row, count);
    for (int t = 0; t < tokens; t++) {
        Lanes result = y[t] * p.q_scale[from + t];
        if (p.bias) result += bias;
        store_result(p.out, p.out_type, (from + t) * w.n + row, result, count);
    }
}

// Calls kernel.operator()<tokens>(tile, token) for tiles [first, last) and all tokens, four at a time.
template <class Kernel>
inline void over_tokens(int64_t tokens, int64_t first, int64_t last, const Kernel& kernel) {
    for (int64_t tile = first; tile < last; tile++) {
        int64_t t = 0;
        for (; t + 4 <= tokens; t += 4) kernel.template operator()<4>(tile, t);
        if (t + 2 <= tokens) kernel.template operator()<2>(tile, t), t += 2;
        if (t < tokens) kernel.template operator()<1>(tile, t);
    }
}

template <int bits>
void quantized_of(const Quantized& p, int64_t first, int64_t last) {
    over_tokens(p.t, first, last,
                [&]<int tokens>(int64_t tile, int64_t t) { quantized_tile<bits, tokens>(p, tile, t); });
}

void quantized(const Quantized& p, int64_t first, int64_t last) {
    constexpr decltype(&quantized_of<2>) of[] = {quantized_of<2>, quantized_of<3>, quantized_of<4>, quantized_of<5>,
                                                 quantized_of<6>, quantized_of<7>, quantized_of<8>};
    of[p.w.bits - 2](p, first, last);
}

}  // namespace
}  // namespace ptq::integer_tiled

#include "integer_tiled/decode_floats.h"

namespace ptq::integer_tiled {

const Kernels PTQ_LEVEL{sums, quantized, spread, floats};

}  // namespace ptq::integer_tiled
