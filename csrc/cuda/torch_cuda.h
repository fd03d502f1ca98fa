// What the CUDA files need of torch, through its stable ABI: the current stream, the device, tensors beside another.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/device.h"

namespace ptq::cuda {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int max_devices = 64;

// Of libtorch_cuda, which only a torch with CUDA has: looked up at run time, so that this library also loads without.
inline cudaStream_t current_stream(int device) {
    using Get = AOTITorchError(int32_t, void**);
    static Get* const get = [] {
        void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        return reinterpret_cast<Get*>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr);
    }();
    STD_TORCH_CHECK(get, "ptq: this torch has no CUDA");
    void* stream = nullptr;
    STD_TORCH_CHECK(get(device, &stream) == 0, "ptq: no current stream on device ", device);
    return static_cast<cudaStream_t>(stream);
}

struct Properties {
    Device device;
    bool multiplies_nibbles;  // compute capability 8.x has tensor cores for four bits, 9.0 has none
    bool takes_wgmma;         // 9.0
};

// Asked for once per device. Fails in a sentence where the kernels are not made for it.
inline const Properties& properties(int device) {
    static std::array<std::once_flag, max_devices> asked;
    static std::array<Properties, max_devices> known{};
    STD_TORCH_CHECK(device >= 0, "ptq: the input is on the CPU and something it meets, a weight or a cache, on a GPU; ",
                    "move one of them");
    STD_TORCH_CHECK(device < max_devices, "ptq: no device ", device);
    std::call_once(asked[device], [device] {
        const auto attribute = [device](cudaDeviceAttr which) {
            int value = 0;
            const cudaError_t error = cudaDeviceGetAttribute(&value, which, device);
            if (error != cudaSuccess) cudaGetLastError();  // forgotten: it would else be taken for a launch's
            STD_TORCH_CHECK(error == cudaSuccess, "ptq: device ", device, ": ", cudaGetErrorString(error));
            return value;
        };
        const int major = attribute(cudaDevAttrComputeCapabilityMajor);
        const int minor = attribute(cudaDevAttrComputeCapabilityMinor);
        // 8.7, a Tegra: binary code for 8.0 is not promised to run there.
        STD_TORCH_CHECK((major == 8 && minor != 7) || (major == 9 && minor == 0),
                        "ptq: the CUDA kernels are built for compute capability ", "8.x (not 8.7) and 9.0, device ",
                        device, " has ", major, ".", minor, "; build them for it (CMakeLists.txt), or run on the CPU");
        known[device] = {{attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)},
                         major == 8,
                         major == 9};
    });
    return known[device];
}

inline Tensor empty_like_device(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type, const Tensor& beside) {
    return torch::stable::empty(sizes, type, std::nullopt, beside.device());
}
inline Tensor work_buffer(int64_t bytes, const Tensor& beside) {
    const std::array<int64_t, 1> sizes{bytes};
    return empty_like_device({sizes.data(), sizes.size()}, ScalarType::Byte, beside);
}

inline bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// Of every tensor that a kernel reads besides its first: the same device, contiguous.
inline void check_tensor(const char* op, const char* name, const Tensor& tensor, const Tensor& beside,
                         ScalarType type) {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == beside.get_device_index(), op, ": ", name,
                    " is on another device than the input; move it there");
    STD_TORCH_CHECK(tensor.scalar_type() == type, op, ": ", name, " has the wrong dtype");
    STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous");
}

inline void check_launch(const char* op, const char* error) {
    STD_TORCH_CHECK(!error, op, ": ", error ? error : "");
}

}  // namespace ptq::cuda
