// One token of each row of log-probabilities, on the CPU. Reference: sampling.py, at temperature 1 and with no
// token removed.
//
// A row's weights are summed by blocks; the block in which the drawn share of the total falls is looked
// into again. What a row draws depends on neither the other rows nor threads.

#include <algorithm>
#include <cmath>
#include <vector>

#include "include/vectors.h"

namespace {

constexpr int BLOCK = 16 * LANES;  // tokens of a block

struct Draw {  // mirrored in sampling.py
    const float* logprobs;  // (rows, words)
    const uint64_t* keys;   // (rows), with the positions and the seed they give the drawn share
    const uint64_t* positions;
    int64_t* tokens;        // (rows): written
    float* chosen;          // (rows): written, the tokens' log-probabilities
    int64_t rows;
    int64_t words;
    uint64_t seed;
};

// The finalizer of SplitMix64 (Steele et al. 2014): a bijection of 64-bit words.
inline uint64_t mix(uint64_t state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    return state ^ (state >> 31);
}

// In [0, 1).
inline double uniform(uint64_t seed, uint64_t key, uint64_t position) {
    constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
    uint64_t state = mix(seed + GOLDEN);
    state = mix((state ^ key) + GOLDEN);
    state = mix((state ^ position) + GOLDEN);
    return double(state >> 11) * 0x1p-53;
}

// The exponentials of so many numbers; those that there are not weigh 0.
inline Vector weights_of(const float* logprobs, int64_t count) {
    if (count >= LANES) return exp_of(load<Vector>(logprobs));
    Vector part = broadcast(-INFINITY);
    std::memcpy(&part, logprobs, size_t(count) * sizeof(float));
    return exp_of(part);
}

double weight_of_block(const float* logprobs, int64_t count) {
    Vector sum = {};
    for (int64_t at = 0; at < count; at += LANES) sum = sum + weights_of(logprobs + at, count - at);
    return horizontal_sum(sum);
}

// The first number at which the sum of weights passes a share of the whole, or the last that weighs
// anything; what of the share is left for it.
struct Place {
    int64_t at = 0;
    double share = 0;
};

Place place_of(const double* weights, int64_t count, double share) {
    double total = 0, before = 0;
    for (int64_t i = 0; i < count; i++) total += weights[i];
    Place found;
    for (int64_t i = 0; i < count; i++) {
        if (weights[i] > 0) found = {i, (share * total - before) / weights[i]};
        before += weights[i];
        if (before > share * total) break;
    }
    found.share = std::min(std::max(found.share, 0.0), 1 - 0x1p-53);
    return found;
}

void draw_row(const Draw& by, int64_t row, double* blocks) {
    const float* logprobs = by.logprobs + row * by.words;
    const int64_t count = (by.words + BLOCK - 1) / BLOCK;
    for (int64_t block = 0; block < count; block++)
        blocks[block] = weight_of_block(logprobs + block * BLOCK, std::min(by.words - block * BLOCK, int64_t(BLOCK)));
    const Place block = place_of(blocks, count, uniform(by.seed, by.keys[row], by.positions[row]));
    const int64_t first = block.at * BLOCK, length = std::min(by.words - first, int64_t(BLOCK));
    double weights[BLOCK];
    for (int64_t at = 0; at < length; at += LANES) {
        const Vector part = weights_of(logprobs + first + at, length - at);
        for (int lane = 0; lane < LANES; lane++) weights[at + lane] = part[lane];
    }
    const int64_t token = first + place_of(weights, length, block.share).at;
    by.tokens[row] = token;
    by.chosen[row] = logprobs[token];
}

struct Work {
    const Draw* draw;
    int64_t next;  // the first row that no thread has taken
};

void run(void* argument) {
    Work& work = *static_cast<Work*>(argument);
    std::vector<double> blocks(size_t(work.draw->words + BLOCK - 1) / BLOCK);
    for (;;) {
        const int64_t row = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
        if (row >= work.draw->rows) return;
        draw_row(*work.draw, row, blocks.data());
    }
}

}  // namespace

extern "C" void draw(const Draw* draw, Parallel parallel, int32_t threads) {
    Work work{draw, 0};
    on_threads(parallel, threads, run, &work);
}
