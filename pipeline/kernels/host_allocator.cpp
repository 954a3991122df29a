// A CPU allocator for PyTorch that avoids the fragmentation of malloc's heap.
//
// Each large tensor gets a separate mapping. A freed mapping is cached for the next tensor of nearly
// the same size. Before mappings exceed the peak size of live tensors by more than a fraction, cached
// ones are unmapped, the most recently freed first: steps repeat, so the oldest is needed next.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kLarge = 1 << 18, kCacheFraction = 8, kMinCache = 256 << 20;  // cache limit beyond the peak: peak / kCacheFraction, at least kMinCache

void free_block(void* data);

struct Block {
  void* data;
  size_t size;
};

class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    void* data = n < kLarge ? nullptr : allocate_mapping(n);
    if (data == nullptr) data = c10::alloc_cpu(n);
    c10::profiledCPUMemoryReporter().New(data, n);
    return {data, data, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  bool recycle(void* data) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto it = used_.find(data);
    if (it == used_.end()) return false;
    live_ -= it->second;
    cached_.push_back({data, it->second});
    used_.erase(it);
    return true;
  }

  // Unmaps cached blocks until `size` more bytes fit below `limit`.
  void release(size_t limit = 0, size_t size = 1) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (; !cached_.empty() && mapped_ + size > limit; cached_.pop_back()) {
      munmap(cached_.back().data, cached_.back().size);
      mapped_ -= cached_.back().size;
    }
  }

 private:
  void* allocate_mapping(size_t n) {
    size_t unit = 4096;
    while (unit * 32 < n) unit *= 2;  // rounds sizes up by at most 1/16
    Block block{nullptr, (n + unit - 1) / unit * unit};
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    // Prefer the most recently freed one, which may still be in the processor's cache.
    auto it = std::find_if(cached_.rbegin(), cached_.rend(),
                           [&](const Block& cached) { return cached.size == block.size; });
    if (it != cached_.rend()) {
      block = *it;
      cached_.erase(std::next(it).base());
    } else {
      peak_ = std::max(peak_, live_ + block.size);
      release(peak_ + std::max(peak_ / kCacheFraction, kMinCache), block.size);
      block.data = mmap(nullptr, block.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
      if (block.data == MAP_FAILED) return nullptr;
      madvise(block.data, block.size, MADV_HUGEPAGE);
      mapped_ += block.size;
    }
    live_ += block.size;
    used_.emplace(block.data, block.size);
    return block.data;
  }

  std::recursive_mutex mutex_;
  std::vector<Block> cached_;  // in the order they were freed
  std::unordered_map<void*, size_t> used_;
  size_t live_ = 0, peak_ = 0, mapped_ = 0;
};

auto* const allocator = new HostAllocator;  // never destroyed: tensors may outlive static objects

void free_block(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  if (!allocator->recycle(data)) c10::free_cpu(data);
}

}  // namespace

extern "C" void install() {
  mallopt(M_MMAP_MAX, 0);  // small tensors and other libraries' memory stay in malloc's heap
  mallopt(M_TRIM_THRESHOLD, -1);
  c10::SetCPUAllocator(allocator, 1);
}

extern "C" void release() {
  allocator->release();
  malloc_trim(0);
}
