// The Hadamard transform on a GPU of what split.cuh does not take: a block of threads keeps whole vectors in shared
// memory as float32. No torch here.
//
// A chunk is `per_block` vectors, one after the other in memory; its element i lies at `padded(i)` in shared memory.
//   1. load      16 neighbouring elements per thread: norm (activations/input.cuh), signs, scale, the steps of
//                Sylvester's matrix inside them
//   2. first     the steps from distance 16 on, up to 5 of them in registers
//   3. later     the steps from distance 256 on, up to 5 at once
//   4. dense     one per dense factor (dense.cuh)
// The last of these writes to global memory; for quantised tokens to shared memory, and quantize.cuh does the rest.
// Padding: 4 after each 32, 16 after each 256, 8 after each 2^m >= 256 elements, so that neighbouring threads reach
// different banks in every pass.
#pragma once

#include "activations/input.cuh"
#include "activations/quantize.cuh"
#include "hadamard/dense.cuh"
#include "hadamard/split_layout.cuh"

namespace ptq::hadamard {

using namespace ptq::cuda;

constexpr int later_passes = 3;
constexpr int line = 16;  // elements that a thread loads

struct Transform {
    const void* in;
    void* out;           // the type of `in`, or int8 with `token_scale`, or of float32 any other
    float* token_scale;  // of quantised tokens, else null
    const float* signs;  // per element of a token, or null
    inputs::Input input;
    int64_t vectors;    // in all
    int order, blocks;  // elements of a vector, vectors of a token
    int per_block;      // vectors of a chunk; for quantised tokens whole tokens
    int chunks, grid, threads;
    float scale;
    bool signs_last;  // signs multiply the output (the transposed transform)
    bool vectorised;  // all pointers are multiples of 16
    bool aligned_signs;
    bool wide;                       // a dense factor is too large to be applied in place: there are two buffers
    bool prefetch;                   // the next chunk is fetched while this one is transformed
    int log2;                        // m
    int first, later[later_passes];  // log2 of the radix of each pass, 0: none
    Factors factors;
    activations::Quantizer quantizer;
    Split split;
};

// Bytes of shared memory: the chunk, the signs of the dense factors, the next chunk as it is or the norms of tokens.
inline size_t shared_bytes(const Transform& p, int element) {
    const int elements = p.per_block * p.order;
    return static_cast<size_t>(padded_size(elements, p.log2)) * (p.wide ? 8 : 4) + factor_bytes(p.factors) +
           activations::reduce_bytes +
           (p.prefetch ? static_cast<size_t>((elements + line - 1) / line * line) * element : 0) +
           (p.input.gain ? 4 * static_cast<size_t>(p.per_block / p.blocks) : 0);
}

// One step of Sylvester's matrix, on neighbours `step` apart.
template <int count>
PTQ_DEVICE void level(float (&v)[count], int step) {
    PTQ_UNROLL
    for (int i = 0; i < count; i++)
        if (!(i & step)) {
            const float a = v[i], b = v[i | step];
            v[i] = a + b;
            v[i | step] = a - b;
        }
}

// Where the result of a pass goes: back to shared memory, or out. What does not change is read from the parameters.
template <class Out>
struct Sink {
    const Transform& p;
    float* buffer;
    Out* out;    // of this chunk, or null
    int column;  // of the chunk's first element in its token

