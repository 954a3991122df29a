// Numbers of 8 bits in blocks that share a power of two. Reference: adamw/eight_bits.py, the same to
// the bit; there are the format and its error. For a CPU, and after prelude.cuh for a GPU.
#pragma once

#if defined(DEVICE)
#define CODE_FUNCTION DEVICE
CODE_FUNCTION float float_of(u32 bits) { return __uint_as_float(bits); }
CODE_FUNCTION u32 bits_of(float value) { return __float_as_uint(value); }
#else
#include <cstdint>
#include <cstring>
#define CODE_FUNCTION static inline
typedef uint32_t u32;
CODE_FUNCTION float float_of(u32 bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
CODE_FUNCTION u32 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
#endif

constexpr int CODES = 32;            // of a block
constexpr u32 REST = (1u << 20) - 1;  // bits of a number in fp32 that its code has no room for
constexpr u32 INFINITE = 0x7f800000u;

// The shared power of two, as a biased exponent, by the bits of the largest magnitude: with it the largest
// has a code even if it is rounded up. 255 where it is not finite, or nearly so.
CODE_FUNCTION u32 exponent_of(u32 largest) {
    const u32 finite = largest < 0x7f000000u ? largest : 0x7f000000u;
    const u32 exponent = (finite + REST) >> 23;
    return exponent < 64 ? 64 : exponent > 253 ? 255 : exponent;
}
// What codes of a block are multiplied by, and numbers before they become codes.
CODE_FUNCTION float scale_of(u32 exponent) { return float_of(exponent << 23); }
CODE_FUNCTION float inverse_of(u32 exponent) { return float_of((254 - (exponent < 253 ? exponent : 253)) << 23); }

// Random bits for both moments of an element, from all bits of both: the lower 20 and the upper 20.
CODE_FUNCTION u32 noise_of(float average, float square) {
    const u32 other = bits_of(square);
    u32 hash = bits_of(average) ^ (other << 16 | other >> 16);
    hash = (hash ^ hash >> 16) * 0x85ebca6bu;
    hash = (hash ^ hash >> 13) * 0xc2b2ae35u;
    return hash ^ hash >> 16;
}

// Magnitudes with 3 bits of mantissa, whose largest exponent has this number.
template <u32 TOP>
struct Codes {
    static constexpr u32 LARGEST = TOP << 3 | 7;

    // Below this number codes are as far apart as above it, and begin with 0.
    static constexpr u32 EVEN = (128 - TOP) << 23;

    // No branches, and what is chosen are constants, so that a loop over this becomes SIMD.
    CODE_FUNCTION float load(u32 code, float scale) {
        const u32 is_even = code < 8 ? 1 : 0;
        const float moved = float_of((code + ((127 - TOP + is_even) << 3)) << 20);
        return (moved - float_of(EVEN * is_even)) * scale;
    }
    // `noise` are 20 random bits.
    CODE_FUNCTION u32 store(float magnitude, float inverse, u32 noise) {
        const float scaled = magnitude * inverse;
        const u32 is_even = bits_of(scaled) < EVEN ? 1 : 0;
        const u32 bits = bits_of(scaled + float_of(EVEN * is_even));
        const u32 finite = bits < INFINITE ? bits : INFINITE;
        const u32 code = ((finite + noise) >> 20) - ((127 - TOP + is_even) << 3);
        return code < LARGEST ? code : LARGEST;
    }
};

// Of the average of gradients: a sign and 7 bits.
struct AverageCodes {
    CODE_FUNCTION float load(u32 code, float scale) {
        return float_of(bits_of(Codes<15>::load(code & 127u, scale)) | (code & 128u) << 24);
    }
    CODE_FUNCTION u32 store(float value, float inverse, u32 noise) {
        const u32 bits = bits_of(value);
        const u32 code = Codes<15>::store(float_of(bits & 0x7fffffffu), inverse, noise & REST);
        return code | (bits >> 24 & 128u);
    }
};

// Of the average of their squares, which are not below 0; above 0 they stay so.
struct SquareCodes {
    CODE_FUNCTION float load(u32 code, float scale) { return Codes<31>::load(code, scale); }
    CODE_FUNCTION u32 store(float value, float inverse, u32 noise) {
        const u32 code = Codes<31>::store(value, inverse, noise >> 12);
        const u32 is_lost = (code == 0 ? 1 : 0) & (bits_of(value) != 0 ? 1 : 0);
        return code + is_lost;
    }
};
