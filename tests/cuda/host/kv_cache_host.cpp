// The kernels of csrc/kv_cache_cuda, run thread by thread on the CPU, for tests/test_cuda_host_kv_cache.py.
#include "guarded.h"
#include "kv_cache_cuda/launch.cuh"

using namespace ptq::kv_cache_cuda;
using ptq::test::Buffer;

namespace {

int64_t code_bytes(int chunks, int heads, int d, int bits) {
    return int64_t{chunks} * heads * chunk * 4 * words_of(d, bits);
}
int64_t scale_bytes(int chunks, int heads) {
    return int64_t{chunks} * heads * 2 * chunk * 2;
}
Number number_of(int type) {
    return type == 0 ? Number::float32 : type == 2 ? Number::float16 : Number::bfloat16;
}

}  // namespace

// x[heads, count, d] of type 0 float32, 2 float16, 3 bfloat16 into codes and scales, in place. Tokens of x lie
// `token_stride` numbers apart.
extern "C" const char* test_append(int backwards, int type, const void* x, uint8_t* codes, uint16_t* scales, int chunks,
                                   int heads, int d, int bits, int channel_major, int start, int count, float clip,
                                   int token_stride, int at_device) {
    machine.backwards = backwards;
    Buffer c(codes, code_bytes(chunks, heads, d, bits)), s(scales, scale_bytes(chunks, heads));
    Buffer xs(x, int64_t{heads} * count * token_stride * (type ? 2 : 4));
    const Side side{
        static_cast<uint32_t*>(c.data()), static_cast<uint16_t*>(s.data()), heads, d, bits, channel_major != 0};
    const int64_t given = start;
    Buffer at(&given, 8);
    const char* error = run_append({side, xs.data(), number_of(type), int64_t{count} * token_stride * heads,
                                    int64_t{count} * token_stride, token_stride, heads, at_device ? 0 : start, count,
                                    clip, at_device ? static_cast<const int64_t*>(at.data()) : nullptr, chunks * chunk},
                                   nullptr);
    c.give(codes);
    s.give(scales);
    return error ? error : c.damaged() || s.damaged() ? "written beside a buffer" : nullptr;
}

extern "C" const char* test_kv_dequantize(int backwards, const uint8_t* codes, const uint16_t* scales, float* out,
                                          int chunks, int heads, int d, int bits, int channel_major, int length) {
    machine.backwards = backwards;
    Buffer c(codes, code_bytes(chunks, heads, d, bits)), s(scales, scale_bytes(chunks, heads));
    Buffer y(nullptr, int64_t{heads} * length * d * 4);
    const Side side{
        static_cast<uint32_t*>(c.data()), static_cast<uint16_t*>(s.data()), heads, d, bits, channel_major != 0};
    const char* error = run_dequantize({side, static_cast<float*>(y.data()), length}, nullptr);
    y.give(out);
    return error ? error : y.damaged() ? "written beside a buffer" : nullptr;
}

