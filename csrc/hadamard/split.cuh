// The Hadamard transform of common orders on a GPU, with one exchange through shared memory: an order is a matrix of
// `rows` <= 28 times Sylvester's of 2^log columns. The matrix is the dense factor, or, of a power of two, 16 rows of
// Sylvester's own, taken from the middle of the index. No torch here.
//
// A chunk is a token, and a vector has 2^(log - 1) threads. A warp takes 64 columns, 8 neighbours per thread and row:
//   1. rows      on the tensor cores, straight from the numbers that come in: in bfloat16 and float16 the products
//                with +-1 are exact; float32, and what was multiplied by signs, is the sum of three bfloat16 numbers
//   2. columns   the steps inside the 16 columns that a thread has then, and up to two more between lanes
//   3. exchange  through shared memory, as float32
//   4. columns   the last steps, 2^(3 + tiles) numbers of two neighbours each in registers; scale, and out
// Whatever the types, the sums are the same: those of bfloat16 numbers do not depend on whether they came as float32.
#pragma once

#include "hadamard/split_rows.cuh"

namespace ptq::hadamard {

constexpr int most_split_threads = 512;

// Floats of shared memory, before and after the exchange.
PTQ_BOTH int buffer_size(const Transform& p) {
    const int last = p.per_block * p.order - 1, a = spread(p.split, last), b = staged(p.split, last);
    return ((a > b ? a : b) + 4) / 4 * 4;
}
inline size_t split_bytes(const Transform& p) {
    const int tiles = tiles_of(p.split.rows);
    return 4 * static_cast<size_t>(buffer_size(p)) + 512 * tiles * tiles + activations::reduce_bytes + 16;
}

// 2 and 3. Bits of an index of v: column (3), column group, row + 8, row tile. `to`: for row g and group 2 t.
template <int tiles>
PTQ_DEVICE void exchange(const Transform& p, int lane, float (&v)[32 * tiles], float* to) {
    PTQ_UNROLL
    for (int step = 1; step <= 8; step *= 2) level(v, step);
    for (int s = 0; s < p.split.shuffles; s++) {
        const float sign = lane >> s & 1 ? -1.0f : 1.0f;
        PTQ_UNROLL
        for (float& x : v) x = sign * x + shuffle_xor(x, 1 << s);
    }
    PTQ_UNROLL
    for (int i = 0; i < 4 * tiles; i++) {
        if (lane / 4 + i / 2 * 8 >= p.split.rows) continue;
        PTQ_UNROLL
        for (int j = 0; j < 8; j += 4)
            store<Floats4>(to + (i / 2) * p.split.rows_apart + (i % 2) * p.split.groups_apart + j,
                           {{v[8 * i + j], v[8 * i + j + 1], v[8 * i + j + 2], v[8 * i + j + 3]}});
    }
}

// The pairs of a thread, 2^distance elements apart.
template <class Out, int count>
PTQ_DEVICE void write_numbers(Out* out, bool aligned, const float* signs, int distance, float (&v)[count]) {
    if (signs) {
        PTQ_UNROLL
        for (int e = 0; e < count; e++) v[e] *= signs[(e / 2 << distance) + e % 2];
    }
    PTQ_UNROLL
    for (int e = 0; e < count / 2; e++) {
        const float a = v[2 * e], b = v[2 * e + 1];
        if (!aligned) {
            out[0] = convert<Out>(a);
            out[1] = convert<Out>(b);
        } else if constexpr (sizeof(Out) == 4) {
            store<Words2>(out, {{bits_of(a), bits_of(b)}});
        } else {
            store<uint32_t>(out, pack<Out>(a, b));
        }
        out += 1 << distance;
    }
}

template <int count>
PTQ_DEVICE void write_token(const Transform& p, int8_t* q, bool aligned, float* token_scale, int distance, bool works,
                            uint32_t* reduce, const float (&v)[count]) {
    uint32_t top = 0;
    PTQ_UNROLL
    for (int i = 0; i < count; i++) top = activations::larger(top, bits_of(v[i]) & 0x7fffffffu);
    top = activations::largest_in_block(works ? top : 0, reduce, p.threads);
    const activations::Scale s = activations::scale_of(p.quantizer, top);
    if (thread() == 0) *token_scale = s.scale;
    if (!works) return;
    PTQ_UNROLL
    for (int e = 0; e < count / 2; e++) {
        const uint32_t a = activations::integer_bits(p.quantizer, s, v[2 * e]);
        const uint32_t b = activations::integer_bits(p.quantizer, s, v[2 * e + 1]);
        const uint32_t both = s.finite ? byte_permute(a, b, 0x40) : 0;
        if (aligned) {
            store<uint16_t>(q, static_cast<uint16_t>(both));
        } else {
            q[0] = static_cast<int8_t>(both);
            q[1] = static_cast<int8_t>(both >> 8);
        }
        q += 1 << distance;
    }
}

// The first element of a thread in the last steps, or -1 where it has none. Like `elements_of`, found anew each time.
template <int log>
PTQ_DEVICE int last_element(const Transform& p) {
    int id = thread();
    keep(id);
    const int mine = id & ((1 << (p.split.log - 1)) - 1), low = p.split.top - log - 1, row = mine >> low;
    const int swapped = (row & ~3) | (row & 1) << 1 | (row >> 1 & 1);  // neighbouring rows do not share banks
    const int first = (id >> (p.split.log - 1)) * p.order + (swapped << p.split.top) + 2 * (mine & ((1 << low) - 1));
    return mine < p.order >> (log + 1) ? first : -1;
}

// 4, and out. All threads of the block.
template <class Out, int tiles>
PTQ_DEVICE void columns_pass(const Transform& p, bool aligned, const float* buffer, int64_t start, uint32_t* reduce) {
    constexpr int log = 3 + tiles;
    const int distance = p.split.top - log, from = last_element<log>(p);
    const float* at[1 << log] = {buffer + spread(p.split, from < 0 ? 0 : from)};
    float v[2 << log];
    PTQ_UNROLL
    for (int e = 0; e < 1 << log; e++) {
        PTQ_UNROLL
        for (int l = 0; l < log; l++)
            if ((e & -e) == 1 << l) at[e] = at[e & (e - 1)] + p.split.apart[l];
        const Words2 pair = load<Words2>(at[e]);
        v[2 * e] = float_of(pair.word[0]);
        v[2 * e + 1] = float_of(pair.word[1]);
    }
    PTQ_UNROLL
    for (int l = 0; l < log; l++)
        if (l >= 3 - tiles || l >= p.split.skipped) level(v, 2 << l);
    PTQ_UNROLL
    for (float& x : v) x = multiply(x, p.scale);
    const int first = last_element<log>(p);
    const bool works = first >= 0;
    Out* out = static_cast<Out*>(p.out) + start + first;
    if constexpr (sizeof(Out) == 1)
        write_token(p, out, aligned, p.token_scale + start / (p.order * p.blocks), distance, works, reduce, v);
    else if (works)
        write_numbers(out, aligned, p.signs_last ? p.signs + first : nullptr, distance, v);
}

// A thread's first element before the rows are transformed (row t, column group g of its warp) and after that (row g,
// group 2 t). Found anew for every chunk: in the last steps there are no registers left to keep it in.
struct ThreadElements {
    int lane, from, to;
};
PTQ_DEVICE ThreadElements elements_of(const Transform& p) {
    int id = thread();
    keep(id);
    const int each = 1 << (p.split.log - 1), g = id / 4 % 8, t = id % 4;
    const int base = (id >> (p.split.log - 1)) * p.order + ((id & (each - 1)) / 32 * 8 << p.split.group_log);
    return {id % 32, base + (g << p.split.group_log) + (t << p.split.row_log),
            base + (2 * t << p.split.group_log) + (g << p.split.row_log)};
}

// From elements In to elements Out, as transform_kernel.
template <class In, class Out, int tiles, Source source>
PTQ_KERNEL(most_split_threads, 1)
void split_kernel(const Transform p) {
    prefetch_codes(p);
    follow_previous();
    Words4* matrix = reinterpret_cast<Words4*>(shared());
    uint32_t* reduce = reinterpret_cast<uint32_t*>(matrix + 32 * tiles * tiles);
    float* norms = reinterpret_cast<float*>(reduce + activations::reduce_bytes / 4);
    float* buffer = norms + 4;
    const int token = p.order * p.blocks;
    using Taken = Numbers<In, tiles, source>;
    Taken numbers;
    // Numbers that nothing stands in front of are read while the token before them is transformed.
    constexpr bool ahead = source == Source::plain;
    const auto fetch = [&](int chunk) {
        const In* in = static_cast<const In*>(p.in) + static_cast<int64_t>(chunk) * token;
        numbers.load(p, in + elements_of(p).from, 4 << p.split.row_log);
    };
    if constexpr (ahead) fetch(block_x());
    load_matrix<typename Taken::Operand>(p, tiles, matrix);
    block_barrier();
    for (int chunk = block_x(); chunk < p.chunks; chunk += p.grid) {
        const int64_t start = static_cast<int64_t>(chunk) * token;
        const ThreadElements at = elements_of(p);
        float v[32 * tiles];
        if constexpr (ahead) {
            multiply_rows(numbers, matrix + at.lane, 0, v);
        } else {
            if constexpr (takes_input<In, Out>)
                if (p.input.gain) find_norms<In>(p, start, token, norms, reinterpret_cast<float*>(reduce));
            stage<In, source>(p, start, token, norms, buffer);
            const auto* from = reinterpret_cast<typename Taken::Stored*>(buffer) + staged(p.split, at.from);
            PTQ_UNROLL
            for (int j = 0; j < 8; j += Taken::columns) {
                numbers.load(p, from + j, staged(p.split, 4 << p.split.row_log));
                multiply_rows(numbers, matrix + at.lane, j, v);
            }
            block_barrier();
        }
        exchange<tiles>(p, at.lane, v, buffer + spread(p.split, at.to));
        if constexpr (ahead)
            if (chunk + p.grid < p.chunks) fetch(chunk + p.grid);
        block_barrier();
        columns_pass<Out, tiles>(p, ahead || p.vectorised, buffer, start, reduce);
        block_barrier();
    }
}

}  // namespace ptq::hadamard
