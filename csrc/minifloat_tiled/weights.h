// Rows of inputs times several weights of small floats: for few, threads are woken once.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/linear.h"
#include "experts/experts.h"
#include "gemm/tokens.h"
#include "minifloat_tiled/minifloat_tiled_cpu.h"
#include "tiles/layout.h"

namespace ptq::minifloat_tiled {

struct ExpertWeights {
    std::vector<std::unique_ptr<HeldWeight>> held;

    void multiply(const Seen& in, const std::vector<experts::Product>& products) const {
        if (!in.scale) return floats(in.x, nullptr, products);
        const auto* scale = static_cast<const float*>(in.scale->const_data_ptr());
        if (!held.front()->element.whole)
            return floats(compact(torch::stable::to(in.x, ScalarType::BFloat16)), scale, products);
        std::vector<float> factors(scale, scale + in.x.size(0));
        for (float& each : factors) each = std::ldexp(each, -held.front()->element.shift);
        integers(in.x, factors.data(), products);
    }

    void integers(const Tensor& q, const float* scale, const std::vector<experts::Product>& products) const {
        const int64_t rows = q.size(0), k = q.size(1), groups = held.front()->w.groups;
        const int64_t width = blocks_in(k) * block_columns;
        const gemm::Tokens tokens{rows, k, static_cast<const int8_t*>(q.const_data_ptr()), nullptr, nullptr, 1};
        std::unique_ptr<int8_t[]> room;
        const int8_t* padded = gemm::rows_of(tokens, width, room);
        const std::unique_ptr<int32_t[]> sums(new int32_t[rows * groups]);
        std::vector<Quantized> problems;
        for (const experts::Product& p : products)
            problems.push_back({held[p.weight]->w, padded + p.from * width, width, scale + p.from,
                                sums.get() + p.from * groups, floats_of(held[p.weight]->bias), p.to(),
                                number_of(p.out.scalar_type()), p.rows});
        Quantized all = problems.front();
        all.q = padded, all.t = rows;
        if (experts::any_few(problems))
            run_codes(rows, k / 4, [&](int64_t first, int64_t last) { kernels().sums(all, sums.get(), first, last); });
        run_quantized(problems);
    }

    // `scale`: a factor for every row of the results, or null.
    void floats(const Tensor& x, const float* scale, const std::vector<experts::Product>& products) const {
        const int64_t rows = x.size(0), k = x.size(1), bytes = tiles::arranged_bytes(k);
        const int64_t size = k * experts::width_of(x.scalar_type());
        const std::unique_ptr<uint8_t[]> arranged(new uint8_t[rows * bytes]);
        std::vector<Floats> problems;
        for (const experts::Product& p : products)
            problems.push_back({held[p.weight]->w, static_cast<const uint8_t*>(x.const_data_ptr()) + p.from * size,
                                number_of(x.scalar_type()), arranged.get() + p.from * bytes, bytes,
                                scale ? scale + p.from : nullptr, floats_of(held[p.weight]->bias), p.to(),
                                number_of(p.out.scalar_type()), p.rows});
        Floats all = problems.front();
        all.x = x.const_data_ptr(), all.arranged = arranged.get(), all.t = rows;
        if (experts::any_few(problems))
            run_codes(rows, k, [&](int64_t first, int64_t last) { float_kernels(all).arrange(all, first, last); });
        run_floats(problems);
    }
};

}  // namespace ptq::minifloat_tiled
