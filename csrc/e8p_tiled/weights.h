// Rows of inputs times several E8P weights: for few, threads are woken once.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/linear.h"
#include "common/parallel.h"
#include "e8p_tiled/e8p_tiled_cpu.h"
#include "experts/experts.h"

namespace ptq::e8p_tiled {

struct ExpertWeights {
    std::vector<HeldWeight> held;

    void multiply(const Seen& in, const std::vector<experts::Product>& products) const {
        in.scale ? integers(in.x, *in.scale, products) : floats(in.x, products);
    }

    void integers(const Tensor& q, const Tensor& scale, const std::vector<experts::Product>& products) const {
        const int64_t t = q.size(0), k = q.size(1), width = blocks_in(k) * block_columns;
        const std::unique_ptr<int32_t[]> arranged(new int32_t[t * width / 4]), offsets(new int32_t[t]);
        auto* rows = reinterpret_cast<int8_t*>(arranged.get());
        run(kernels().arrange_tokens,
            ArrangedTokens{static_cast<const int8_t*>(q.const_data_ptr()), t, k, rows, offsets.get(),
                           offset_of(held.front().w.bits)},
            t, k / 4);
        std::vector<Quantized> problems;
        for (const experts::Product& p : products)
            problems.push_back({held[p.weight].now(), rows + p.from * width, offsets.get() + p.from,
                                static_cast<const float*>(scale.const_data_ptr()) + p.from, held[p.weight].bias_data(),
                                p.to(), number_of(p.out.scalar_type()), p.rows});
        run_quantized(problems);
    }

    void floats(const Tensor& x, const std::vector<experts::Product>& products) const {
        const ScalarType type = x.scalar_type();
        const int64_t t = x.size(0), k = x.size(1), stride = 4 * spread_steps(k, number_of(type), kernels().few);
        const std::unique_ptr<int32_t[]> arranged(new int32_t[t * stride / 4]);
        auto* rows = reinterpret_cast<uint8_t*>(arranged.get());
        const auto* from = static_cast<const char*>(x.const_data_ptr());
        std::vector<Floats> problems;
        for (const experts::Product& p : products)
            problems.push_back({held[p.weight].now(), from + p.from * k * experts::width_of(type), number_of(type),
                                rows + p.from * stride, stride, kernels().few, held[p.weight].bias_data(), p.to(),
                                number_of(p.out.scalar_type()), p.rows});
        Floats all = problems.front();
        all.x = from, all.arranged = rows, all.t = t;
        run(kernels().arrange_floats, all, t, k);
        run_floats(problems);
    }
};

}  // namespace ptq::e8p_tiled
