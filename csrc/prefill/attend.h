// The kernels of one level: included after PTQ_LEVEL, the name of its table, is defined. One pass over keys and values,
// chunk by chunk, with a running maximum (flash attention, arXiv 2205.14135).
#include <cmath>
#include <new>

#include "common/softmax.h"
#include "prefill/pack.h"
#include "prefill/products.h"

namespace ptq::prefill {
namespace {

constexpr float none = -std::numeric_limits<float>::infinity();

struct Scratch {
    uint32_t *q, *weight;           // [block, key_steps]; [block, value_steps]
    float *score, *out;             // [block, chunk]; [block, value_width]
    float *largest, *top, *factor;  // [block]: largest score before this chunk, and with it; what sums are scaled with
    Lanes* total;                   // [block]
};

// Rows [row, row + count) of a head of keys, over the batch.
struct QueryRows {
    int64_t key_head, b, head, row, count;

    QueryRows(const Attention& p, int64_t unit)
        : key_head(p.first + unit / p.blocks()),
          b(key_head / p.heads),
          head(key_head % p.heads),
          row((p.blocks() - 1 - unit % p.blocks()) * block),  // causal: the longest first
          count(std::min(block, p.rows() - row)) {}
};

template <Mode mode, Number type>
void load_queries(const Attention& p, const QueryRows& rows, const Scratch& scratch) {
    const int64_t steps = p.key_steps(), start = rows.b * p.q.batch + rows.head * p.groups * p.q.head;
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t token = (rows.row + r) / p.groups, group = (rows.row + r) % p.groups;
        const void* from = number_at(p, p.q, start + token * p.q.token + group * p.q.head);
        for (int64_t i = 0; i < steps; i += 8) {
            const gemm::Eight x = read_steps<mode, type>(from, i, p.d);
            std::memcpy(scratch.q + r * steps + i, &x, std::min(int64_t{8}, steps - i) * sizeof(uint32_t));
        }
        scratch.largest[r] = none, scratch.total[r] = Lanes{};
    }
    std::fill_n(scratch.out, block * p.value_width(), 0.0f);
}

// Whether any row sees any of the keys [at, at + keys).
bool is_seen(const Attention& p, const QueryRows& rows, int64_t at, int64_t keys) {
    if (!p.mask) return true;
    for (int64_t token = rows.row / p.groups; token <= (rows.row + rows.count - 1) / p.groups; token++) {
        const uint8_t* mask = p.mask + rows.b * p.mask_batch + token * p.mask_token + at;
        uint8_t any = 0;  // a bool that is true need not be 1
        for (int64_t s = 0; s < keys; s++) any |= mask[s];
        if (any) return true;
    }
    return false;
}

// What a row does not see gets the score `none`.
void hide(const Attention& p, const QueryRows& rows, int64_t at, int64_t keys, const Scratch& scratch) {
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t token = (rows.row + r) / p.groups;
        float* score = scratch.score + r * chunk;
        const int64_t seen = p.causal ? std::clamp(token + 1 - at, int64_t{0}, keys) : keys;
        std::fill(score + seen, score + chunk, none);
        if (!p.mask) continue;
        const uint8_t* mask = p.mask + rows.b * p.mask_batch + token * p.mask_token + at;
        for (int64_t s = 0; s < seen; s++) score[s] = mask[s] ? score[s] : none;
    }
}

// e^x for x <= 0, as precise as weights must be; 0 for what float32 has subnormal numbers alone for, whose rounding
// holds up an Intel core for a hundred cycles or more.
template <Mode mode>
inline Lanes power(Lanes x) {
#if defined(__AVX512BF16__)
    if constexpr (mode != Mode::floats) {
        // 2^y = 2^floor(y) 2^r: the second by a polynomial that is off by 4e-6, a thousandth of the rounding to
        // bfloat16
        const __m512 y = (__m512)(x * 1.44269504f), r = _mm512_maskz_reduce_ps(0xffff, y, _MM_FROUND_TO_NEG_INF);
        __m512 z = _mm512_set1_ps(0.0136703095f);
        for (const float c : {0.0517449978f, 0.241604357f, 0.692972922f, 1.00000349f})
            z = _mm512_fmadd_ps(z, r, _mm512_set1_ps(c));
        return (Lanes)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(y, fill(-126.0f), _CMP_NLT_UQ), z, y);
    }
#endif
    return vectors::exponential(x);
}

