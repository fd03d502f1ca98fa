// The points of the E8 codebooks as words that a code's bytes look up, built by the compiler from the definitions in
// quip_sharp/e8p.py. No torch, no CUDA here.
//
// A word has eight nibbles: bits 4 of byte j hold coordinate j, bits 4 .. 7 coordinate 4 + j. An E8P point is
// P = 2 n - 15, where n is the nibble of e8p[a] xor signs[m]: e8p[a] holds T0 / 2 + 8, and flipping bits 1 .. 3 of that
// negates T0, flipping bit 0 subtracts 2 of P. A residual point is n - 4, with n the nibble of residual[r].
#pragma once

#include <cstdint>

namespace ptq::e8p_cuda {

struct PointWords {
    uint32_t e8p[256], signs[256], residual[256];
};

// T0 / 2 + 8 or T1 + 4.
constexpr uint32_t point_word(const int (&nibble)[8]) {
    uint32_t word = 0;
    for (int j = 0; j < 8; j++) word |= static_cast<uint32_t>(nibble[j]) << (8 * (j % 4) + 4 * (j / 4));
    return word;
}

struct PointLists {
    PointWords words{};
    int count = 0, outer = 0;

    // T0: vectors of 2, 6 and 10, whose squared norm grows from 32 in steps of 32, by 1 for a 6 and 3 for a 10. All
    // whose steps are `left`, lexicographically; of those with five steps some (quip_sharp/e8p.py).
    constexpr void add_e8p(int (&v)[8], int at, int left, bool last) {
        if (at < 8) {
            for (int digit = 0; digit < (last ? 2 : 3); digit++) {
                const int steps = digit == 2 ? 3 : digit;
                if (steps > left) continue;
                v[at] = 2 + 4 * digit;
                add_e8p(v, at + 1, left - steps, last);
            }
            return;
        }
        if (left || (last && outer++ != 1 && (outer - 1) % 2)) return;
        int sum = 0, nibble[8]{};
        for (int j = 0; j < 8; j++) sum += v[j], nibble[j] = v[j] / 2 + 8;
        if (sum / 4 % 2) nibble[7] = 8 - v[7] / 2;
        words.e8p[count++] = point_word(nibble);
    }
    // T1: the roots of E8 doubled: eight odd numbers of which an even count is negative, or two of +-2.
    constexpr void add_residual(int (&v)[8], int at, int odd, int even) {
        if (at < 8) {
            for (int x = -2; x <= 2; x++) {
                v[at] = x;
                const bool is_odd = x % 2 != 0;
                if ((is_odd ? odd < at : odd > 0) || even + (x == 2 || x == -2) > 2) continue;
                add_residual(v, at + 1, odd + is_odd, even + (x == 2 || x == -2));
            }
            return;
        }
        int negative = 0, nibble[8]{};
        for (int j = 0; j < 8; j++) negative += v[j] < 0, nibble[j] = v[j] + 4;
        if (odd ? negative % 2 == 0 : even == 2) words.residual[count++] = point_word(nibble);
    }
};

constexpr PointWords make_point_words() {
    PointLists lists;
    int v[8]{};
    for (int steps = 0; steps <= 4; steps++) lists.add_e8p(v, 0, steps, false);
    lists.add_e8p(v, 0, 5, true);
    lists.words.residual[0] = 0x44444444u;
    lists.count = 1;
    lists.add_residual(v, 0, 0, 0);
    for (int i = 0; i < 15; i++) {
        int nibble[8]{4, 4, 4, 4, 4, 4, 4, 4};
        nibble[i / 2] += i % 2 ? -4 : 4;
        lists.words.residual[lists.count++] = point_word(nibble);
    }
    for (int m = 0; m < 256; m++) {
        int parity = 0, nibble[8]{};
        for (int j = 0; j < 8; j++) parity ^= m >> j & 1;
        for (int j = 0; j < 8; j++) nibble[j] = 14 * ((m ^ parity) >> j & 1) | parity;
        lists.words.signs[m] = point_word(nibble);
    }
    return lists.words;
}

}  // namespace ptq::e8p_cuda
