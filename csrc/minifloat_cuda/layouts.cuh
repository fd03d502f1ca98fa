// Where the bits of small floats are in a lane's words; fp6/fragments.py explains it. No torch here.
#pragma once

#include "cuda/device.h"

namespace ptq::minifloat_cuda {

struct Layout {
    int slots;            // codes in each half of a word
    int sign[4], low[4];  // bit of the sign, lowest bit of the magnitude
    int gathered;         // words that share a gathered one, or 0
    int turn[7];          // to the left, of the bits that no slot has
};

PTQ_BOTH constexpr Layout layout_of(int exponent, int mantissa) {
    const int name = 10 * exponent + mantissa;
    if (name == 21) return {4, {15, 9, 11, 10}, {6, 0, 12, 3}, 0, {}};
    if (name == 22) return {3, {15, 10, 9}, {5, 0, 11}, 5, {11, 4, 3, 2, 1}};
    if (name == 31) return {3, {15, 10, 5}, {6, 1, 11}, 5, {15, 9, 8, 7, 6}};
    if (name == 32) return {2, {15, 10}, {5, 0}, 3, {28, 24, 4}};
    if (name == 23) return {2, {15, 9}, {4, 10}, 3, {12, 8, 4}};
    return {2, {15, 2}, {9, 3}, 7, {14, 12, 10, 8, 6, 4, 2}};  // e4m2, e3m3
}

// The bits of a word that no slot of its two halves has.
PTQ_BOTH constexpr uint32_t spare_of(const Layout& l, int bits) {
    uint32_t used = 0;
    for (int i = 0; i < l.slots; i++) used |= 1u << l.sign[i] | ((1u << (bits - 1)) - 1) << l.low[i];
    return ~(used | used << 16);
}
PTQ_BOTH constexpr uint32_t turned(uint32_t word, int by) {
    return word << by | word >> (32 - by);
}

}  // namespace ptq::minifloat_cuda
