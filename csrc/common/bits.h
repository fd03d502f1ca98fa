// A number of bits that is known only when the program runs, as a constant for templates.
#pragma once

namespace ptq {

// What f.operator()<bits>() returns. The caller has checked that the bits are one of the choices.
template <int choice, int... others, class F>
decltype(auto) with_bits(int bits, F&& f) {
    if constexpr (sizeof...(others) > 0)
        if (bits != choice) return with_bits<others...>(bits, f);
    return f.template operator()<choice>();
}

}  // namespace ptq
