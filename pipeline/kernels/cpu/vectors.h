// Vectors of fp32 sums, and tensors of fp32 or bf16 read in units of 32 bits: one number, or two
// neighbours. NUMBER, Float32 or BFloat16, chooses at compile time. A product and a sum of vectors must
// become a fused multiply-add (-ffp-contract=fast).

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
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
    // What can be stored; not of NaN.
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
};

using Number = NUMBER;
using Stored = Number::Stored;

// Two vectors shuffled like cards, from card `from` of each: their first halves, or their second ones.
template <int from, int... lane>
inline Bits shuffled(Bits a, Bits b, std::integer_sequence<int, lane...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, (from + lane / 2 + lane % 2 * LANES)...);
#else
    return __builtin_shuffle(a, b, Bits{(from + lane / 2 + lane % 2 * LANES)...});
#endif
}

// Number i of vector j becomes number j of vector i.
inline void turn(Bits (&tile)[LANES]) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>();
    for (int width = 1; width < LANES; width *= 2) {
        Bits turned[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            turned[2 * i] = shuffled<0>(tile[i], tile[i + LANES / 2], lanes);
            turned[2 * i + 1] = shuffled<LANES / 2>(tile[i], tile[i + LANES / 2], lanes);
        }
        for (int i = 0; i < LANES; i++) tile[i] = turned[i];
    }
}

// Has a function called with an argument by so many threads: `GOMP_parallel` of PyTorch's OpenMP.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

// `parallel` may be null: the calling thread does the work.
inline void on_threads(Parallel parallel, int32_t threads, void (*run)(void*), void* work) {
    if (parallel == nullptr || threads < 2)
        run(work);
    else
        parallel(run, work, unsigned(threads), 0);
}

}  // namespace
