#include "hadamard/units.h"

#include <numeric>

namespace ptq::hadamard {

int64_t units(const Problem& p) {
    const Cut c = cut(p);
    const int64_t blocks = p.outer * p.blocks;
    return p.inner > 1 ? blocks * c.panels : (blocks + c.vectors - 1) / c.vectors;
}

int64_t tokens_per_unit(const Problem& p) {
    const int64_t vectors = cut(p).vectors;
    return vectors / std::gcd(vectors, p.blocks);
}

int split(const Problem& p, Problem (&steps)[2]) {
    constexpr int64_t short_enough = 128;  // 64 lines of each of 128 rows fit a panel
    steps[0] = p;
    if (p.inner == 1 || p.order <= short_enough || p.storage >= Storage::bfloat16) return 1;  // bfloat16 rounds once

    // b is the end of the product: some of the doublings, or all of them and the last dense factors.
    int64_t b = 1, b_doublings = 1;
    int b_factors = 0;
    const auto longer = [&](int64_t size) { return std::max(size, p.order / size); };
    while (b_doublings < p.doublings && longer(2 * b) <= longer(b)) b = b_doublings *= 2;
    while (b_doublings == p.doublings && b_factors < p.factors) {
        const int64_t k = p.factor_order[p.factors - 1 - b_factors];
        if (longer(k * b) >= longer(b)) break;
        b *= k, b_factors++;
    }
    if (b == 1 || b == p.order) return 1;

    Problem outer = p, inner = p;
    inner.blocks = p.blocks * (p.order / b);
    inner.order = b;
    inner.factors = b_factors;
    for (int f = 0; f < b_factors; f++) {
        inner.factor_order[f] = p.factor_order[p.factors - b_factors + f];
        inner.codes[f] = p.codes[p.factors - b_factors + f];
    }
    inner.doublings = b_doublings;
    outer.order = p.order / b;
    outer.inner = p.inner * b;
    outer.factors = p.factors - b_factors;
    outer.doublings = p.doublings / b_doublings;
    outer.signs = nullptr;
    outer.scale = 1;
    // Signs go with the inner step, whose rows are the axis in its order: first, or last where they multiply the
    // output.
    steps[0] = p.transpose ? outer : inner;
    steps[1] = p.transpose ? inner : outer;
    steps[1].in = p.out;
    return 2;
}

}  // namespace ptq::hadamard
