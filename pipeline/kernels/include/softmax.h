// What attention to whole sequences and to a cache have alike, so that both end in the same bits.

#pragma once

#include <cmath>

#include "exponential.h"

namespace {

constexpr int BLOCK = 512;  // keys that share a maximum

// How many of so many products the libraries under PyTorch add up in one go, before the sums are; whole
// units, of which kernels take one at a time.
inline int piece_of(int products, int piece) {
    if (products <= piece) return products;
    return products < 2 * piece ? products / 2 / Number::NUMBERS * Number::NUMBERS : piece;
}

// What is known of a token's softmax after some blocks of keys.
struct Known {
    float most = -INFINITY;  // the largest score
    float sum = 0;           // of the exponentials
};

// Scores of the keys from `first` to `end`, of whole vectors, become weights as they are stored; what
// earlier sums shrink by.
inline float weigh(float* scores, int first, int end, Known& known) {
    Vector largest = all(known.most);
    for (int t = first; t < end; t += LANES) {
        const Vector score = load<Vector>(scores + t);
        largest = score > largest ? score : largest;
    }
    const float most = most_of(largest);
    Vector sum = {};
    for (int t = first; t < end; t += LANES) {
        const Vector weight = exp_of(load<Vector>(scores + t) - most, Number{});
        sum = sum + weight;
        const Vector rounded = Number::round(weight);
        std::memcpy(scores + t, &rounded, sizeof rounded);
    }
    const float shrink = known.sum == 0 ? 0 : std::exp(known.most - most);
    known.sum = sum_of(sum) + shrink * known.sum;
    known.most = most;
    return shrink;
}

}  // namespace
