// ptq::e8p_round, e8p_ldlq and e8p_decode for the CPU. Schemas, fake kernels and references are in
// quip_sharp/e8p_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "common/cpu_level.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "e8p/kernels.h"
#include "e8p/multipliers.h"

namespace ptq::e8p {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::contiguous;
using torch::stable::empty;
using torch::stable::Tensor;

const Kernels& kernels() {
    return at_level<portable, avx2, avx2, avx512>();
}

Table table_from(const int8_t* from) {
    Table table;
    for (int a = 0; a < entries; a++) {
        float norm = 0;
        for (int j = 0; j < dim; j++) {
            table.point[a][j] = static_cast<float>(from[a * dim + j]);
            table.size[a][j] = std::fabs(table.point[a][j]);
            norm += table.size[a][j] * table.size[a][j];
        }
        table.half_norm[a] = norm * 0.5f;
        table.odd[a] = table.point[a][dim - 1] < 0;
    }
    return table;
}

Book book_from(const Tensor& scale, const Tensor& tables, int64_t bits, int64_t candidates) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 4, "e8p: bits must be 2, 3 or 4, found ", bits);
    STD_TORCH_CHECK(candidates == 1 || candidates == 2 || candidates == 4 || candidates == max_candidates,
                    "e8p: candidates must be 1, 2, 4 or 8, found ", candidates);
    const int64_t count = stages(static_cast<int>(bits));
    check_tensor("e8p", "scale", scale, ScalarType::Float, {1});
    check_tensor("e8p", "tables", tables, ScalarType::Char, {count, entries, dim});
    const Tensor s = contiguous(scale), t = contiguous(tables);
    const int8_t* from = static_cast<const int8_t*>(t.const_data_ptr());
    Book book;
    book.first = table_from(from);
    book.second = table_from(from + (count - 1) * entries * dim);
    book.scale = *static_cast<const float*>(s.const_data_ptr());
    book.inverse = book.scale > 0 ? 1.0f / book.scale : 0.0f;
    book.bits = static_cast<int>(bits);
    for (int i = 0; i < 2; i++) book.multiplier[i] = static_cast<float>(multiplier(book.bits, i));
    book.candidates = static_cast<int>(candidates);
    return book;
}

constexpr int64_t search_work = 64;  // a weight that is searched for takes as long as so many elements of simple ops

Tensor round(const Tensor& w, const Tensor& scale, const Tensor& tables, int64_t bits, int64_t candidates) {
    const Book book = book_from(scale, tables, bits, candidates);
    STD_TORCH_CHECK(w.dim() == 2 && w.size(1) % dim == 0, "e8p_round: w must be [n, k] with k a multiple of 8");
    const int64_t n = w.size(0), k = w.size(1), vectors = n * k / dim;
    check_tensor("e8p", "w", w, ScalarType::Float, {n, k});
    const Tensor in = contiguous(w), codes = empty({n, k / dim}, ScalarType::Int);
    const Round p{&book, static_cast<const float*>(in.const_data_ptr()),
                  static_cast<int32_t*>(codes.mutable_data_ptr()), vectors};
    run(kernels().round, p, (vectors + strip - 1) / strip, strip * dim * search_work);
    return codes;
}

std::tuple<Tensor, Tensor> ldlq(const Tensor& target, const Tensor& w, const Tensor& factor, const Tensor& scale,
                                const Tensor& tables, int64_t bits, int64_t candidates) {
    const Book book = book_from(scale, tables, bits, candidates);
    STD_TORCH_CHECK(w.dim() == 2 && w.size(0) % dim == 0, "e8p_ldlq: w must be [c, n] with c a multiple of 8");
    const int64_t c = w.size(0), n = w.size(1);
    check_tensor("e8p", "target", target, ScalarType::Float, {c, n});
    check_tensor("e8p", "w", w, ScalarType::Float, {c, n});
    check_tensor("e8p", "factor", factor, ScalarType::Float, {c, c});
    const Tensor from = contiguous(target), in = contiguous(w), taken = contiguous(factor);
    const Tensor codes = empty({c / dim, n}, ScalarType::Int), error = empty({c, n}, ScalarType::Float);
    const Ldlq p{&book,
                 static_cast<const float*>(from.const_data_ptr()),
                 static_cast<const float*>(in.const_data_ptr()),
                 static_cast<const float*>(taken.const_data_ptr()),
                 static_cast<int32_t*>(codes.mutable_data_ptr()),
                 static_cast<float*>(error.mutable_data_ptr()),
                 c,
                 n};
    run(kernels().ldlq, p, (n + strip - 1) / strip, strip * c * search_work);
    return {codes, error};
}

Tensor decode(const Tensor& codes, const Tensor& scale, const Tensor& tables, int64_t bits) {
    const Book book = book_from(scale, tables, bits, 1);
    STD_TORCH_CHECK(codes.dim() == 2, "e8p_decode: codes must be [n, m]");
    const int64_t n = codes.size(0), m = codes.size(1);
    check_tensor("e8p", "codes", codes, ScalarType::Int, {n, m});
    const Tensor in = contiguous(codes), w = empty({n, m * dim}, ScalarType::Float);
    const Decode p{&book, static_cast<const int32_t*>(in.const_data_ptr()), static_cast<float*>(w.mutable_data_ptr())};
    run(kernels().decode, p, n * m, dim);
    return w;
}

}  // namespace
}  // namespace ptq::e8p

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("e8p_round", TORCH_BOX(&ptq::e8p::round));
    m.impl("e8p_ldlq", TORCH_BOX(&ptq::e8p::ldlq));
    m.impl("e8p_decode", TORCH_BOX(&ptq::e8p::decode));
}
