// How many times the point of a stage counts in P = m0 P0 + m1 P1: those of quip_sharp/e8p.py.
#pragma once

namespace ptq::e8p {

constexpr int stages(int bits) {
    return bits == 2 ? 1 : 2;
}
constexpr int multiplier(int bits, int stage) {
    return stage == 0 ? (bits == 2 ? 1 : 7) : bits == 3 ? 8 : 2;
}

}  // namespace ptq::e8p
