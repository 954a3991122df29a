// Common definitions of the kernels, without CUDA headers: NVRTC finds none if only PyTorch is
// installed. For tests, the same files compile for a CPU (tests/pipeline/kernels/emulator).
#pragma once

#if !defined(__CUDACC__)
#include "emulator.h"
#endif

#define DEVICE static __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// 16-bit storage types; arithmetic is in float.
struct Bf16 {
  u16 bits;
};
struct F16 {
  u16 bits;
};

#define MINUS_INFINITY __uint_as_float(0xff800000u)

// Under the emulator, functions that access memory receive the kernel's line number.
#if defined(__CUDACC__)
#define LINE
#define SAME_LINE
#else
#define LINE , int line = __builtin_LINE()
#define SAME_LINE , line
#endif

// Explicit global-memory accesses. For a pointer that was itself loaded from memory, the compiler
// can't infer the address space and would emit slower generic instructions.
#if defined(__CUDACC__)
DEVICE uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
DEVICE uint2 load8(const void* p) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
DEVICE u64 load_u64(const void* p) {
  u64 v;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}
DEVICE u32 load4(const void* p) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
DEVICE u16 load2(const void* p) {
  u16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}
// For data that the launch doesn't write and reads only once: it may bypass the L1 cache.
DEVICE uint4 load16_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
DEVICE void store16(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
DEVICE void store8(void* p, uint2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void store4(void* p, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void store2(void* p, u16 v) { asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory"); }
DEVICE float to_float(F16 x) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
}
DEVICE void round_to(float f, F16& x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(f)); }
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#define SHARED(type, name)                                    \
  extern __shared__ __align__(16) unsigned char name##_raw[]; \
  type* name = reinterpret_cast<type*>(name##_raw)
#else
#define READ(type, p) (emulator::check_access(p, sizeof(type), line), *static_cast<const type*>(p))
#define WRITE(type, p, v) (emulator::check_access(p, sizeof(type), line), *static_cast<type*>(p) = v)
DEVICE uint4 load16(const void* p LINE) { return READ(uint4, p); }
DEVICE uint2 load8(const void* p LINE) { return READ(uint2, p); }
DEVICE u64 load_u64(const void* p LINE) { return READ(u64, p); }
DEVICE u32 load4(const void* p LINE) { return READ(u32, p); }
DEVICE u16 load2(const void* p LINE) { return READ(u16, p); }
DEVICE uint4 load16_once(const void* p LINE) { return READ(uint4, p); }
DEVICE void store16(void* p, uint4 v LINE) { WRITE(uint4, p, v); }
DEVICE void store8(void* p, uint2 v LINE) { WRITE(uint2, p, v); }
DEVICE void store4(void* p, u32 v LINE) { WRITE(u32, p, v); }
DEVICE void store2(void* p, u16 v LINE) { WRITE(u16, p, v); }
DEVICE float to_float(F16 x) {
  _Float16 h;
  memcpy(&h, &x, sizeof(h));
  return h;
}
DEVICE void round_to(float f, F16& x) {
  const _Float16 h = f;
  memcpy(&x, &h, sizeof(h));
}
DEVICE float exp2_fast(float x) { return exp2f(x); }
#define SHARED(type, name) type* name = static_cast<type*>(emulator::shared_memory())
#endif

DEVICE double load_double(const double* p LINE) {
  union {
    u64 bits;
    double value;
  } both = {load_u64(p SAME_LINE)};
  return both.value;
}
DEVICE i64 load_i64(const i64* p LINE) { return static_cast<i64>(load_u64(p SAME_LINE)); }
DEVICE float load_float(const float* p LINE) { return __uint_as_float(load4(p SAME_LINE)); }
DEVICE int load_int(const int* p LINE) { return static_cast<int>(load4(p SAME_LINE)); }

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(Bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
DEVICE void round_to(float f, float& x) { x = f; }
// To nearest, ties to even; NaN becomes PyTorch's NaN.
DEVICE void round_to(float f, Bf16& x) {
  const u32 bits = __float_as_uint(f);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  x.bits = static_cast<u16>(is_nan ? 0x7fc0u : rounded >> 16);
}

// Single elements.
DEVICE void load_one(const float* p, float& x LINE) { x = load_float(p SAME_LINE); }
DEVICE void load_one(const Bf16* p, Bf16& x LINE) { x.bits = load2(p SAME_LINE); }
DEVICE void load_one(const F16* p, F16& x LINE) { x.bits = load2(p SAME_LINE); }
DEVICE void store_one(float* p, float x LINE) { store4(p, __float_as_uint(x) SAME_LINE); }
DEVICE void store_one(Bf16* p, Bf16 x LINE) { store2(p, x.bits SAME_LINE); }
DEVICE void store_one(F16* p, F16 x LINE) { store2(p, x.bits SAME_LINE); }
template <class T>
DEVICE float read(const T* p LINE) {
  T x;
  load_one(p, x SAME_LINE);
  return to_float(x);
}
template <class T>
DEVICE void write(T* p, float f LINE) {
  T x;
  round_to(f, x);
  store_one(p, x SAME_LINE);
}