template <Mode mode>
inline void store_weights(uint32_t* to, int64_t at, Lanes low, Lanes high) {
#if defined(__AVX512BF16__)
    if constexpr (mode != Mode::floats) {
        _mm512_storeu_si512(to + at / 2, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
        return;
    }
#endif
    store_vector(to + at, low), store_vector(to + at + lanes, high);
}

// Scores to weights, against the largest score so far.
template <Mode mode>
void weigh(const Attention& p, const QueryRows& rows, int64_t keys, const Scratch& scratch) {
    const Lanes scaling = fill(p.scaling);
    const int64_t whole = (keys + 2 * lanes - 1) / (2 * lanes) * (2 * lanes);
    for (int64_t r = 0; r < rows.count; r++) {
        Lanes high = load(scratch.score + r * chunk);
        for (int64_t s = lanes; s < whole; s += lanes) high = max(high, load(scratch.score + r * chunk + s));
        scratch.top[r] = std::max(scratch.largest[r], vectors::largest_of(high) * p.scaling);
    }
    for (int64_t r = 0; r < rows.count; r += lanes) {
        const Lanes before = load(scratch.largest + r), top = load(scratch.top + r);
        const Lanes shift = chosen(top == none, Lanes{}, top);  // a row that has seen nothing yet
        store(scratch.factor + r, power<mode>(before - shift));
        store(scratch.largest + r, top), store(scratch.top + r, -shift);
    }
    for (int64_t r = 0; r < rows.count; r++) {
        const Lanes shift = fill(scratch.top[r]);
        Lanes total = scratch.total[r] * scratch.factor[r];
        for (int64_t s = 0; s < whole; s += 2 * lanes) {
            Lanes x[2];
            for (int i = 0; i < 2; i++) {
                const Lanes score = load(scratch.score + r * chunk + s + i * lanes);
                x[i] = power<mode>(fma(score, scaling, shift));
            }
            total += x[0] + x[1];  // a score that is NaN ends here, and shows in the whole row
            store_weights<mode>(scratch.weight + r * p.value_steps(), s, x[0], x[1]);
        }
        scratch.total[r] = total;
    }
}

template <Number type>
void store_results(const Attention& p, const QueryRows& rows, const Scratch& scratch) {
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t token = (rows.row + r) / p.groups, group = (rows.row + r) % p.groups;
        const int64_t to =
            ((rows.b * p.tokens + token) * p.heads * p.groups + rows.head * p.groups + group) * p.value_d;
        float total = vectors::sum(scratch.total[r]);
        if (p.sinks && total != 0) total += std::exp(p.sinks[rows.head * p.groups + group] - scratch.largest[r]);
        const float inverse = total == 0 ? 0 : 1 / total;
        for (int64_t c = 0; c < p.value_d; c += lanes) {
            const Lanes x = load(scratch.out + r * p.value_width() + c) * inverse;
            steps::write<type>(p.out, to + c, steps::rounded<type>(x), std::min(lanes, p.value_d - c));
        }
    }
}

template <Mode mode, Number type>
void attend_of(const Attention& p, Units& units) {
    [[maybe_unused]] const Registers<mode> registers;
    const int64_t q = block * p.key_steps(), weights = block * p.value_steps(), scores = block * chunk;
    const int64_t results = block * p.value_width(), count = q + weights + scores + results + 3 * block + block * lanes;
    auto* memory = static_cast<uint32_t*>(::operator new(4 * count, std::align_val_t{64}));
    std::fill_n(memory, count, 0u);
    auto* floats = reinterpret_cast<float*>(memory + q + weights);
    float* each = floats + scores + results;
    const Scratch scratch{memory, memory + q,   floats,           floats + scores,
                          each,   each + block, each + 2 * block, reinterpret_cast<Lanes*>(each + 3 * block)};
    for (Run run{units}; run.next();) {
        const QueryRows rows(p, run.unit);
        load_queries<mode, type>(p, rows, scratch);
        const int64_t end = p.causal ? std::min(p.length, (rows.row + rows.count - 1) / p.groups + 1) : p.length;
        for (int64_t at = 0; at < end; at += chunk) {
            const int64_t keys = std::min(chunk, end - at);
            if (!is_seen(p, rows, at, keys)) continue;
            score_rows<mode>(p.keys_of(rows.key_head, at / chunk), scratch.q, p.key_steps(), rows.count, keys,
                             scratch.score);
            hide(p, rows, at, keys, scratch);
            weigh<mode>(p, rows, keys, scratch);
            add_values<mode>(p.values_of(rows.key_head, at / chunk), scratch.weight, keys, rows.count, scratch.factor,
                             scratch.out, p.value_width());
        }
        store_results<type>(p, rows, scratch);
    }
    ::operator delete(memory, std::align_val_t{64});
}

void attend(const Attention& p, Units& units) {
#if defined(__AMX_TILE__)
    if (p.mode == Mode::tiles) return attend_of<Mode::tiles, Number::bfloat16>(p, units);
#endif
#if defined(__AVX512BF16__)
    if (p.mode == Mode::pairs) return attend_of<Mode::pairs, Number::bfloat16>(p, units);
#endif
    if (p.type == Number::bfloat16) return attend_of<Mode::floats, Number::bfloat16>(p, units);
    attend_of<Mode::floats, Number::float32>(p, units);
}

}  // namespace

const Kernels PTQ_LEVEL{pack, attend};

}  // namespace ptq::prefill
