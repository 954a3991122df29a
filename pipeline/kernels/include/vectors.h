// Vectors of fp32 sums, and tensors of fp32 or bf16 read in units of 32 bits: one number, or two
// neighbours. NUMBER, Float32 or BFloat16, chooses at compile time. A product and a sum of vectors must
// become a fused multiply-add (-ffp-contract=fast).

#pragma once

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

// Either is looked at as the other, and number by number.
typedef float Vector __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), may_alias));
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

// So many units from the first one on, and zeros; nothing beyond them is read.
inline Bits begun(const void* from, int count) {
#if defined(__AVX512F__)
    return as<Bits>(_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), from));
#else
    Bits to = {};
    std::memcpy(&to, from, 4 * count);
    return to;
#endif
}

// A sum over lanes, halves first.
inline float sum_of(Vector parts) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) parts[lane] += parts[lane + width];
    return parts[0];
}

inline float most_of(Vector numbers) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            numbers[lane] = numbers[lane + width] > numbers[lane] ? numbers[lane + width] : numbers[lane];
    return numbers[0];
}

// So many bytes, and zeros.
template <class To>
inline To some(const void* from, int bytes) {
    To to = {};
    std::memcpy(&to, from, bytes);
    return to;
}

inline Vector wide(Vector stored) { return stored; }
inline Vector wide(Half stored) { return as<Vector>(__builtin_convertvector(stored, Bits) << 16); }

struct Float32 {
    using Stored = float;
    static constexpr int NUMBERS = 1;  // of a unit
    static float widen(Stored stored) { return stored; }
    static Stored narrow(float value) { return value; }
    static Vector round(Vector values) { return values; }
    static Vector line() { return Vector{}; }
    static uint32_t unit(const Stored* first, int64_t) { return as<uint32_t>(*first); }
    static Vector add(Vector sum, Bits weights, uint32_t x) {
        return as<Vector>(weights) * as<float>(x) + sum;
    }
    using Factor = Stored;
    static constexpr int LINES = 1;
    template <class Units>
    static Units line(Units units, int) { return units; }
    static Vector add(Vector sum, Bits line, const Factor* x) { return as<Vector>(line) * *x + sum; }
};

struct BFloat16 {
    using Stored = uint16_t;
    static constexpr int NUMBERS = 2;
    static float widen(Stored stored) { return as<float>(uint32_t(stored) << 16); }
    static Stored narrow(float value) {
        const uint32_t bits = as<uint32_t>(value);
        const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // ties to even
        return Stored(((bits & 0x7fffffffu) > 0x7f800000u ? bits : rounded) >> 16);
    }
    // What can be stored. NaN stays where its low bits are zeros, as they are of all that came of bf16.
    static Vector round(Vector values) {
        const Bits bits = as<Bits>(values);
        return as<Vector>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
    }
    static Half line() { return Half{}; }
    static uint32_t unit(const Stored* first, int64_t stride) {
        return first[0] | uint32_t(first[stride]) << 16;
    }
    static Vector add(Vector sum, Bits weights, uint32_t x) {
#ifdef __AVX512BF16__
        const __m512i xs = _mm512_set1_epi32(int32_t(x));
        return as<Vector>(_mm512_dpbf16_ps(as<__m512>(sum), as<__m512bh>(xs), as<__m512bh>(weights)));
#else
        // As that instruction does, the second product first.
        sum = as<Vector>(weights & 0xffff0000u) * as<float>(x & 0xffff0000u) + sum;
        return as<Vector>(weights << 16) * as<float>(x << 16) + sum;
#endif
    }
    // A vector of units that many numbers are multiplied with, as LINES vectors of what an instruction takes:
    // pairs, or where there is none for them fp32 numbers, the second of each pair first.
#ifdef __AVX512BF16__
    using Factor = Stored;
    static constexpr int LINES = 1;
    template <class Units>
    static Units line(Units units, int) { return units; }
    static Vector add(Vector sum, Bits line, const Factor* x) { return add(sum, line, load<uint32_t>(x)); }
#else
    using Factor = float;
    static constexpr int LINES = 2;
    template <class Units>
    static Units line(Units units, int second) { return second ? units << 16 : units & 0xffff0000u; }
    static Vector add(Vector sum, Bits line, const Factor* x) { return as<Vector>(line) * *x + sum; }
#endif
};

using Number = NUMBER;
using Stored = Number::Stored;

