// The part of CUDA that kernels use, for kernels compiled for a CPU. Thread blocks run one at a time;
// their threads are fibers. The scheduler is in emulator.cpp.
//
// Checks at run time: every access to global memory is aligned and within an array that the test
// registered; shared memory is NaN until written and is followed by a guard; all threads of a block
// reach the same barrier, and all lanes of a mask the same shuffle. The test chooses the order in
// which threads and blocks run: with a race, the result depends on it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulator {
struct Index {
  unsigned x, y, z;
};
// Of the running fiber.
extern Index thread_index, block_index, block_shape, grid_shape;
void* shared_memory();
void check_access(const void* address, unsigned bytes, int line);
int barrier(int predicate, int line);
// Exchange 8 bytes among the lanes of `mask`; out[i] is the value of lane i.
void exchange(unsigned mask, const void* value, unsigned bytes, uint64_t* out, const char* what,
              int line);
int lane();
void fail(const char* reason, int line);

template <class T>
inline T as(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_shape
#define gridDim emulator::grid_shape

inline void __syncthreads(int line = __builtin_LINE()) { emulator::barrier(0, line); }
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return emulator::barrier(predicate, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  uint64_t values[32];
  const int nothing = 0;
  emulator::exchange(mask, &nothing, sizeof(nothing), values, "__syncwarp", line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int other, int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= 8, "a shuffle takes up to 8 bytes");
  uint64_t values[32];
  emulator::exchange(mask, &value, sizeof(T), values, "__shfl_xor_sync", line);
  const int source = emulator::lane() ^ other;
  if (!(mask >> source & 1)) emulator::fail("a shuffle reads a lane outside of its mask", line);
  return emulator::as<T>(values[source]);
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= 8, "a shuffle takes up to 8 bytes");
  uint64_t values[32];
  emulator::exchange(mask, &value, sizeof(T), values, "__shfl_sync", line);
  if (!(mask >> (source & 31) & 1)) emulator::fail("a shuffle reads a lane outside of its mask", line);
  return emulator::as<T>(values[source & 31]);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, int other, int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= 8, "a shuffle takes up to 8 bytes");
  uint64_t values[32];
  emulator::exchange(mask, &value, sizeof(T), values, "__shfl_up_sync", line);
  const int source = emulator::lane() - other;
  if (source < 0) return value;
  if (!(mask >> source & 1)) emulator::fail("a shuffle reads a lane outside of its mask", line);
  return emulator::as<T>(values[source]);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  uint64_t values[32];
  emulator::exchange(mask, &predicate, sizeof(predicate), values, "__ballot_sync", line);
  unsigned result = 0;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1 && emulator::as<int>(values[i])) result |= 1u << i;
  return result;
}
// In shared memory. It is atomic because fibers run one at a time.
template <class T>
inline T atomicAdd(T* address, T value) {
  const T before = *address;
  *address += value;
  return before;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline float __uint_as_float(unsigned bits) { return emulator::as<float>(bits); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
using std::fmaxf;
using std::fminf;
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