    PTQ_DEVICE void emit(int i, float v) const {
        if (!out) {
            buffer[padded(i, p.log2)] = v;
            return;
        }
        if constexpr (sizeof(Out) > 1) {
            if (p.signs_last) v *= p.signs[(column + i) % (p.order * p.blocks)];
            out[i] = convert<Out>(v);
        }
    }
};

// One of the passes 2 (stride 16) and 3.
template <int log, bool first, class Out>
PTQ_DEVICE void sylvester_pass(const Sink<Out>& sink, int elements, int stride_log, int threads) {
    const int step = first ? 0 : (1 << stride_log) + (1 << stride_log) / 8 + (1 << stride_log) / 16;
    for (int u = thread(); u < elements >> log; u += threads) {
        const int column = u & ((1 << stride_log) - 1), base = ((u >> stride_log) << (stride_log + log)) + column;
        float* at = sink.buffer + padded(base, sink.p.log2);
        float v[1 << log];
        PTQ_UNROLL
        for (int e = 0; e < 1 << log; e++) v[e] = at[first ? 16 * e + 4 * (e >> 1) + 16 * (e >> 4) : e * step];
        PTQ_UNROLL
        for (int l = 0; l < log; l++) level(v, 1 << l);
        if (sink.out) {
            PTQ_UNROLL
            for (int e = 0; e < 1 << log; e++) sink.emit(base + (e << stride_log), v[e]);
        } else {
            PTQ_UNROLL
            for (int e = 0; e < 1 << log; e++) at[first ? 16 * e + 4 * (e >> 1) + 16 * (e >> 4) : e * step] = v[e];
        }
    }
}

template <bool first, class Out>
PTQ_DEVICE void any_pass(const Sink<Out>& sink, int elements, int log, int stride_log, int threads) {
    if (log == 1) sylvester_pass<1, first>(sink, elements, stride_log, threads);
    if (log == 2) sylvester_pass<2, first>(sink, elements, stride_log, threads);
    if (log == 3) sylvester_pass<3, first>(sink, elements, stride_log, threads);
    if (log == 4) sylvester_pass<4, first>(sink, elements, stride_log, threads);
    if (log == 5) sylvester_pass<5, first>(sink, elements, stride_log, threads);
}

// What is transformed from float32 to another type is a product: there is neither in front of it.
template <class In, class Out>
constexpr bool takes_input = !(sizeof(In) == 4 && sizeof(Out) == 2);

// The norms of the chunk's tokens: 1 / sqrt(mean of squares + eps).
template <class In>
PTQ_DEVICE void find_norms(const Transform& p, int64_t start, int elements, float* norms, float* reduce) {
    const int k = p.order * p.blocks, tokens = elements / k;
    const bool aligned = p.vectorised && k % inputs::unit == 0, one = tokens == 1;
    const In* in = static_cast<const In*>(p.in);
    for (int t = one ? 0 : warp(); t < tokens; t += p.threads / 32) {
        const int64_t at = start + static_cast<int64_t>(t) * k;
        const float total = one ? inputs::squares_by_block(p.input, in, at, k, aligned, reduce, p.threads)
                                : inputs::squares_by_warp(p.input, in, at, k, aligned);
        if ((one ? thread() : lane()) == 0) norms[t] = inputs::inverse_norm(p.input, total, k);
    }
    block_barrier();
}

// What a norm makes of a line that begins at element `first` of the chunk.
template <class In>
PTQ_DEVICE void make_input(const Transform& p, int first, int left, const float* norms, float (&v)[line]) {
    float other[line];
    const In* gain = static_cast<const In*>(p.input.gain);
    const int k = p.order * p.blocks;
    int token = first / k, column = first % k;
    if (k % line == 0) {
        load_numbers(gain + column, line, p.vectorised, other);
        PTQ_UNROLL
        for (int i = 0; i < line; i++) v[i] = inputs::normed<In>(p.input, v[i], other[i], norms[token]);
        return;
    }
    for (int i = 0; i < line && i < left; i++) {
        v[i] = inputs::normed<In>(p.input, v[i], widen(gain[column]), norms[token]);
        column = column + 1 == k ? 0 : column + 1;
        token += column == 0;
    }
}

// Pass 1 of the chunk; `fetched` is null where nothing was fetched ahead.
template <class In, class Out>
PTQ_DEVICE void load_pass(const Transform& p, const Sink<Out>& sink, const In* in, const In* fetched,
                          const float* norms, int elements) {
    for (int u = thread(); u * line < elements; u += p.threads) {
        float v[line];
        load_numbers((fetched ? fetched : in) + u * line, elements - u * line, fetched || p.vectorised, v);
        if constexpr (takes_input<In, Out>)
            if (p.input.gain) make_input<In>(p, u * line, elements - u * line, norms, v);
        const int token = p.order * p.blocks;
        int s = p.signs && !p.signs_last ? (sink.column + u * line) % token : 0;
        PTQ_UNROLL
        for (int i = 0; i < line; i++) {
            if (p.signs && !p.signs_last) {
                v[i] = multiply(v[i], p.signs[s]);
                s = s + 1 == token ? 0 : s + 1;
            }
            v[i] = multiply(v[i], p.scale);  // not contracted with the sums: the same bits in every instance
        }
        PTQ_UNROLL
        for (int l = 0; l < 4; l++)
            if (p.log2 > l) level(v, 1 << l);
        if (sink.out || p.log2 < 4) {
            PTQ_UNROLL
            for (int i = 0; i < line; i++)
                if (u * line + i < elements) sink.emit(u * line + i, v[i]);
        } else {  // a line is not torn by the padding
            float* at = sink.buffer + padded(u * line, p.log2);
            PTQ_UNROLL
            for (int i = 0; i < line; i += 4) store<Floats4>(at + i, {{v[i], v[i + 1], v[i + 2], v[i + 3]}});
        }
    }
}

template <class In>
PTQ_DEVICE void fetch(const Transform& p, const In* in, In* fetched, int elements) {
    for (int u = thread(); u * line < elements; u += p.threads) {
        if (p.vectorised && elements - u * line >= line) {
            PTQ_UNROLL
            for (int i = 0; i < line; i += 16 / static_cast<int>(sizeof(In)))
                copy_async<16>(fetched + u * line + i, in + u * line + i);
        } else {
            for (int i = 0; i < line; i++) fetched[u * line + i] = u * line + i < elements ? in[u * line + i] : In{};
        }
    }
    copy_commit();
}

// Returns the buffer that the result is in, if it is in one.
template <class In, bool dense, class Out>
PTQ_DEVICE float* transform_chunk(const Transform& p, Sink<Out> sink, Out* out, const uint8_t* signs_of_factors,
                                  int elements) {
    const auto last = [&](bool is_last) { sink.out = is_last && !p.token_scale ? out : nullptr; };
    block_barrier();
    if (p.first) {
        last(!p.later[0] && !p.factors.count);
        any_pass<true>(sink, elements, p.first, 4, p.threads);
        block_barrier();
    }
    int stride_log = 4 + p.first;
    for (int i = 0; i < later_passes && p.later[i]; i++) {
        last((i + 1 == later_passes || !p.later[i + 1]) && !p.factors.count);
        any_pass<false>(sink, elements, p.later[i], stride_log, p.threads);
        stride_log += p.later[i];
        block_barrier();
    }
    if constexpr (dense) {
        float* other = sink.buffer + padded_size(p.per_block * p.order, p.log2);
        int inner = 1 << p.log2;
        for (int f = p.factors.count - 1; f >= 0; f--) {
            last(f == 0);
            const float* from = sink.buffer;
            if (p.factors.order[f] > max_in_place) {
                sink.buffer = other;
                other = const_cast<float*>(from);
            }
            dense_pass(sink, from, elements, p.factors.order[f], inner, signs_of_factors + p.factors.at[f], p.threads);
            inner *= p.factors.order[f];
            block_barrier();
        }
    }
    return sink.buffer;
}

// From elements In to elements Out: In itself, int8 for quantised tokens, or any for float32. Without dense factors 102
// registers do.
template <class In, class Out, bool dense>
PTQ_KERNEL(dense ? 512 : 320, dense ? 1 : 2)
void transform_kernel(const Transform p) {
    follow_previous();
    float* buffer = reinterpret_cast<float*>(shared());
    const int most = p.per_block * p.order;
    uint8_t* signs_of_factors = shared() + static_cast<size_t>(padded_size(most, p.log2)) * (p.wide ? 8 : 4);
    uint32_t* reduce = reinterpret_cast<uint32_t*>(signs_of_factors + factor_bytes(p.factors));
    In* fetched = p.prefetch ? reinterpret_cast<In*>(reduce + activations::reduce_bytes / 4) : nullptr;
    float* norms = reinterpret_cast<float*>(reduce + activations::reduce_bytes / 4);  // then nothing is fetched ahead
    if constexpr (dense) load_factors(p.factors, signs_of_factors, p.threads);
    const auto start_of = [&](int chunk) { return static_cast<int64_t>(chunk) * most; };
    const auto size_of = [&](int chunk) {
        const int64_t left = p.vectors * p.order - start_of(chunk);
        return static_cast<int>(left < most ? left : most);
    };
    const In* in = static_cast<const In*>(p.input.added ? p.input.sum : p.in);
    if (fetched && block_x() < p.chunks) fetch(p, in + start_of(block_x()), fetched, size_of(block_x()));
    for (int chunk = block_x(); chunk < p.chunks; chunk += p.grid) {
        const int64_t start = start_of(chunk);
        const int elements = size_of(chunk);
        Out* out = static_cast<Out*>(p.out) + start;
        Sink<Out> sink{p, buffer, nullptr, static_cast<int>(start % (p.order * p.blocks))};
        const bool only = !p.first && !p.factors.count;  // up to 16 elements: there is nothing behind the first pass
        sink.out = only && !p.token_scale ? out : nullptr;
        if (fetched) copy_wait<0>();
        if constexpr (takes_input<In, Out>)
            if (p.input.gain) find_norms<In>(p, start, elements, norms, reinterpret_cast<float*>(reduce));
        load_pass(p, sink, in + start, fetched, norms, elements);
        if (fetched && chunk + p.grid < p.chunks)
            fetch(p, in + start_of(chunk + p.grid), fetched, size_of(chunk + p.grid));
        [[maybe_unused]] const float* result = transform_chunk<In, dense>(p, sink, out, signs_of_factors, elements);
        if constexpr (sizeof(Out) == 1) {
            const int token = p.order * p.blocks;
            const auto number = [&](int i) { return result[padded(i, p.log2)]; };
            activations::quantize_tokens_in_block(p.quantizer, number, elements / token, token, out,
                                                  p.token_scale + start / token, p.vectorised, reduce, p.threads);
            block_barrier();
        }
    }
}

}  // namespace ptq::hadamard
