// What to launch for a transform on a GPU, without torch: the plan of the fast kernel, or steps of the general one.
#pragma once

#include <algorithm>
#include <vector>

#include "hadamard/general.cuh"
#include "hadamard/split.cuh"

namespace ptq::hadamard {

enum class Dtype { float32, float64, float16, bfloat16 };
inline int size_of(Dtype e) {
    return e == Dtype::float32 ? 4 : e == Dtype::float64 ? 8 : 2;
}

// x[outer, blocks * order, inner] on the device; with `token_scale`, `out` is int8.
struct Task {
    const void* in;
    void* out;
    Dtype dtype;
    int64_t outer, blocks, order, inner;
    const void* signs;  // in the type that is computed in, or null
    bool transpose;
    std::vector<int> factor_order;
    std::vector<const uint8_t*> codes;
    int64_t doublings;  // 2^m
    double scale;
    float* token_scale;
    activations::Quantizer quantizer;
    bool aligned;         // in and out, and what `input` has, are multiples of 16
    inputs::Input input;  // what follows is done by the fast kernel alone
    Dtype out_dtype;      // of a result that is not quantised
};

using cuda::Device;

inline int log2_of(int64_t n) {
    int log = 0;
    while (n > 1) n /= 2, log++;
    return log;
}

// Fills in `p.split`, threads and grid where split.cuh takes the transform, whatever the types.
inline void plan_split(const Task& t, const Device& device, Transform& p) {
    const bool dense = p.factors.count == 1;
    const int rows = dense ? p.factors.order[0] : 16;
    if (p.factors.count > 1 || rows > most_rows || rows % 4) return;
    const int rows_log = dense ? 0 : 4, log = p.log2 - rows_log, tiles = tiles_of(rows);
    if (log < (dense ? 8 : 6) || log > 10 || p.blocks << (log - 1) > most_split_threads) return;
    Split s{rows, log};
    s.row_log = dense ? log : 3;
    s.group_log = dense ? 3 : 3 + rows_log;
    s.top = p.log2;
    s.shuffles = std::max(0, log - 7 - tiles);
    s.skipped = std::max(0, 7 + tiles - log);
    s.pad[0] = dense ? 5 : s.group_log + 1;
    s.pad[1] = dense ? log : s.group_log + 2;
    s.stage_log = dense ? log : s.group_log;
    s.stage_pad = dense ? 4 : 5;
    s.rows_apart = spread(s, 8 << s.row_log);
    s.groups_apart = spread(s, 1 << s.group_log);
    for (int l = 0; l < 3 + tiles; l++) s.apart[l] = spread(s, 1 << (s.top - 3 - tiles + l));
    Transform q = p;
    q.split = s;
    q.per_block = p.blocks;
    q.chunks = static_cast<int>(t.outer);
    q.vectorised = t.aligned;
    q.aligned_signs = reinterpret_cast<uintptr_t>(t.signs) % 16 == 0;
    q.threads = p.blocks << (log - 1);
    const size_t bytes = split_bytes(q);
    if (bytes > static_cast<size_t>(device.shared_per_block)) return;
    const int most_threads = tiles == 1 ? 640 : 512;  // of a multiprocessor, by registers: 102 or 128 for each
    const int resident = std::max(
        1, std::min({static_cast<int>(device.shared_per_processor / (bytes + 1024)), most_threads / q.threads, 16}));
    const int rounds = (q.chunks + device.processors * resident - 1) / (device.processors * resident);
    q.grid = (q.chunks + rounds - 1) / rounds;
    p = q;
}

// Fills `p`; false where the fast kernel does not do it.
inline bool plan(const Task& t, const Device& device, Transform& p) {
    constexpr int64_t chunk = 4096, most = 1 << 15;  // elements
    const int64_t token = t.blocks * t.order;
    if (t.inner != 1 || t.dtype == Dtype::float64 || t.order > most || t.codes.size() > max_dense) return false;
    if (token >= int64_t{1} << 31) return false;
    const bool whole = t.token_scale || t.input.gain;  // tokens in a chunk
    if (whole && token > most) return false;
    p = Transform{};
    for (size_t f = 0; f < t.codes.size(); f++) {
        p.wide |= t.factor_order[f] > max_in_place;
        p.factors.order[f] = t.factor_order[f];
        p.factors.codes[f] = t.codes[f];
        const int tiles = tiles_of(t.factor_order[f]);
        if (f + 1 < t.codes.size()) p.factors.at[f + 1] = p.factors.at[f] + tiles * tiles * 32;
    }
    p.factors.count = static_cast<int>(t.codes.size());
    p.in = t.in;
    p.out = t.out;
    p.token_scale = t.token_scale;
    p.signs = static_cast<const float*>(t.signs);
    p.signs_last = t.transpose && t.signs;
    p.input = t.input;
    p.vectors = t.outer * t.blocks;
    p.order = static_cast<int>(t.order);
    p.blocks = static_cast<int>(t.blocks);
    // Chunks of a multiple of 16 elements begin at addresses that can be read 16 bytes at a time.
    const int64_t unit = whole ? t.blocks : 1;
    int64_t per_block = std::max<int64_t>(1, chunk / (t.order * unit));
    while (per_block * unit * t.order % line && per_block * unit * t.order < chunk) per_block++;
    p.per_block = static_cast<int>(std::min(per_block, (p.vectors + unit - 1) / unit) * unit);
    if (static_cast<int64_t>(p.per_block) * t.order > most) return false;
    p.chunks = static_cast<int>((p.vectors + p.per_block - 1) / p.per_block);
    p.vectorised = t.aligned && (p.per_block * t.order % line == 0 || p.chunks == 1);
    p.scale = static_cast<float>(t.scale);
    p.quantizer = t.quantizer;
    p.log2 = log2_of(t.doublings);
    plan_split(t, device, p);
    if (p.split.rows) return true;
    int left = std::max(0, p.log2 - 4);
    p.first = left <= 5 ? left : left == 9 ? 5 : left >= 10 ? (left == 10 ? 5 : 4) : 4;
    left -= p.first;
    for (int i = 0; left > 0; i++) left -= p.later[i] = left > 5 ? 4 : left;
    const int64_t elements = static_cast<int64_t>(p.per_block) * t.order;
    p.threads = elements >= 16384 ? (p.factors.count ? 512 : 320) : elements >= 2048 ? 256 : 64;
    p.prefetch = elements > 8192 && !t.input.gain;
    const int element = size_of(t.dtype);
    if (p.prefetch && shared_bytes(p, element) > static_cast<size_t>(device.shared_per_block)) p.prefetch = false;
    const size_t bytes = shared_bytes(p, element);
    if (bytes > static_cast<size_t>(device.shared_per_block)) return false;
    const int resident =
        std::max(1, std::min(static_cast<int>(device.shared_per_processor / (bytes + 1024)), 2048 / p.threads));
    p.grid = std::min(p.chunks, device.processors * resident);
    return true;
}

template <class In, class Out, int tiles>
const char* run_split(const Transform& p, Stream stream) {
    const Grid grid{static_cast<unsigned>(p.grid)};
    const size_t bytes = split_bytes(p);
    if constexpr (sizeof(In) == 2)
        if (!p.signs || p.signs_last)
            return p.input.gain || !p.vectorised
                       ? launch<split_kernel<In, Out, tiles, Source::treated>>(grid, p.threads, bytes, stream, p)
                       : launch<split_kernel<In, Out, tiles, Source::plain>>(grid, p.threads, bytes, stream, p);
    return launch<split_kernel<In, Out, tiles, Source::split>>(grid, p.threads, bytes, stream, p);
}
template <class In, class Out>
const char* run_fast(const Transform& p, Stream stream) {
    if (p.split.rows)
        return tiles_of(p.split.rows) == 1 ? run_split<In, Out, 1>(p, stream) : run_split<In, Out, 2>(p, stream);
    const Grid grid{static_cast<unsigned>(p.grid)};
    const size_t bytes = shared_bytes(p, sizeof(In));
    return p.factors.count ? launch<transform_kernel<In, Out, true>>(grid, p.threads, bytes, stream, p)
                           : launch<transform_kernel<In, Out, false>>(grid, p.threads, bytes, stream, p);
}
template <class In>
const char* run_fast(const Transform& p, Stream stream) {
    return p.token_scale ? run_fast<In, int8_t>(p, stream) : run_fast<In, In>(p, stream);
}
inline const char* run_fast(const Transform& p, const Task& t, Stream stream) {
    if (t.dtype == Dtype::float16) return run_fast<Half>(p, stream);
    if (t.dtype == Dtype::bfloat16) return run_fast<Bfloat16>(p, stream);
    if (!p.token_scale && t.out_dtype == Dtype::float16) return run_fast<float, Half>(p, stream);
    if (!p.token_scale && t.out_dtype == Dtype::bfloat16) return run_fast<float, Bfloat16>(p, stream);
    return run_fast<float>(p, stream);
}

// Bytes of each of the two work buffers of `run_general`.
inline int64_t general_bytes(const Task& t) {
    return t.outer * t.blocks * t.order * t.inner * (t.dtype == Dtype::float64 ? 8 : 4);
}

template <class In, class Out, class Number>
const char* run_copy(const Copied& c, Stream stream) {
    const Grid grid{static_cast<unsigned>((c.count + general_threads - 1) / general_threads)};
    return launch<copy_kernel<In, Out, Number>>(grid, general_threads, 0, stream, c);
}

// `number` is where the result must be in the type that is computed in, or null: then it goes to t.out.
template <class X, class Number>
const char* run_general(const Task& t, void* first, void* second, Stream stream, void* number) {
    const int64_t count = t.outer * t.blocks * t.order * t.inner, size = t.blocks * t.order;
    const bool after = t.signs && t.transpose;
    const char* error =
        run_copy<X, Number, Number>({t.in, first, after ? nullptr : t.signs, count, size, t.inner, t.scale}, stream);
    Step step{first, second, count, t.inner, 0, nullptr};
    const auto next = [&](int order, const uint8_t* codes) {
        step.order = order;
        step.codes = codes;
        const Grid grid{static_cast<unsigned>((count + general_threads - 1) / general_threads)};
        if (!error) error = launch<step_kernel<Number>>(grid, general_threads, 0, stream, step);
        step.inner *= order;
        void* out = step.out;
        step.out = const_cast<void*>(step.in);
        step.in = out;
    };
    for (int64_t left = t.doublings; left > 1;) {
        const int order = static_cast<int>(std::min<int64_t>(left, widest_step));
        next(order, nullptr);
        left /= order;
    }
    for (size_t f = t.codes.size(); f-- > 0;) next(t.factor_order[f], t.codes[f]);
    const Copied back{step.in, number ? number : t.out, after ? t.signs : nullptr, count, size, t.inner, 1};
    if (error) return error;
    return number ? run_copy<Number, Number, Number>(back, stream) : run_copy<Number, X, Number>(back, stream);
}
inline const char* run_general(const Task& t, void* first, void* second, Stream stream, void* number = nullptr) {
    if (t.dtype == Dtype::float64) return run_general<double, double>(t, first, second, stream, number);
    if (t.dtype == Dtype::float32) return run_general<float, float>(t, first, second, stream, number);
    if (t.dtype == Dtype::float16) return run_general<Half, float>(t, first, second, stream, number);
    return run_general<Bfloat16, float>(t, first, second, stream, number);
}

}  // namespace ptq::hadamard
