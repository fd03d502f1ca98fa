// The numbers that CPU kernels read and write. No torch here.
#pragma once

namespace ptq {

enum class Number { float32, bfloat16 };

}  // namespace ptq
