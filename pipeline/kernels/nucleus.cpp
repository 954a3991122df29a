// Top-p of rows of weights in float64, on the CPU. Reference: `nucleus` of inference/engine/sampling.py, which
// sorts rows.
//
// Weights are counted into bins by their leading bits, and only the bin of the cut is sorted. If the cut of a sum is
// so close to the edge of a weight that rounding could move it, the row is sorted as in the reference, so that the
// bits are always the reference's.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "include/threads.h"

namespace {

constexpr int LEADING = 46;         // of a weight's 64 bits those above: its exponent and 6 bits more
constexpr int64_t POWERS = 40;      // of 2, from 1 down, that have bins of their own
constexpr int64_t BINS = POWERS << (52 - LEADING);
constexpr int64_t HIGHEST = (int64_t(1023) << (52 - LEADING)) + 1;  // the bin of 1, counted from 0
constexpr double CLOSE = 1e-9;      // more than sums of millions of weights are rounded by

struct Nucleus {  // mirrored in sampling.py
    const double* weights;  // (rows, words), at least 0
    double* out;            // (rows, words): what is kept of them, and 0
    int64_t rows;
    int64_t words;
    double top_p;
};

// Bin 0 holds the likeliest.
inline int64_t bin_of(double weight) {
    int64_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return std::min(std::max<int64_t>(HIGHEST - (bits >> LEADING), 0), BINS - 1);
}

struct Word {
    double weight;
    int64_t id;

    // The likelier first; of equally likely ones the lower id.
    bool operator<(const Word& other) const {
        return weight != other.weight ? weight > other.weight : id < other.id;
    }
};

struct Room {
    double sums[BINS];
    std::vector<Word> words;
};

void collect(const double* weights, int64_t count, int64_t bin, Room& room) {
    room.words.clear();
    for (int64_t id = 0; id < count; id++)
        if (bin < 0 || bin_of(weights[id]) == bin) room.words.push_back({weights[id], id});
}

// As the reference has it: all are sorted, and added up one after the other.
void cut_exactly(const double* weights, int64_t count, double top_p, double* out, Room& room) {
    collect(weights, count, -1, room);
    std::sort(room.words.begin(), room.words.end());
    double sum = 0;
    for (const Word& word : room.words) {
        sum += word.weight;
        out[word.id] = sum - word.weight < top_p ? word.weight : 0;
    }
}

// Keeps the fewest likeliest that together reach `top_p`.
void cut_at(const double* weights, int64_t count, double top_p, double* out, Room& room) {
    std::memset(room.sums, 0, sizeof room.sums);
    for (int64_t id = 0; id < count; id++) room.sums[bin_of(weights[id])] += weights[id];
    double before = 0;
    int64_t bin = 0;
    while (bin < BINS - 1 && before + room.sums[bin] < top_p) before += room.sums[bin++];
    collect(weights, count, bin, room);
    std::sort(room.words.begin(), room.words.end());
    const Word* last = nullptr;  // that is kept
    for (const Word& word : room.words) {
        const double off = before - top_p;
        if (off > -CLOSE && off < CLOSE) return cut_exactly(weights, count, top_p, out, room);
        if (off > 0) break;
        last = &word;
        before += word.weight;
    }
    // Behind the last of a bin the next one begins. None is kept of an empty one, which the last bin may be where
    // all weights together don't reach `top_p`.
    if (last == nullptr || (before - top_p > -CLOSE && before - top_p < CLOSE))
        return cut_exactly(weights, count, top_p, out, room);
    for (int64_t id = 0; id < count; id++) {
        const int64_t own = bin_of(weights[id]);
        const bool is_kept = own < bin || (own == bin && !(*last < Word{weights[id], id}));
        out[id] = is_kept ? weights[id] : 0;
    }
}

bool are_weights(const double* weights, int64_t count) {
    bool all = true;
    for (int64_t id = 0; id < count; id++) all &= weights[id] >= 0;
    return all;
}

struct Work {
    const Nucleus* nucleus;
    int64_t next;     // the first row that no thread has taken
    int32_t refused;  // whether a row has what is no weight
};

void run(void* argument) {
    Work& work = *static_cast<Work*>(argument);
    const Nucleus& by = *work.nucleus;
    static thread_local Room room;
    for (;;) {
        const int64_t row = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
        if (row >= by.rows) return;
        const double* weights = by.weights + row * by.words;
        if (!are_weights(weights, by.words))
            __atomic_store_n(&work.refused, 1, __ATOMIC_RELAXED);
        else
            cut_at(weights, by.words, by.top_p, by.out + row * by.words, room);
    }
}

}  // namespace

// True if no row has a NaN.
extern "C" int32_t nucleus(const Nucleus* nucleus, Parallel parallel, int32_t threads) {
    Work work{nucleus, 0, 0};
    on_threads(parallel, threads, run, &work);
    return !work.refused;
}
