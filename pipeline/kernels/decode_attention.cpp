// Attention of one new token per sequence over keys and values in pages, on the CPU. Reference: decode_attention.py.
//
// Keys are processed in blocks with an online softmax (Milakov and Gimelshein 2018). Sums are fp32; the lanes of
// a vector hold consecutive elements of a head. NUMBER is the dtype of all tensors.

#include <algorithm>
#include <vector>

#include "include/vectors.h"

namespace {

struct Attention {  // mirrored in decode_attention.py
    const void* query;       // (rows, heads, size), strides given
    const void* key;         // (pages, kv_heads, PAGE, size)
    const void* value;
    void* out;               // (rows, heads, size)
    const int32_t* lengths;  // per row: one past its last visible key; may exceed its pages
    const int32_t* pages;    // per row: its pages in the order of its tokens
    int64_t rows;
    int64_t heads;
    int64_t kv_heads;
    int64_t size;            // a multiple of Number::NUMBERS
    int64_t query_row;       // strides, in elements
    int64_t query_head;
    int64_t pages_row;
    int64_t most;            // pages of a row
    int32_t window;          // sliding window in keys; 0 for none
    float scaling;
};

constexpr int BLOCK = 512;  // keys per softmax block
constexpr int PAGE = 64;        // tokens of a page; mirrored in decode_attention.py
constexpr int MAX_HEAD_SIZE = 256;  // largest head size; mirrored in decode_attention.py
constexpr int STEP = LANES * Number::NUMBERS;

// Online softmax state of a query head.
struct Head {
    float largest = -INFINITY;  // highest score
    float total = 0;            // sum of the exponentials
    Vector sums[MAX_HEAD_SIZE / LANES] = {};
};

// Scores of LANES keys; only the first `live` are read.
Vector score_tile(const Stored* query, const Stored* key, int64_t size, int live) {
    Vector sums[LANES] = {};
    int64_t k = 0;
    for (; k + STEP <= size && live == LANES; k += STEP) {
        const Bits part = load<Bits>(query + k);
        for (int n = 0; n < LANES; n++) sums[n] = Number::add(sums[n], load<Bits>(key + n * size + k), part);
    }
    for (; k < size; k += STEP) {
        const int bytes = int(std::min<int64_t>(STEP, size - k)) * int(sizeof(Stored));
        const Bits part = load_part<Bits>(query + k, bytes);
        for (int n = 0; n < live; n++)
            sums[n] = Number::add(sums[n], load_part<Bits>(key + n * size + k, bytes), part);
    }
    return horizontal_sums(sums);
}

// Data that is read after the scores. The hardware prefetcher restarts with each head of each sequence.
struct Soon {
    const Stored *values, *keys;  // may be null

