// Attention of one new token per sequence over keys and values in pages, on the CPU. Reference: decode_attention.py.
//
// Keys are processed in blocks with an online softmax (Milakov and Gimelshein 2018). Sums are fp32; the lanes of
// a vector hold consecutive elements of a head. NUMBER is the dtype of all tensors.

#include <algorithm>
#include <vector>

#include "include/vectors.h"

namespace {

struct AttentionParams {  // mirrored in decode_attention.py
    const void* query;       // (rows, heads, size), with the strides below
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
    int64_t max_pages;       // pages per row
    int32_t window;          // sliding window in keys; 0 for none
    float scaling;
};

constexpr int BLOCK = 512;          // keys per softmax block
constexpr int PAGE = 64;            // tokens per page; mirrored in decode_attention.py
constexpr int MAX_HEAD_SIZE = 256;  // largest head size; mirrored in decode_attention.py
constexpr int STEP = LANES * Number::NUMBERS;

// Online softmax state of a query head.
struct Head {
    float largest = -INFINITY;  // highest score
    float total = 0;            // sum of the exponentials
    Vector sums[MAX_HEAD_SIZE / LANES] = {};
};

// Computes the scores of LANES keys; only the first `count` keys are read.
Vector score_tile(const Stored* query, const Stored* key, int64_t size, int count) {
    Vector sums[LANES] = {};
    int64_t k = 0;
    for (; k + STEP <= size && count == LANES; k += STEP) {
        const Bits part = load<Bits>(query + k);
        for (int n = 0; n < LANES; n++) sums[n] = Number::add(sums[n], load<Bits>(key + n * size + k), part);
    }
    for (; k < size; k += STEP) {
        const int bytes = int(std::min<int64_t>(STEP, size - k)) * int(sizeof(Stored));
        const Bits part = load_partial<Bits>(query + k, bytes);
        for (int n = 0; n < count; n++)
            sums[n] = Number::add(sums[n], load_partial<Bits>(key + n * size + k, bytes), part);
    }
    return horizontal_sums(sums);
}

// Data that is read after the scores. The hardware prefetcher restarts with each head of each sequence.
struct Prefetch {
    const Stored *values, *keys;  // may be null

