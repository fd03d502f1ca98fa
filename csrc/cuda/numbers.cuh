// Numbers of a type that is known at run time: a bias, a result. No torch here.
#pragma once

#include "cuda/device.h"

namespace ptq::cuda {

enum class Number { none, float32, float16, bfloat16 };
PTQ_DEVICE float number_at(const void* from, Number kind, int64_t i) {
    if (kind == Number::none) return 0;
    if (kind == Number::float32) return static_cast<const float*>(from)[i];
    if (kind == Number::float16) return widen(static_cast<const Half*>(from)[i]);
    return widen(static_cast<const Bfloat16*>(from)[i]);
}
PTQ_DEVICE void store_number(void* to, Number kind, int64_t i, float x) {
    if (kind == Number::float32) static_cast<float*>(to)[i] = x;
    if (kind == Number::float16) static_cast<Half*>(to)[i] = narrow<Half>(x);
    if (kind == Number::bfloat16) static_cast<Bfloat16*>(to)[i] = narrow<Bfloat16>(x);
}

}  // namespace ptq::cuda