// sizes: batch, kv heads, groups, tokens, d, length, chunks, sinks, rows of the mask's batch, splits (0: as always).
extern "C" const char* test_attend(int backwards, int type, const void* q, const uint8_t* k_codes,
                                   const uint16_t* k_scales, const uint8_t* v_codes, const uint16_t* v_scales,
                                   int k_bits, int v_bits, float scaling, const uint8_t* mask, const int64_t* starts,
                                   const float* sink_keys, const float* sink_values, void* out, const int* sizes) {
    machine.backwards = backwards;
    const int batch = sizes[0], kv_heads = sizes[1], groups = sizes[2], tokens = sizes[3], d = sizes[4];
    const int length = sizes[5], chunks = sizes[6], sinks = sizes[7], heads = batch * kv_heads;
    const int64_t width = type ? 2 : 4, count = int64_t{heads} * groups * tokens * d * width;
    Buffer kc(k_codes, code_bytes(chunks, heads, d, k_bits)), ks(k_scales, scale_bytes(chunks, heads));
    Buffer vc(v_codes, code_bytes(chunks, heads, d, v_bits)), vs(v_scales, scale_bytes(chunks, heads));
    const int64_t sink_bytes = sink_keys ? int64_t{heads} * sinks * d * 4 : 0;
    Buffer sk(sink_keys, sink_bytes), sv(sink_values, sink_bytes), st(starts, starts ? 8 * batch : 0);
    Buffer m(mask, mask ? int64_t{sizes[8]} * tokens * length : 0), qs(q, count), y(nullptr, count);
    Attend p{};
    p.q = qs.data(), p.q_kind = number_of(type), p.parts = type == 0 ? 3 : type == 2 ? 2 : 1;
    p.k = {static_cast<uint32_t*>(kc.data()), static_cast<uint16_t*>(ks.data()), heads, d, k_bits, false};
    p.v = {static_cast<uint32_t*>(vc.data()), static_cast<uint16_t*>(vs.data()), heads, d, v_bits, true};
    p.mask = mask ? static_cast<const uint8_t*>(m.data()) : nullptr;
    p.mask_batch = sizes[8] > 1 ? int64_t{tokens} * length : 0;
    p.starts = starts ? static_cast<const int64_t*>(st.data()) : nullptr;
    p.sink_keys = static_cast<const float*>(sk.data()), p.sink_values = static_cast<const float*>(sv.data());
    p.kv_heads = kv_heads, p.groups = groups, p.tokens = tokens, p.sinks = sinks, p.length = length;
    p.scaling = scaling;
    p.splits = sizes[9] ? sizes[9] : splits_of(p);
    const int64_t before = 7;
    Buffer partial(nullptr, p.work_numbers() * 4), stored(&before, 8);
    p.partial = static_cast<float*>(partial.data());
    p.stored = static_cast<int64_t*>(stored.data());
    p.out = y.data(), p.out_kind = p.q_kind;
    const char* error = run_attend(p, nullptr);
    if (!error && *p.stored != before + tokens) error = "tokens are counted wrong";
    y.give(out);
    return error ? error : y.damaged() || partial.damaged() ? "written beside a buffer" : nullptr;
}

extern "C" int test_attend_splits(int bits, int heads, int rows, int length) {
    Attend p{};
    p.parts = 1;
    p.k = p.v = {nullptr, nullptr, heads, 128, bits, false};
    p.groups = rows, p.tokens = 1, p.length = length;
    return splits_of(p);
}

extern "C" int test_attend_shared(int parts, int d, int k_bits, int v_bits) {
    Attend p{};
    p.parts = parts;
    p.k.d = p.v.d = d;
    p.k.bits = k_bits, p.v.bits = v_bits;
    return p.shared_bytes();
}

