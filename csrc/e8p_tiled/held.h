// E8P weights in tiles as tensors, checked.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "common/cpu_level.h"
#include "common/tensors.h"
#include "e8p_tiled/kernels.h"
#include "e8p_tiled/layout.h"

namespace ptq::e8p_tiled {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const Kernels& kernels() {
#if defined(__aarch64__)
    return at_arm_level<portable, dotprod>();
#else
    return at_level<portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16>();
#endif
}

inline void check_bits(int64_t bits) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 4, "e8p tiles: bits must be 2 to 4, found ", bits);
}

// The tensors of a weight, checked and held: their pointers are in `w`.
struct HeldWeight {
    Tensor tiles, scale;
    std::optional<Tensor> bias;
    Weight w;
    // With the scale as it is now.
    Weight now() const {
        Weight found = w;
        std::memcpy(&found.scale, scale.const_data_ptr(), sizeof found.scale);
        return found;
    }
    const float* bias_data() const { return bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr; }
};

inline HeldWeight hold(const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& bias, int64_t n,
                       int64_t k, int64_t bits) {
    check_bits(bits);
    STD_TORCH_CHECK(k <= most_columns, "e8p tiles: more than ", most_columns, " columns: ", k);
    check_tensor("e8p tiles", "tiles", tiles, ScalarType::Byte, {row_tiles(n), blocks_in(k) * bits, 64});
    check_tensor("e8p tiles", "scale", scale, ScalarType::Int, {1});
    STD_TORCH_CHECK(!bias || bias->numel() == n, "e8p tiles: bias must have ", n, " elements");
    HeldWeight h{compact(tiles), scale, std::nullopt, {}};
    if (bias) h.bias = as_float(*bias);
    h.w = {static_cast<const uint8_t*>(h.tiles.const_data_ptr()), {}, n, k, static_cast<int>(bits)};
    h.w = h.now();
    return h;
}

// Dwords of a token of k numbers.
inline int64_t spread_steps(int64_t k, Number type, Form form) {
    if (form == Form::bytes) return ByteRow::count(type) * ByteRow::stride(k) / 4;
    return blocks_in(k) * block_columns / (form == Form::pairs ? 2 : 1);
}

}  // namespace ptq::e8p_tiled
