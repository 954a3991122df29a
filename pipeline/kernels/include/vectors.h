// Portable fp32 vectors, and rows of fp32 or bf16 elements read in units of 32 bits: one fp32 or two bf16
// elements. NUMBER, Float32 or BFloat16, selects the dtype at compile time. The compiler must contract products
// and sums of vectors into fused multiply-adds (-ffp-contract=fast).

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "threads.h"

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));

template <class To, class From>
inline To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class To>
inline To load(const void* from) {
    To to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

// Loads the first `bytes` bytes and fills the rest with zeros.
template <class To>
inline To load_partial(const void* from, int bytes) {
#ifdef __AVX512F__
    const uint64_t mask = bytes < 64 ? (uint64_t{1} << bytes) - 1 : ~uint64_t{0};
    if constexpr (sizeof(To) == 64) return as<To>(_mm512_maskz_loadu_epi8(mask, from));
    if constexpr (sizeof(To) == 32) return as<To>(_mm256_maskz_loadu_epi8(uint32_t(mask), from));
#endif
    To to = {};
    std::memcpy(&to, from, bytes);
    return to;
}

inline Vector broadcast(float value) { return value - Vector{}; }

inline float horizontal_sum(Vector parts) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) parts[lane] += parts[lane + width];
    return parts[0];
}

inline float horizontal_max(Vector numbers) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            numbers[lane] = numbers[lane + width] > numbers[lane] ? numbers[lane + width] : numbers[lane];
    return numbers[0];
}

struct Float32 {
    using Stored = float;
    static constexpr int NUMBERS = 1;  // per unit
    using Line = Vector;               // LANES elements in storage format
    static Vector widen(Line line) { return line; }
    static Stored narrow(float value) { return value; }
    static Vector add(Vector sum, Bits a, Bits b) { return as<Vector>(a) * as<Vector>(b) + sum; }
};

struct BFloat16 {
    using Stored = uint16_t;
    static constexpr int NUMBERS = 2;
    using Line = Half;
    static Vector widen(Line line) { return as<Vector>(__builtin_convertvector(line, Bits) << 16); }
    static Stored narrow(float value) {
        const uint32_t bits = as<uint32_t>(value);
        const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // ties to even
        return Stored(((bits & 0x7fffffffu) > 0x7f800000u ? bits : rounded) >> 16);
    }
    static Vector add(Vector sum, Bits a, Bits b) {
#ifdef __AVX512BF16__
        return as<Vector>(_mm512_dpbf16_ps(as<__m512>(sum), as<__m512bh>(a), as<__m512bh>(b)));
#else
        sum = as<Vector>(a & 0xffff0000u) * as<Vector>(b & 0xffff0000u) + sum;
        return as<Vector>(a << 16) * as<Vector>(b << 16) + sum;
#endif
    }
};

using Number = NUMBER;
using Stored = Number::Stored;

// Shuffles two vectors; indices of at least LANES select from the second one.
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Bits{__VA_ARGS__})
#endif

// These interleave elements 0 and 1, or 2 and 3, of each 128-bit lane of both vectors, singly or in pairs, or
// select the even or odd 128-bit lanes of both.
#ifdef __AVX512F__
inline Vector low(Vector a, Vector b) { return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29); }
inline Vector high(Vector a, Vector b) { return SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31); }
inline Vector low_pairs(Vector a, Vector b) { return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29); }
inline Vector high_pairs(Vector a, Vector b) { return SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31); }
inline Vector even(Vector a, Vector b) { return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27); }
inline Vector odd(Vector a, Vector b) { return SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31); }
#else
inline Vector low(Vector a, Vector b) { return SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13); }
inline Vector high(Vector a, Vector b) { return SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }
inline Vector low_pairs(Vector a, Vector b) { return SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13); }
inline Vector high_pairs(Vector a, Vector b) { return SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15); }
inline Vector even(Vector a, Vector b) { return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11); }
inline Vector odd(Vector a, Vector b) { return SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15); }
#endif

// Horizontal sums of four vectors within each 128-bit lane.
inline Vector sum_four(const Vector* vectors) {
    const Vector first = low(vectors[0], vectors[1]) + high(vectors[0], vectors[1]), second = low(vectors[2], vectors[3]) + high(vectors[2], vectors[3]);
    return low_pairs(first, second) + high_pairs(first, second);
}

// Element i is the horizontal sum of vector i.
inline Vector horizontal_sums(const Vector (&vectors)[LANES]) {
    const Vector one = sum_four(vectors), two = sum_four(vectors + 4);
    const Vector pair = even(one, two) + odd(one, two);
#ifdef __AVX512F__
    const Vector three = sum_four(vectors + 8), four = sum_four(vectors + 12);
    const Vector other = even(three, four) + odd(three, four);
    return even(pair, other) + odd(pair, other);
#else
    return pair;
#endif
}

inline Vector floor_lanes(Vector x) {
    const Vector truncated = __builtin_convertvector(__builtin_convertvector(x, Integers), Vector);
    return truncated - as<Vector>(as<Bits>(broadcast(1.0f)) & as<Bits>(truncated > x));
}

// exp(x) for x <= 88, within 6 ulp (4 if |x| <= 30); flushes results for x < -86.99 to 0 and propagates NaN. After
// Malossi et al. 2015, Fast Exponential Computation on SIMD Architectures.
inline Vector exp_lanes(Vector x) {
    constexpr float LOWEST = -87.33654785f, LOG2_E = 1.442695021629f;
    const Vector clamped = x > LOWEST ? x : broadcast(LOWEST);
    const Vector power = floor_lanes(clamped * LOG2_E + 0.5f);
    const Vector rest = clamped - power * 0.693147182465f;
    Vector sum = rest * 0.00828929059f + 0.0418978221f;
    sum = rest * sum + 0.166676521f;
    sum = rest * sum + 0.499991506f;
    sum = rest * sum + 0.999999701f;
    sum = rest * sum + 1.0f;
    const Bits half_power = as<Bits>(__builtin_convertvector(power - 1.0f, Integers) + 127) << 23;
    const Vector result = sum * as<Vector>(half_power) * 2.0f;
    return x == x ? as<Vector>(as<Bits>(result) & as<Bits>(x >= LOWEST)) : x;
}

}  // namespace