// Numbers of two vectors, those of the second counted on, in the order of the indices.
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, Bits{__VA_ARGS__})
#endif

// Of each 128 bits, the numbers 0, 1 or 2, 3 of both vectors, taken in turn or two by two; and the even or
// odd ones of their parts of 128 bits.
#ifdef __AVX512F__
inline Bits low(Bits a, Bits b) { return PICK(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29); }
inline Bits high(Bits a, Bits b) { return PICK(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31); }
inline Bits low_pairs(Bits a, Bits b) { return PICK(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29); }
inline Bits high_pairs(Bits a, Bits b) { return PICK(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31); }
// Compilers that are left to choose take an instruction that is half as fast.
inline Bits even(Bits a, Bits b) { return as<Bits>(_mm512_shuffle_i32x4(as<__m512i>(a), as<__m512i>(b), 0x88)); }
inline Bits odd(Bits a, Bits b) { return as<Bits>(_mm512_shuffle_i32x4(as<__m512i>(a), as<__m512i>(b), 0xdd)); }
#else
inline Bits low(Bits a, Bits b) { return PICK(a, b, 0, 8, 1, 9, 4, 12, 5, 13); }
inline Bits high(Bits a, Bits b) { return PICK(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }
inline Bits low_pairs(Bits a, Bits b) { return PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13); }
inline Bits high_pairs(Bits a, Bits b) { return PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15); }
inline Bits even(Bits a, Bits b) { return PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11); }
inline Bits odd(Bits a, Bits b) { return PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15); }
#endif

// Of each 128 bits of four vectors, number i of vector j becomes number j of vector i.
inline void turn_four(Bits a, Bits b, Bits c, Bits d, Bits* to, int stride) {
    const Bits low_ab = low(a, b), high_ab = high(a, b), low_cd = low(c, d), high_cd = high(c, d);
    to[0] = low_pairs(low_ab, low_cd);
    to[stride] = high_pairs(low_ab, low_cd);
    to[2 * stride] = low_pairs(high_ab, high_cd);
    to[3 * stride] = high_pairs(high_ab, high_cd);
}

// Number i of vector j becomes number j of vector i: first within 128 bits, then among those.
inline void turn(Bits (&tile)[LANES]) {
    constexpr int QUARTERS = LANES / 4;
    Bits part[4][QUARTERS];  // column 4 q + c of the rows 4 r to 4 r + 3 is quarter q of part[c][r]
    for (int r = 0; r < QUARTERS; r++) {
        const Bits* row = tile + 4 * r;
        turn_four(row[0], row[1], row[2], row[3], part[0] + r, QUARTERS);
    }
    for (int c = 0; c < 4; c++) {
        const Bits* from = part[c];
        const Bits even01 = even(from[0], from[1]), odd01 = odd(from[0], from[1]);
        if constexpr (QUARTERS == 2) {
            tile[c] = even01;
            tile[4 + c] = odd01;
        } else {
            const Bits even23 = even(from[2], from[3]), odd23 = odd(from[2], from[3]);
            tile[c] = even(even01, even23);
            tile[4 + c] = even(odd01, odd23);
            tile[8 + c] = odd(even01, even23);
            tile[12 + c] = odd(odd01, odd23);
        }
    }
}

// LANES rows of LANES units, so many bytes apart, turned.
inline void turn_rows(const void* rows, int64_t stride, Bits* turned) {
#ifdef __AVX512F__
    // Every fourth row's 128 bits are put side by side as they are read: nothing else crosses them.
    const auto* first = static_cast<const char*>(rows);
    const auto part = [](const char* from) { return load<__m128i>(from); };
    for (int q = 0; q < 4; q++) {
        Bits row[4];
        for (int r = 0; r < 4; r++) {
            const char* from = first + r * stride + q * 16;
            __m512i four = _mm512_castsi128_si512(part(from));
            four = _mm512_inserti32x4(four, part(from + 4 * stride), 1);
            four = _mm512_inserti32x4(four, part(from + 8 * stride), 2);
            row[r] = as<Bits>(_mm512_inserti32x4(four, part(from + 12 * stride), 3));
        }
        turn_four(row[0], row[1], row[2], row[3], turned + 4 * q, 1);
    }
#else
    Bits tile[LANES];
    for (int n = 0; n < LANES; n++) tile[n] = load<Bits>(static_cast<const char*>(rows) + n * stride);
    turn(tile);
    std::memcpy(turned, tile, sizeof tile);
#endif
}

}  // namespace
