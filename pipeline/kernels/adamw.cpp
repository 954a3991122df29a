// AdamW over a flat vector on the CPU. Reference: adamw.py.
//
// Makes one pass over memory: reads the gradient, updates the master weights and moments, and writes a
// rounded copy of the master weights. Macros select a variant at compile time:
//
//   MOMENT      Float32 | BFloat16              dtype of both moments
//   COPY        None | BFloat16 | Float16       dtype of the copy
//   SPLIT       0 | 1                           master stored as bf16 and 16 low bits
//
// The vectors of n elements are contiguous and do not overlap. The code is portable: the compiler
// vectorizes the loop. It must not contract products and sums (-ffp-contract=off): the two fused
// multiply-adds are explicit.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "include/threads.h"

namespace {

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct Scalars {  // mirrored in adamw.py
    float decay;               // 1 - lr * weight_decay
    float exp_avg_weight;      // 1 - beta1, or -beta1 if its magnitude is smaller
    float exp_avg_from_grad;   // 1 if exp_avg_weight is -beta1: interpolate from the gradient
    float beta2;
    float exp_avg_sq_weight;   // 1 - beta2
    float root_correction;     // sqrt(1 - beta2^t)
    float eps;
    float step_size;           // -lr / (1 - beta1^t)
    float multiplier;          // scales the gradient
};

struct Vectors {
    void* master;
    void* exp_avg;
    void* exp_avg_sq;
    void* copy;
    void* low_bits;
    const float* gradient;
};

// Rounds a master weight to bf16, to nearest with ties away from zero. The result is in the upper 16 bits.
inline uint32_t nearest_weight(float master) {
    return master != master ? 0x7fc00000u : as_bits(master) + 0x8000u;
}

struct Float32 {
    using Stored = float;
    static float load(Stored stored) { return stored; }
    static Stored store(float value) { return value; }
};

struct BFloat16 {
    using Stored = uint16_t;
    static float load(uint32_t stored) { return as_float(stored << 16); }
    static Stored store(float value) { return Stored(round(value) >> 16); }
    // The result is in the upper 16 bits. Preserves infinity and NaN: arithmetic returns quiet NaNs, whose
    // quiet bit survives rounding.
    static uint32_t round(float value) {
        const uint32_t bits = as_bits(value);
        const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // ties to even
        return value != value ? bits : rounded;
    }
    static Stored store_weight(float value) { return Stored(nearest_weight(value) >> 16); }
};

struct Float16 {
    using Stored = uint16_t;
    static Stored store_weight(float value) {
        const uint32_t bits = as_bits(value);
        const uint32_t magnitude = bits & 0x7fffffffu;
        const uint32_t rebias = (127u - 15u) << 23;
        const uint32_t normal = (magnitude - rebias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        // Below 2^-14, adding 0.5 rounds: the last bit of the sum is the spacing of subnormal numbers.
        const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
        uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
        half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 rounds to infinity
        half = magnitude > 0x7f800000u ? 0x7e00u : half;
        return Stored(half | (bits >> 16 & 0x8000u));
    }
};

struct None {
    using Stored = uint8_t;
};

using Moment = MOMENT;
using Copy = COPY;
#if SPLIT
using Master = uint16_t;
#else
using Master = float;
#endif

struct Element {
    float weight;
    float average;
    float square;
};

inline Element next(Element element, float gradient, const Scalars& scalars) {
    const float grad = gradient * scalars.multiplier;
    const float base = scalars.exp_avg_from_grad != 0 ? grad : element.average;
    const float average = std::fmaf(scalars.exp_avg_weight, grad - element.average, base);
    const float square = std::fmaf(scalars.exp_avg_sq_weight * grad, grad, element.square * scalars.beta2);
    const float denominator = std::sqrt(square) / scalars.root_correction + scalars.eps;
    return {element.weight * scalars.decay + scalars.step_size * average / denominator, average, square};
}

inline float join(uint32_t weight, uint32_t low_bits) { return as_float(weight + uint32_t(int32_t(low_bits) >> 16)); }

#if SPLIT
inline float load_master(const Master* master, const int16_t* low_bits, int32_t i) {
    return join(uint32_t(master[i]) << 16, uint32_t(low_bits[i]) << 16);
}
inline void store_master(Master* master, int16_t* low_bits, int32_t i, float value) {
    master[i] = Master(nearest_weight(value) >> 16);
    low_bits[i] = int16_t(as_bits(value));
}
#else
inline float load_master(const Master* master, const int16_t*, int32_t i) { return master[i]; }
inline void store_master(Master* master, int16_t*, int32_t i, float value) { master[i] = value; }
#endif

// Updates elements [begin, begin + count) with 32-bit loop arithmetic.
void update(const Vectors& vectors, const Scalars& scalars, int64_t begin, int32_t count) {
    auto* __restrict master = static_cast<Master*>(vectors.master) + begin;
    auto* __restrict exp_avg = static_cast<Moment::Stored*>(vectors.exp_avg) + begin;
    auto* __restrict exp_avg_sq = static_cast<Moment::Stored*>(vectors.exp_avg_sq) + begin;
    [[maybe_unused]] auto* __restrict copy = static_cast<Copy::Stored*>(vectors.copy) + begin;
    auto* __restrict low_bits = static_cast<int16_t*>(vectors.low_bits) + begin;
    const float* __restrict gradient = vectors.gradient + begin;
    const Scalars local = scalars;
    for (int32_t i = 0; i < count; i++) {
        const float weight = load_master(master, low_bits, i);
        const Element updated = next({weight, Moment::load(exp_avg[i]), Moment::load(exp_avg_sq[i])}, gradient[i], local);
        exp_avg[i] = Moment::store(updated.average);
        exp_avg_sq[i] = Moment::store(updated.square);
#if HAS_COPY
        copy[i] = Copy::store_weight(updated.weight);
#endif
        store_master(master, low_bits, i, updated.weight);
    }
}

constexpr int64_t BLOCK = 1 << 16;

struct Work {
    const Vectors* vectors;
    const Scalars* scalars;
    int64_t n;
    int64_t next;  // first element that no thread has claimed
};

void run(void* argument) {
    Work& work = *static_cast<Work*>(argument);
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&work.next, BLOCK, __ATOMIC_RELAXED);
        if (begin >= work.n) return;
        const int64_t left = work.n - begin;
        update(*work.vectors, *work.scalars, begin, int32_t(left < BLOCK ? left : BLOCK));
    }
}

}  // namespace

// Updates n elements. The result does not depend on the number of threads.
extern "C" void adamw(const Vectors* vectors, const Scalars* scalars, int64_t n, Parallel parallel, int32_t threads) {
    Work work{vectors, scalars, n, 0};
    run_on_threads(n > BLOCK ? parallel : nullptr, threads, run, &work);
}
