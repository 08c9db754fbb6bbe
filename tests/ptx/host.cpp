// What the interpreter is told: each launch, which memory tensors have, and what nobody has
// written.
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

// A tensor is full of a byte of which no number of a test consists, until something is written.
constexpr unsigned char kUnwritten = 0xfe;
constexpr size_t kMostFilled = size_t(64) << 20;  // the pages of larger ones stay untouched
constexpr size_t kAlignment = 64;

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* begin =
        std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (bytes <= kMostFilled) std::memset(begin, kUnwritten, bytes);
    const std::lock_guard lock(mutex_);
    sizes_[reinterpret_cast<uintptr_t>(begin)] = bytes;
    return {begin, begin, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override;

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void forget(void* begin) {
    const std::lock_guard lock(mutex_);
    sizes_.erase(reinterpret_cast<uintptr_t>(begin));
  }

  size_t find(uintptr_t address, uintptr_t* begin) {
    const std::lock_guard lock(mutex_);
    auto next = sizes_.upper_bound(address);
    if (next == sizes_.begin()) return 0;
    *begin = (--next)->first;
    return address < *begin + next->second ? next->second : 0;
  }

 private:
  std::map<uintptr_t, size_t> sizes_;
  std::mutex mutex_;
};

Memory& memory() {
  static Memory& one = *new Memory;  // outlives every tensor
  return one;
}

c10::DeleterFnPtr Memory::raw_deleter() const {
  return [](void* begin) {
    memory().forget(begin);
    std::free(begin);
  };
}

}  // namespace

// Called for each launch.
extern "C" {
void (*launcher)() = nullptr;
}

// Keeps account of the memory of all CPU tensors from now on.
extern "C" void keep_account() { c10::SetCPUAllocator(&memory(), 1); }

// The size of the allocation that holds an address, and where it begins; 0 if there is none.
extern "C" size_t find_allocation(uintptr_t address, uintptr_t* begin) {
  return memory().find(address, begin);
}