// q, k and v of type 0, 2 or 3, [batch, tokens, heads * d + spread], to queries [batch, q heads, tokens, d] and into
// the cache: keys and values [batch, kv heads, room, d], or, with bits, their codes and scales; of keys minus center
// [kv heads, d], or null. sizes: batch, tokens, q heads, kv heads, d, rotary_dim, order, start, whether that is read on
// the device, room, bits of keys and of values (0: none), spread, rows of cos and sin.
extern "C" const char* test_kv_input(int backwards, int type, const void* const* given, const void* cos,
                                     const void* sin, const void* center, void* queries, void* const* cache,
                                     const float* clips, const int* sizes) {
    machine.backwards = backwards;
    const int batch = sizes[0], tokens = sizes[1], d = sizes[4], room = sizes[9], spread = sizes[12];
    const int heads[3] = {sizes[2], sizes[3], sizes[3]}, all = batch * heads[1], width = type ? 2 : 4;
    std::vector<Buffer> x, held;
    for (int i = 0; i < 3; i++) x.emplace_back(given[i], int64_t{batch} * tokens * (heads[i] * d + spread) * width);
    const int64_t angles = int64_t{sizes[13]} * tokens * sizes[5] * width, start = sizes[7];
    Buffer minus(center, center ? int64_t{heads[1]} * d * width : 0);
    Buffer c(cos, angles), s(sin, angles), at(&start, 8), out(nullptr, int64_t{batch} * tokens * heads[0] * d * width);
    const auto fill = [&]<class Room>(Room to) {
        Input<Room> p{};
        for (int i = 0; i < 3; i++)
            p.given[i] = {x[i].data(), int64_t{tokens} * (heads[i] * d + spread), heads[i] * d + spread};
        p.cos = c.data(), p.sin = s.data(), p.angle_stride = sizes[13] > 1 ? int64_t{tokens} * sizes[5] : 0;
        p.center = center ? minus.data() : nullptr;
        p.queries = out.data(), p.room = to;
        p.batch = batch, p.tokens = tokens, p.q_heads = heads[0], p.kv_heads = heads[1], p.d = d;
        p.rotary_dim = sizes[5], p.order = sizes[6], p.room_tokens = room;
        p.start = sizes[8] ? 0 : sizes[7], p.start_at = sizes[8] ? static_cast<const int64_t*>(at.data()) : nullptr;
        return run_input(p, number_of(type), nullptr);
    };
    const char* error;
    if (sizes[10]) {
        PackedRoom to{{}, {clips[0], clips[1]}};
        for (int side = 0; side < 2; side++) {
            const int bits = sizes[10 + side];
            held.emplace_back(cache[2 * side], code_bytes(room / chunk, all, d, bits));
            held.emplace_back(cache[2 * side + 1], scale_bytes(room / chunk, all));
            to.sides[side] = {static_cast<uint32_t*>(held[2 * side].data()),
                              static_cast<uint16_t*>(held[2 * side + 1].data()),
                              all,
                              d,
                              bits,
                              side == 1};
        }
        error = fill(to);
    } else {
        for (int side = 0; side < 2; side++) held.emplace_back(cache[side], int64_t{all} * room * d * width);
        error = fill(
            PlainRoom{{held[0].data(), held[1].data()}, int64_t{heads[1]} * room * d, int64_t{room} * d, heads[1], d});
    }
    out.give(queries);
    for (size_t i = 0; i < held.size(); i++) {
        held[i].give(cache[i]);
        if (held[i].damaged()) error = "written beside a buffer";
    }
    return error ? error : out.damaged() ? "written beside a buffer" : nullptr;
}

// q [batch, kv heads * groups, tokens, d] of type 2 or 3 over keys and values [batch, kv heads, room, d]. sizes: batch,
// kv heads, groups, tokens, d, length, room, rows of the mask's batch, splits (0: as always).
extern "C" const char* test_plain(int backwards, int type, const void* q, const void* keys, const void* values,
                                  float scaling, const uint8_t* mask, void* out, const int* sizes) {
    machine.backwards = backwards;
    const int batch = sizes[0], kv_heads = sizes[1], groups = sizes[2], tokens = sizes[3], d = sizes[4];
    const int length = sizes[5], room = sizes[6], heads = batch * kv_heads;
    const int64_t count = int64_t{heads} * groups * tokens * d * 2, held = int64_t{heads} * room * d * 2;
    // Of the last head nothing is there but its tokens.
    const int64_t there = held - int64_t{room - length} * d * 2;
    Buffer ks(keys, there), vs(values, there), qs(q, count), y(nullptr, count);
    Buffer m(mask, mask ? int64_t{sizes[7]} * tokens * length : 0);
    Plain p{{}, ks.data(), vs.data(), int64_t{kv_heads} * room * d, int64_t{room} * d};
    Attend& a = p.attend;
    a.q = qs.data(), a.q_kind = a.out_kind = number_of(type), a.out = y.data();
    a.k.heads = a.v.heads = heads, a.k.d = a.v.d = d;
    a.mask = mask ? static_cast<const uint8_t*>(m.data()) : nullptr;
    a.mask_batch = sizes[7] > 1 ? int64_t{tokens} * length : 0;
    a.kv_heads = kv_heads, a.groups = groups, a.tokens = tokens, a.length = length, a.scaling = scaling;
    a.splits = sizes[8] ? sizes[8] : shares_of(a);
    const int64_t before = 7;
    Buffer partial(nullptr, a.work_numbers() * 4), stored(&before, 8);
    a.partial = static_cast<float*>(partial.data());
    a.stored = static_cast<int64_t*>(stored.data());
    const char* error = run_plain(p, nullptr);
    if (!error && *a.stored != before + tokens) error = "tokens are counted wrong";
    y.give(out);
    return error ? error : y.damaged() || partial.damaged() ? "written beside a buffer" : nullptr;
}
