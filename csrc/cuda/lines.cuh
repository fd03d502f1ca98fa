// Lines of 8 neighbouring numbers in registers, packed. No torch here.
#pragma once

#include "cuda/device.h"

namespace ptq::cuda {

template <class T>
struct Line {
    static constexpr int numbers = 8, words = numbers * sizeof(T) / 4;
    uint32_t word[words];

    PTQ_DEVICE void set(const float (&v)[numbers]) {
        PTQ_UNROLL
        for (int i = 0; i < words; i++)
            if constexpr (sizeof(T) == 4)
                word[i] = bits_of(v[i]);
            else
                word[i] = pack<T>(v[2 * i], v[2 * i + 1]);
    }
    PTQ_DEVICE void get(float (&v)[numbers]) const {
        PTQ_UNROLL
        for (int i = 0; i < numbers; i++)
            if constexpr (sizeof(T) == 4)
                v[i] = float_of(word[i]);
            else
                v[i] = widen(T{static_cast<uint16_t>(word[i / 2] >> (16 * (i % 2)))});
    }
};

// The lines at `first`, `first` + `step`, ... of k numbers, zeros beyond; all loads are on their way before one is
// waited for. `aligned`: memory is, and k is a multiple of 8.
template <class T, int count>
PTQ_DEVICE void load_lines(const T* from, int first, int step, int k, bool aligned, Line<T> (&lines)[count]) {
    if (aligned) {
        PTQ_UNROLL
        for (int n = 0; n < count; n++) {
            const int i = first + n * step;
            PTQ_UNROLL
            for (int w = 0; w < Line<T>::words; w += 4) {
                const Words4 words = i < k ? load<Words4>(from + i + w * 4 / sizeof(T)) : Words4{};
                PTQ_UNROLL
                for (int j = 0; j < 4; j++) lines[n].word[w + j] = words.word[j];
            }
        }
        return;
    }
    PTQ_UNROLL
    for (int n = 0; n < count; n++) {
        const int i = first + n * step;
        float v[Line<T>::numbers] = {};
        if (i < k) load_numbers(from + i, k - i, false, v);
        lines[n].set(v);
    }
}

}  // namespace ptq::cuda
