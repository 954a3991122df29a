// The two exponential functions of PyTorch's attention (after Malossi et al. 2015, Fast Exponential
// Computation on SIMD Architectures, with its coefficients), one for each number format of the result.

#pragma once

#include "vectors.h"

namespace {

inline Vector all(float value) { return value - Vector{}; }

typedef int32_t Whole __attribute__((vector_size(4 * LANES)));

inline Vector floor_of(Vector x) {
    const Vector cut = __builtin_convertvector(__builtin_convertvector(x, Whole), Vector);
    return cut - as<Vector>(as<Bits>(all(1.0f)) & as<Bits>(cut > x));
}

constexpr float LOWEST = -87.33654785f;  // exponentials of less are no normal numbers
constexpr float LOG2_E = 1.442695021629f;

// exp(x) of x that are at most 0; NaN stays.
inline Vector exp_of(Vector x, Float32) {
    const Vector clamped = x > LOWEST ? x : all(LOWEST);
    const Vector whole = floor_of(clamped * LOG2_E + 0.5f);
    const Vector rest = clamped - whole * 0.693147182465f;
    Vector sum = rest * 0.00828929059f + 0.0418978221f;
    sum = rest * sum + 0.166676521f;
    sum = rest * sum + 0.499991506f;
    sum = rest * sum + 0.999999701f;
    sum = rest * sum + 1.0f;
    const Bits half_power = as<Bits>(__builtin_convertvector(whole - 1.0f, Whole) + 127) << 23;
    const Vector result = sum * as<Vector>(half_power) * 2.0f;
    return x == x ? as<Vector>(as<Bits>(result) & as<Bits>(x >= LOWEST)) : x;
}

// For results that are rounded to 16 bits: x log2(e) becomes the exponent and the fraction of a float.
inline Vector exp_of(Vector x, BFloat16) {
    const Vector clamped = x > LOWEST ? x : all(LOWEST);
    Vector power = clamped * LOG2_E;
    const Vector fraction = power - floor_of(power);
    Vector off = fraction * -0.079204240219773236f + -0.22433836478672356f;
    off = fraction * off + 0.30354260500649682f;
    off = fraction * off + 0.00010703434948458272f;
    power = power - off;
    const Vector bits = power * 8388608.0f + 8388608.0f * 127.0f;
    const Bits result = as<Bits>(__builtin_convertvector(bits, Whole));
    return x == x ? as<Vector>(result & as<Bits>(x >= LOWEST)) : x;
}

}  // namespace