    void fetch(int64_t from, int64_t numbers) const {
        for (const Stored* line : {values, keys})
            for (int64_t k = from; line != nullptr && k < from + numbers; k += STEP) __builtin_prefetch(line + k, 0, 2);
    }
};

// Scores of `count` keys; writes a whole number of vectors.
void compute_scores(const Attention& by, const Stored* query, const Stored* key, int count, float* scores, const Soon& soon) {
    for (int t = 0; t < count; t += LANES) {
        soon.fetch(t * by.size, LANES * by.size);
        const Vector scaled = score_tile(query, key + t * by.size, by.size, std::min(LANES, count - t)) * by.scaling;
        std::memcpy(scores + t, &scaled, sizeof scaled);
    }
}

// Turns scores into weights; returns the rescaling factor of the earlier sums.
float softmax_block(float* scores, int count, Head& head) {
    Vector largest = broadcast(head.largest);
    for (int t = 0; t < count; t += LANES) {
        const Vector score = load<Vector>(scores + t);
        largest = score > largest ? score : largest;
    }
    const float most = horizontal_max(largest);
    Vector sum = {};
    for (int t = 0; t < count; t += LANES) {
        const Vector weight = exp_of(load<Vector>(scores + t) - most);
        sum = sum + weight;
        std::memcpy(scores + t, &weight, sizeof weight);
    }
    const float shrink = head.total == 0 ? 0 : std::exp(head.largest - most);
    head.total = horizontal_sum(sum) + shrink * head.total;
    head.largest = most;
    return shrink;
}

// Accumulates weights times values into PARTS vectors.
template <int PARTS, class Load>
void add_values(const Stored* value, int64_t size, const float* weights, int count, float shrink, Vector* to, Load line) {
    Vector sum[PARTS] = {};
    for (int t = 0; t < count; t++)
        for (int part = 0; part < PARTS; part++)
            sum[part] = Number::widen(line(value + t * size + part * LANES)) * weights[t] + sum[part];
    for (int part = 0; part < PARTS; part++) to[part] = to[part] * shrink + sum[part];
}

void add_values(const Stored* value, int64_t size, const float* weights, int count, float shrink, Vector* to) {
    const auto full = [](const Stored* from) { return load<Number::Line>(from); };
    int64_t first = 0;
    for (; first + 4 * LANES <= size; first += 4 * LANES)
        add_values<4>(value + first, size, weights, count, shrink, to + first / LANES, full);
    for (; first + LANES <= size; first += LANES)
        add_values<1>(value + first, size, weights, count, shrink, to + first / LANES, full);
    const int bytes = int(size - first) * int(sizeof(Stored));
    const auto part = [bytes](const Stored* from) { return load_part<Number::Line>(from, bytes); };
    if (bytes > 0) add_values<1>(value + first, size, weights, count, shrink, to + first / LANES, part);
}

// Attention of the query heads of a row that share a key head.
void attend(const Attention& by, int64_t row, int64_t kv_head, std::vector<Head>& heads) {
    const int64_t length = by.lengths[row], end = std::min(length, by.most * PAGE);
    const int64_t start = by.window > 0 ? std::max<int64_t>(0, length - by.window) : 0;
    const int32_t* pages = by.pages + row * by.pages_row;
    const int64_t of_head = PAGE * by.size, of_page = by.kv_heads * of_head;
    const auto* key = static_cast<const Stored*>(by.key) + kv_head * of_head;
    const auto* value = static_cast<const Stored*>(by.value) + kv_head * of_head;
    const auto at = [&](uint64_t token) { return pages[token / PAGE] * of_page + int64_t(token % PAGE) * by.size; };
    const int64_t first_head = kv_head * int64_t(heads.size());
    const auto* query = static_cast<const Stored*>(by.query) + row * by.query_row + first_head * by.query_head;
    std::fill(heads.begin(), heads.end(), Head{});
    float scores[BLOCK + LANES];
    for (int64_t first = start; first < end; first += BLOCK) {
        const int count = int(std::min<int64_t>(BLOCK, end - first));
        const auto for_pages = [&](auto each) {  // calls each(first key, number of keys) for the part of each page
            for (int t = 0, part; t < count; t += part) {
                part = std::min(count - t, PAGE - int((first + t) % PAGE));
                each(t, part);
            }
        };
        for (size_t n = 0; n < heads.size(); n++) {
            for_pages([&](int t, int part) {
                // Prefetch the next block or the next head's keys; past the last head this has no effect.
                const int64_t now = at(first + t);
                const int64_t next = first + BLOCK + t < end ? at(first + BLOCK + t) : at(start + t) + of_head;
                const Soon soon{n == 0 ? value + now : nullptr, n + 1 == heads.size() ? key + next : nullptr};
                compute_scores(by, query + int64_t(n) * by.query_head, key + now, part, scores + t, soon);
            });
            for (int t = count; t % LANES != 0; t++) scores[t] = -INFINITY;
            float shrink = softmax_block(scores, count, heads[n]);
            for_pages([&](int t, int part) {
                add_values(value + at(first + t), by.size, scores + t, part, shrink, heads[n].sums);
                shrink = 1;
            });
        }
    }
    auto* out = static_cast<Stored*>(by.out) + (row * by.heads + first_head) * by.size;
    for (const Head& head : heads) {
        for (int64_t d = 0; d < by.size; d++) {
            const float sum = head.sums[d / LANES][d % LANES];
            *out++ = Number::narrow(head.total == 0 ? 0 : sum / head.total);
        }
    }
}

struct Work {
    const Attention* attention;
    int64_t next;  // the first key head not yet claimed by a thread
};

void run(void* argument) {
    Work& work = *static_cast<Work*>(argument);
    const Attention& by = *work.attention;
    std::vector<Head> heads(size_t(by.heads / by.kv_heads));
    for (;;) {
        const int64_t item = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
        if (item >= by.rows * by.kv_heads) return;
        attend(by, item / by.kv_heads, item % by.kv_heads, heads);
    }
}

}  // namespace

extern "C" void decode_attention(const Attention* attention, Parallel parallel, int32_t threads) {
    Work work{attention, 0};
    on_threads(parallel, threads, run, &work);
}