    void fetch(int64_t from, int64_t numbers) const {
        for (const Stored* line : {values, keys})
            for (int64_t k = from; line != nullptr && k < from + numbers; k += STEP) __builtin_prefetch(line + k, 0, 2);
    }
};

// Computes the scores of `count` keys; writes a whole number of vectors.
void compute_scores(const AttentionParams& params, const Stored* query, const Stored* key, int count, float* scores, const Prefetch& prefetch) {
    for (int t = 0; t < count; t += LANES) {
        prefetch.fetch(t * params.size, LANES * params.size);
        const Vector scaled = score_tile(query, key + t * params.size, params.size, std::min(LANES, count - t)) * params.scaling;
        std::memcpy(scores + t, &scaled, sizeof scaled);
    }
}

// Converts scores to weights; returns the factor that rescales the earlier sums.
float softmax_block(float* scores, int count, Head& head) {
    Vector largest = broadcast(head.largest);
    for (int t = 0; t < count; t += LANES) {
        const Vector score = load<Vector>(scores + t);
        largest = score > largest ? score : largest;
    }
    const float highest = horizontal_max(largest);
    Vector sum = {};
    for (int t = 0; t < count; t += LANES) {
        const Vector weight = exp_lanes(load<Vector>(scores + t) - highest);
        sum = sum + weight;
        std::memcpy(scores + t, &weight, sizeof weight);
    }
    const float rescale = head.total == 0 ? 0 : std::exp(head.largest - highest);
    head.total = horizontal_sum(sum) + rescale * head.total;
    head.largest = highest;
    return rescale;
}

// Accumulates weights times values into PARTS vectors.
template <int PARTS, class Load>
void add_values(const Stored* value, int64_t size, const float* weights, int count, float rescale, Vector* to, Load line) {
    Vector sum[PARTS] = {};
    for (int t = 0; t < count; t++)
        for (int part = 0; part < PARTS; part++)
            sum[part] = Number::widen(line(value + t * size + part * LANES)) * weights[t] + sum[part];
    for (int part = 0; part < PARTS; part++) to[part] = to[part] * rescale + sum[part];
}

void add_values(const Stored* value, int64_t size, const float* weights, int count, float rescale, Vector* to) {
    const auto full = [](const Stored* from) { return load<Number::Line>(from); };
    int64_t first = 0;
    for (; first + 4 * LANES <= size; first += 4 * LANES)
        add_values<4>(value + first, size, weights, count, rescale, to + first / LANES, full);
    for (; first + LANES <= size; first += LANES)
        add_values<1>(value + first, size, weights, count, rescale, to + first / LANES, full);
    const int bytes = int(size - first) * int(sizeof(Stored));
    const auto part = [bytes](const Stored* from) { return load_partial<Number::Line>(from, bytes); };
    if (bytes > 0) add_values<1>(value + first, size, weights, count, rescale, to + first / LANES, part);
}

// Computes attention for the query heads of a row that share a key/value head.
void attend(const AttentionParams& params, int64_t row, int64_t kv_head, std::vector<Head>& heads) {
    const int64_t length = params.lengths[row], end = std::min(length, params.max_pages * PAGE);
    const int64_t start = params.window > 0 ? std::max<int64_t>(0, length - params.window) : 0;
    const int32_t* pages = params.pages + row * params.pages_row;
    const int64_t head_stride = PAGE * params.size, page_stride = params.kv_heads * head_stride;
    const auto* key = static_cast<const Stored*>(params.key) + kv_head * head_stride;
    const auto* value = static_cast<const Stored*>(params.value) + kv_head * head_stride;
    const auto offset_of = [&](uint64_t token) { return pages[token / PAGE] * page_stride + int64_t(token % PAGE) * params.size; };
    const int64_t first_head = kv_head * int64_t(heads.size());
    const auto* query = static_cast<const Stored*>(params.query) + row * params.query_row + first_head * params.query_head;
    std::fill(heads.begin(), heads.end(), Head{});
    float scores[BLOCK + LANES];
    for (int64_t first = start; first < end; first += BLOCK) {
        const int count = int(std::min<int64_t>(BLOCK, end - first));
        const auto for_pages = [&](auto visit) {  // calls visit(first key, number of keys) for each page
            for (int t = 0, num; t < count; t += num) {
                num = std::min(count - t, PAGE - int((first + t) % PAGE));
                visit(t, num);
            }
        };
        for (size_t n = 0; n < heads.size(); n++) {
            for_pages([&](int t, int num) {
                // Prefetch the next block or the next head's keys; past the last head this has no effect.
                const int64_t now = offset_of(first + t);
                const int64_t next = first + BLOCK + t < end ? offset_of(first + BLOCK + t) : offset_of(start + t) + head_stride;
                const Prefetch prefetch{n == 0 ? value + now : nullptr, n + 1 == heads.size() ? key + next : nullptr};
                compute_scores(params, query + int64_t(n) * params.query_head, key + now, num, scores + t, prefetch);
            });
            for (int t = count; t % LANES != 0; t++) scores[t] = -INFINITY;
            float rescale = softmax_block(scores, count, heads[n]);
            for_pages([&](int t, int num) {
                add_values(value + offset_of(first + t), params.size, scores + t, num, rescale, heads[n].sums);
                rescale = 1;
            });
        }
    }
    auto* out = static_cast<Stored*>(params.out) + (row * params.heads + first_head) * params.size;
    for (const Head& head : heads) {
        for (int64_t d = 0; d < params.size; d++) {
            const float sum = head.sums[d / LANES][d % LANES];
            *out++ = Number::narrow(head.total == 0 ? 0 : sum / head.total);
        }
    }
}

struct Work {
    const AttentionParams* params;
    int64_t next;  // the first key/value head not yet claimed by a thread
};

void run(void* argument) {
    Work& work = *static_cast<Work*>(argument);
    const AttentionParams& params = *work.params;
    std::vector<Head> heads(size_t(params.heads / params.kv_heads));
    for (;;) {
        const int64_t item = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
        if (item >= params.rows * params.kv_heads) return;
        attend(params, item / params.kv_heads, item % params.kv_heads, heads);
    }
}

}  // namespace

extern "C" void decode_attention(const AttentionParams* params, Parallel parallel, int32_t threads) {
    Work work{params, 0};
    run_on_threads(parallel, threads, run, &work);
}
