// Weights of small floats in tiles as tensors, checked.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>

#include "common/cpu_level.h"
#include "common/tensors.h"
#include "minifloat_tiled/kernels.h"
#include "tiles/layout.h"

namespace ptq::minifloat_tiled {

using tiles::block_bytes;
using tiles::block_columns;
using tiles::blocks_in;
using tiles::row_tiles;
using tiles::tile_rows;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const Kernels& kernels() {
#if defined(__aarch64__)
    return at_arm_level<portable, dotprod>();
#else
    return at_level<portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16>();
#endif
}

// Whether few tokens are multiplied in pairs although these are slow: nothing is faster for one.
inline bool in_slow_pairs(const Floats& p) {
    return has_slow_pairs() && p.x_type == Number::bfloat16 && !p.w.element->whole;
}

// For few tokens of floating-point numbers.
inline const Kernels& float_kernels(const Floats& p) {
#if defined(__x86_64__)
    if (has_slow_pairs() && !in_slow_pairs(p)) return avx512vnni;
#endif
    return kernels();
}

// Value and tables of the element with these bits: (-1)^s 2^(E - bias) (1 + M / 2^m), subnormal where E = 0.
inline ElementTable element_of(int64_t exponent, int64_t mantissa) {
    const int64_t bits = 1 + exponent + mantissa;
    STD_TORCH_CHECK(exponent >= 1 && exponent <= 4 && mantissa >= 0 && bits >= 4 && bits <= 7, "minifloat tiles: e",
                    exponent, "m", mantissa, " is none of the elements of 4 to 7 bits with 1 to 4 exponent bits");
    ElementTable e{static_cast<int>(exponent), static_cast<int>(mantissa), static_cast<int>(bits), {}, {}, 0, false};
    const int bias = (1 << (e.exponent - 1)) - 1, half = 1 << (e.bits - 1), steps = 1 << e.mantissa;
    e.shift = bias - 1 + e.mantissa;
    e.whole = true;
    for (int code = 0; code < most_codes; code++) {
        const int rest = code & (half - 1), field = rest / steps, fraction = rest % steps;
        const int64_t number = static_cast<int64_t>(field ? steps + fraction : fraction) << std::max(0, field - 1);
        const int64_t with_sign = code & half ? -number : number;  // times 2^shift
        e.value[code] = std::ldexp(static_cast<float>(with_sign), -e.shift);
        if (code & half && !number) e.value[code] = -0.0f;
        e.byte[code] = static_cast<uint8_t>(with_sign + byte_offset);
        e.whole = e.whole && number < byte_offset;
    }
    return e;
}

inline const float* floats_of(const std::optional<Tensor>& x) {
    return x ? static_cast<const float*>(x->const_data_ptr()) : nullptr;
}

// The tensors of a weight, checked and held: their pointers are in `w`.
struct HeldWeight {
    Tensor tiles, scale;
    std::optional<Tensor> bias;
    ElementTable element;
    Weight w;
};

inline std::unique_ptr<HeldWeight> hold(const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& bias,
                                        int64_t n, int64_t k, const ElementTable& element, int64_t group_size) {
    STD_TORCH_CHECK(group_size >= 0 && group_size % block_columns == 0, "minifloat tiles: groups must be multiples of ",
                    block_columns, " columns, found ", group_size);
    const int64_t groups = group_size ? (k + group_size - 1) / group_size : 1;
    check_tensor("minifloat tiles", "tiles", tiles, ScalarType::Byte,
                 {row_tiles(n), blocks_in(k), block_bytes(element.bits)});
    check_tensor("minifloat tiles", "scale", scale, ScalarType::Short, {row_tiles(n), groups, tile_rows});
    STD_TORCH_CHECK(!bias || bias->numel() == n, "minifloat tiles: bias must have ", n, " elements");
    std::unique_ptr<HeldWeight> h(new HeldWeight{compact(tiles), compact(scale), std::nullopt, element, {}});
    if (bias) h->bias = as_float(*bias);
    h->w = {static_cast<const uint8_t*>(h->tiles.const_data_ptr()),
            static_cast<const uint16_t*>(h->scale.const_data_ptr()),
            n,
            k,
            blocks_in(k),
            groups,
            group_size ? group_size / block_columns : std::max(int64_t{1}, blocks_in(k)),
            &h->element};
    return h;
}

}  // namespace ptq::minifloat_tiled
