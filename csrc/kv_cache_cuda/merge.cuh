// The splits of the context come together, always in the same order. No torch here.
#pragma once

#include "kv_cache_cuda/rooms.cuh"

namespace ptq::kv_cache_cuda {

constexpr int merge_warps = 8, merge_channels = 128;

// Every warp by itself: the largest score of a row, and the sum of its weights.
struct RowSoftmax {
    float largest = none, weights = 0;
    PTQ_DEVICE void find(const float* found, int splits) {
        constexpr int ahead = 2;  // loads at once
        PTQ_ROLLED
        for (int first = lane(); first < splits; first += 32 * ahead) {
            float high[ahead], total[ahead];
            PTQ_UNROLL
            for (int i = 0; i < ahead; i++) {
                const int split = first + 32 * i;
                high[i] = split < splits ? found[2 * split] : none;
                total[i] = split < splits ? found[2 * split + 1] : 0;
            }
            PTQ_UNROLL
            for (int i = 0; i < ahead; i++) add(high[i], total[i]);
        }
        float high = largest;
        PTQ_UNROLL
        for (int mask = 16; mask; mask /= 2) high = maximum(high, shuffle_xor(high, mask));
        weights = sum_of_warp(weights * softmax_weight(largest, high));
        largest = high;
    }
    PTQ_DEVICE void add(float high, float total) {
        const float both = maximum(largest, high);
        weights = weights * softmax_weight(largest, both) + total * softmax_weight(high, both);
        largest = both;
    }
};

// block_x counts rows of a head, block_y heads, block_z channels: four for each lane. A warp has every eighth split.
PTQ_KERNEL(32 * merge_warps, 4)
static void merge_kernel(const Attend p) {
    follow_previous();
    const int head = block_y(), row = block_x(), first_channel = block_z() * merge_channels;
    const int c = first_channel + 4 * lane();
    const float *sums = p.sums_of(head, row, 0) + c, *softmax = p.softmax_of(head, row, 0);
    const int64_t next = static_cast<int64_t>(p.rows()) * p.sum_row();
    constexpr int ahead = 6;  // loads at once
    float sum[4] = {};
    RowSoftmax all;
    int first = warp();
    PTQ_ROLLED
    do {
        float high[ahead];
        Floats4 part[ahead];
        PTQ_UNROLL
        for (int i = 0; i < ahead; i++) {
            const int split = first + i * merge_warps;
            high[i] = none;
            if (split >= p.splits || c >= p.sum_row()) continue;
            high[i] = softmax[2 * split];
            part[i] = load<Floats4>(sums + split * next);
        }
        if (first == warp()) all.find(softmax, p.splits);  // when those are on their way
        PTQ_UNROLL
        for (int i = 0; i < ahead; i++) {
            const float weight = softmax_weight(high[i], all.largest);
            PTQ_UNROLL
            for (int j = 0; j < 4; j++) sum[j] += weight != 0 ? weight * part[i].number[j] : 0;
        }
    } while ((first += ahead * merge_warps) < p.splits);
    float* room = reinterpret_cast<float*>(shared());
    store(room + warp() * merge_channels + 4 * lane(), Floats4{sum[0], sum[1], sum[2], sum[3]});
    const int64_t out = p.out_of(head, row);
    block_barrier();
    const int channel = first_channel + thread();
    if (thread() >= merge_channels || channel >= p.v.d) return;
    float total = 0;
    PTQ_UNROLL
    for (int w = 0; w < merge_warps; w++) total += room[w * merge_channels + thread()];
    store_number(p.out, p.out_kind, out + channel, all.weights == 0 ? 0 : total / all.weights);
}

}  // namespace ptq::kv_cache_cuda
