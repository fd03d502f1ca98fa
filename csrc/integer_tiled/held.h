// Weights in tiles as tensors, checked, and how the rows of several are shared by threads.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/cpu_level.h"
#include "common/linear.h"
#include "common/tensors.h"
#include "integer_tiled/kernels.h"
#include "tiles/layout.h"

namespace ptq::integer_tiled {

using namespace tiles;

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

inline const Kernels& kernels() {
#if defined(__aarch64__)
    return at_arm_level<portable, dotprod>();
#else
    return at_level<portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16>();
#endif
}

// Those that do without pairs of bfloat16 where these are slow.
inline const Kernels& vector_kernels() {
#if defined(__x86_64__)
    if (has_slow_pairs()) return avx512vnni;
#endif
    return kernels();
}

inline void check_bits(int64_t bits) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 8, "integer tiles: bits must be 2 to 8, found ", bits);
}

// The tensors of a weight, checked and held: their pointers are in `w`.
struct HeldWeight {
    Tensor tiles, scale;
    std::optional<Tensor> zero, bias;
    Weight w;
    const float* bias_data() const { return bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr; }
};

inline HeldWeight hold(const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& zero,
                       const std::optional<Tensor>& bias, int64_t n, int64_t k, int64_t bits, int64_t group_size) {
    check_bits(bits);
    STD_TORCH_CHECK(group_size >= 0 && group_size % block_columns == 0 && (group_size == 0 || k % group_size == 0),
                    "integer tiles: ", k, " columns do not divide into groups of ", group_size);
    const int64_t groups = group_size ? k / group_size : 1;
    check_tensor("integer tiles", "tiles", tiles, ScalarType::Byte,
                 {row_tiles(n), blocks_in(k), block_bytes(static_cast<int>(bits))});
    const bool multiples = scale.scalar_type() == ScalarType::Byte;
    STD_TORCH_CHECK(!multiples || (bits <= most_multiplied && k <= most_columns && group_size && !zero),
                    "integer tiles: integer scales are for at most ", most_multiplied, " bits and ", most_columns,
                    " columns in groups, without zeros");
    check_tensor("integer tiles", "scale", scale, multiples ? ScalarType::Byte : ScalarType::Short,
                 {row_tiles(n), groups + multiples, tile_rows});
    if (zero) check_tensor("integer tiles", "zero", *zero, ScalarType::Byte, {row_tiles(n), groups, tile_rows});
    STD_TORCH_CHECK(!bias || bias->numel() == n, "integer tiles: bias must have ", n, " elements");
    HeldWeight h{compact(tiles), compact(scale), std::nullopt, std::nullopt, {}};
    if (zero) h.zero = compact(*zero);
    if (bias) h.bias = as_float(*bias);
    h.w = {static_cast<const uint8_t*>(h.tiles.const_data_ptr()),
           multiples ? nullptr : static_cast<const uint16_t*>(h.scale.const_data_ptr()),
           h.zero ? static_cast<const uint8_t*>(h.zero->const_data_ptr()) : nullptr,
           n,
           k,
           groups,
           group_size ? group_size / block_columns : blocks_in(k),
           static_cast<int>(bits),
           multiples ? static_cast<const uint8_t*>(h.scale.const_data_ptr()) : nullptr};
    return h;
}

// Weights that share an input: `zero` and `bias` are empty, or one for each; a bias of no elements is none.
inline std::vector<HeldWeight> hold_all(const Tensors& tiles, const Tensors& scale, const Tensors& zero,
                                        const Tensors& bias, const std::vector<int64_t>& n, int64_t k, int64_t bits,
                                        int64_t group_size) {
    const size_t count = n.size();
    STD_TORCH_CHECK(count > 0 && tiles.size() == count && scale.size() == count &&
                        (zero.empty() || zero.size() == count) && (bias.empty() || bias.size() == count),
                    "integer tiles: lists of different lengths");
    std::vector<HeldWeight> held;
    held.reserve(count);
    for (size_t i = 0; i < count; i++)
        held.push_back(hold(tiles[i], scale[i], zero.empty() ? std::nullopt : std::optional(zero[i]),
                            bias.empty() || !bias[i].numel() ? std::nullopt : std::optional(bias[i]), n[i], k, bits,
                            group_size));
    return held;
}

}  // namespace ptq::integer_tiled
