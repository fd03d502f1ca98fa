// Objects that tensors stand for.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptq {

// By the addresses of bytes that nobody reads, which tensors hold.
template <class Object>
class Handles {
  public:
    // A tensor that stands for an object, which goes with it.
    static torch::stable::Tensor keep(std::unique_ptr<Object> object) {
        auto byte = std::make_unique<char>();
        {
            const std::lock_guard lock(all().mutex);
            all().objects.emplace(byte.get(), std::move(object));
        }
        const std::vector<int64_t> one{1};
        const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
        return torch::stable::from_blob(byte.release(), one, one, cpu, torch::headeronly::ScalarType::Byte, &forget);
    }

    // What a tensor stands for; null where it is a copy, or something else.
    static std::shared_ptr<Object> find(const torch::stable::Tensor& handle) {
        const std::lock_guard lock(all().mutex);
        const auto found = all().objects.find(handle.const_data_ptr());
        return found == all().objects.end() ? nullptr : found->second;
    }

  private:
    struct All {
        std::mutex mutex;
        std::unordered_map<const void*, std::shared_ptr<Object>> objects;
    };
    // Never destroyed: handles may live longer than what is static here.
    static All& all() {
        static auto& made = *new All;
        return made;
    }
    static void forget(void* byte) {
        std::shared_ptr<Object> object;  // goes after the lock
        const std::lock_guard lock(all().mutex);
        if (const auto found = all().objects.find(byte); found != all().objects.end()) {
            object = std::move(found->second);
            all().objects.erase(found);
        }
        delete static_cast<char*>(byte);
    }
};

}  // namespace ptq
