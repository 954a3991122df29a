// Samples the next token of each sequence from its logits.
// Reference: sampling.py.
//
// logits is (row, word) with any row stride; words are the vocabulary's tokens. One block samples one
// row. Nothing is sorted. Each word's distance below the highest score, in units of 2^-27 nats, and
// its weight are integers, so that sums don't depend on their order and comparisons are exact. The
// words kept are those below a threshold distance and the first ones at it. The threshold is found by
// radix selection: a histogram of the next 8 bits of the words that match the bits found so far.
// Weights are summed over segments of 128 words: the draw finds the segment, then the word in it.
//
// Macros: NUMBER, the dtype of the logits, is float, Bf16 or F16.
#include "prelude.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)
#define SEGMENT 128
#define BINS 256
#define MAX_WEIGHT 17592186044416.f  // 2^44, the weight of the most likely word
#define MAX_DISTANCE 0xffffffffu     // 32 nats or more below the most likely word: weight 0
#define MAX_INT 0x7fffffff
#define FULL_MASK 0xffffffffu

// Mirrored in sampling.py.
struct SampleParams {
  const void* logits;
  const i64* keys;
  const i64* positions;
  i64* tokens;
  float* logprobs;
  i64 row_stride;
  u64 seed;
  double top_p, min_p;
  float temperature;  // 0 is greedy
  int vocabulary_size, top_k;  // top_k 0 keeps all
};
static_assert(sizeof(SampleParams) == PARAMS_BYTES, "see sampling.py");

struct Shared {
  u64 bins[BINS];
  u64 above, total;
  float highest[WARPS];
  int first[WARPS];
  u32 digit;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "see sampling.py");

// The words that may be drawn: those below `distance` and the first `ties` words at it, if their
// probability relative to the most likely word is at least `min_relative`.
struct Threshold {
  u32 distance;
  int ties;
  double min_relative;
};

struct Row {
  const NUMBER* logits;
  float temperature, highest;
  int vocabulary_size, num_segments;
  Shared* shared;
  u64* weights;  // per segment
  int* ties;     // words at the threshold distance, per segment
};

DEVICE float score(const Row& row, int word) {
  const float logit = read(row.logits + word);
  return row.temperature > 0 ? logit / row.temperature : logit;
}
DEVICE u32 distance(const Row& row, int word) {
  const float nats = row.highest - score(row, word);
  return nats < 32.f ? static_cast<u32>(nats * 134217728.f) : MAX_DISTANCE;  // also for NaN
}
DEVICE float relative_weight(u32 distance) { return expf(static_cast<float>(distance) * -(1.f / 134217728.f)); }
DEVICE u64 weight(u32 distance) { return static_cast<u64>(relative_weight(distance) * MAX_WEIGHT); }
DEVICE bool is_likely(const Threshold& threshold, u32 distance) {
  return threshold.min_relative == 0 || static_cast<double>(relative_weight(distance)) >= threshold.min_relative;
}

template <class T>
DEVICE T warp_sum(T value LINE) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(FULL_MASK, value, other SAME_LINE);
  return value;
}
// Inclusive prefix sum over the lanes.
template <class T>
DEVICE T prefix_sum(T value LINE) {
#pragma unroll
  for (int other = 1; other < 32; other *= 2) {
    const T before = __shfl_up_sync(FULL_MASK, value, other SAME_LINE);
    if (threadIdx.x % 32 >= other) value += before;
  }
  return value;
}

// Finds the highest score and the first word with it; returns false if any is NaN or the highest is infinite.
DEVICE bool find_highest(Row& row, int& first) {
  float highest = MINUS_INFINITY;
  bool is_number = true;
  first = MAX_INT;
  for (int word = threadIdx.x; word < row.vocabulary_size; word += THREADS) {
    const float x = score(row, word);
    is_number = is_number && x == x;
    if (x > highest) highest = x, first = word;
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    const float other_highest = __shfl_xor_sync(FULL_MASK, highest, other);
    const int other_first = __shfl_xor_sync(FULL_MASK, first, other);
    if (other_highest > highest || (other_highest == highest && other_first < first))
      highest = other_highest, first = other_first;
  }
  if (threadIdx.x % 32 == 0) {
    row.shared->highest[threadIdx.x / 32] = highest;
    row.shared->first[threadIdx.x / 32] = first;
  }
  is_number = !__syncthreads_or(!is_number);
  for (int warp = 0; warp < WARPS; warp++) {
    const float other = row.shared->highest[warp];
    if (other > highest || (other == highest && row.shared->first[warp] < first))
      highest = other, first = row.shared->first[warp];
  }
  if (first == MAX_INT) first = 0;  // all scores are -inf
  row.highest = highest;
  return is_number && highest > MINUS_INFINITY && highest < -MINUS_INFINITY;
}

// Computes the weight of each segment under a threshold, and returns the sum of all weights.
DEVICE u64 compute_weights(const Row& row, const Threshold& threshold) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int segment = warp; segment < row.num_segments; segment += WARPS) {
    u64 sum = 0;
    int ties = 0;
#pragma unroll
    for (int part = 0; part < SEGMENT; part += 32) {
      const int word = segment * SEGMENT + part + lane;
      if (word >= row.vocabulary_size) continue;
      const u32 d = distance(row, word);
      if (d < threshold.distance && is_likely(threshold, d)) sum += weight(d);
      ties += d == threshold.distance;
    }
    sum = warp_sum(sum);
    ties = warp_sum(ties);
    if (lane == 0) row.weights[segment] = sum, row.ties[segment] = ties;
  }
  __syncthreads();
  if (warp == 0) {
    const u64 tie_weight = is_likely(threshold, threshold.distance) ? weight(threshold.distance) : 0;
    u64 total = 0;
    int before = 0;
    for (int first = 0; first < row.num_segments; first += 32) {
      const int segment = first + lane;
      const bool exists = segment < row.num_segments;
      const int ties = exists ? row.ties[segment] : 0;
      const int inclusive = before + prefix_sum(ties);
      const int kept = min(ties, max(0, threshold.ties - (inclusive - ties)));
      const u64 sum = exists ? row.weights[segment] + kept * tie_weight : 0;
      if (exists) row.weights[segment] = sum;
      total += warp_sum(sum);
      before = __shfl_sync(FULL_MASK, inclusive, 31);
    }
    if (lane == 0) row.shared->total = total;
  }
  __syncthreads();
  const u64 total = row.shared->total;
  __syncthreads();  // the next call overwrites it
  return total;
}

// Returns the distance at which the words, by increasing distance, reach `wanted` in number or in
// weight; sets `above` to the number or weight of the words below that distance.
DEVICE u32 find_distance(const Row& row, u64 wanted, bool by_weight, u64& above) {
  Shared* shared = row.shared;
  u32 prefix = 0;
  above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared->bins[bin] = 0;
    __syncthreads();
    for (int word = threadIdx.x; word < row.vocabulary_size; word += THREADS) {
      const u32 d = distance(row, word);
      const bool has_prefix = shift == 24 || d >> (shift + 8) == prefix >> (shift + 8);
      const u64 amount = !has_prefix ? 0 : by_weight ? weight(d) : 1;
      if (amount) atomicAdd(&shared->bins[d >> shift & (BINS - 1)], amount);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x, bins_per_lane = BINS / 32;
      u64 local = 0;
#pragma unroll
      for (int bin = 0; bin < bins_per_lane; bin++) local += shared->bins[lane * bins_per_lane + bin];
      u64 sum = above + prefix_sum(local);
      const u32 reached = __ballot_sync(FULL_MASK, sum >= wanted);
      if (lane == (reached ? __ffs(reached) - 1 : 31)) {
        int bin = lane * bins_per_lane;
        for (sum -= local; bin < lane * bins_per_lane + bins_per_lane - 1; bin++) {
          if (sum + shared->bins[bin] >= wanted) break;
          sum += shared->bins[bin];
        }
        shared->digit = bin;
        shared->above = sum;
      }
    }
    __syncthreads();
    prefix |= shared->digit << shift;
    above = shared->above;
  }
  return prefix;
}

DEVICE Threshold compute_threshold(const SampleParams& p, const Row& row, u64 total) {
  Threshold threshold = {MAX_DISTANCE, MAX_INT, 0};
  u64 above;
  if (p.top_k > 0) threshold.distance = find_distance(row, p.top_k, false, above);
  if (p.top_p < 1) {
    if (p.top_k > 0) total = compute_weights(row, threshold);
    const double share = ceil(p.top_p * static_cast<double>(total));
    const u64 wanted = share < static_cast<double>(total) ? static_cast<u64>(share) : total;
    // Covers all words: the threshold falls within those that top-k keeps.
    threshold.distance = find_distance(row, wanted, true, above);
    const u64 tie_weight = weight(threshold.distance);
    if (tie_weight) threshold.ties = static_cast<int>((wanted - above + tie_weight - 1) / tie_weight);
  }
  threshold.min_relative = p.min_p;
  return threshold;
}

DEVICE u64 splitmix64(u64 state) {
  state += 0x9e3779b97f4a7c15ull;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebull;
  return state ^ (state >> 31);
}

// Returns the word where the cumulative weight passes `point`. Called by the first warp.
DEVICE int find_word(const Row& row, const Threshold& threshold, u64 point) {
  const int lane = threadIdx.x % 32;
  u64 before = 0;
  int ties = 0, segment = 0;
  for (int first = 0; first < row.num_segments; first += 32) {
    const bool exists = first + lane < row.num_segments;
    const u64 local = exists ? row.weights[first + lane] : 0;
    const int local_ties = exists ? row.ties[first + lane] : 0;
    const u64 inclusive = before + prefix_sum(local);
    const int inclusive_ties = ties + prefix_sum(local_ties);
    const u32 passed = __ballot_sync(FULL_MASK, inclusive > point);
    const int from = passed ? __ffs(passed) - 1 : 31;
    before = __shfl_sync(FULL_MASK, passed ? inclusive - local : inclusive, from);
    ties = __shfl_sync(FULL_MASK, passed ? inclusive_ties - local_ties : inclusive_ties, from);
    segment = first + from;
    if (passed) break;
  }
  for (int part = 0; part < SEGMENT; part += 32) {
    const int word = segment * SEGMENT + part + lane;
    const bool exists = word < row.vocabulary_size;
    const u32 d = exists ? distance(row, word) : MAX_DISTANCE;
    const u32 tied = __ballot_sync(FULL_MASK, exists && d == threshold.distance);
    const int rank = ties + __popc(tied & ((1u << lane) - 1));
    const bool kept = exists && (d < threshold.distance || (d == threshold.distance && rank < threshold.ties));
    const u64 inclusive = before + prefix_sum(kept && is_likely(threshold, d) ? weight(d) : u64{0});
    const u32 passed = __ballot_sync(FULL_MASK, inclusive > point);
    if (passed) return segment * SEGMENT + part + __ffs(passed) - 1;
    before = __shfl_sync(FULL_MASK, inclusive, 31);
    ties += __popc(tied);
  }
  return row.vocabulary_size - 1;  // unreachable: the chosen segment passes the point
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sampling(SampleParams p) {
  SHARED(Shared, shared);
  Row row;
  row.logits = static_cast<const NUMBER*>(p.logits) + blockIdx.x * p.row_stride;
  row.temperature = p.temperature;
  row.vocabulary_size = p.vocabulary_size;
  row.num_segments = (p.vocabulary_size + SEGMENT - 1) / SEGMENT;
  row.shared = shared;
  row.weights = reinterpret_cast<u64*>(shared + 1);
  row.ties = reinterpret_cast<int*>(row.weights + row.num_segments);
  int word;
  const bool is_valid = find_highest(row, word);
  const u64 full_total = compute_weights(row, {MAX_DISTANCE, MAX_INT, 0});
  if (p.temperature > 0) {
    const Threshold threshold = compute_threshold(p, row, full_total);
    const bool keeps_all = threshold.distance == MAX_DISTANCE && threshold.min_relative == 0;
    const u64 total = keeps_all ? full_total : compute_weights(row, threshold);
    if (threadIdx.x < 32 && total > 0) {
      u64 state = splitmix64(p.seed);
      state = splitmix64(state ^ static_cast<u64>(load_i64(p.keys + blockIdx.x)));
      state = splitmix64(state ^ static_cast<u64>(load_i64(p.positions + blockIdx.x)));
      const double uniform = static_cast<double>(state >> 11) * (1.0 / 9007199254740992.0);
      const u64 point = static_cast<u64>(uniform * static_cast<double>(total));
      word = find_word(row, threshold, point < total ? point : total - 1);
    }
  }
  if (threadIdx.x == 0) {
    const double nats = static_cast<double>(score(row, word) - row.highest);
    const float logprob = static_cast<float>(nats - log(static_cast<double>(full_total) / MAX_WEIGHT));
    store8(p.tokens + blockIdx.x, uint2{static_cast<u32>(word), 0});
    write(p.logprobs + blockIdx.x, is_valid ? logprob : __uint_as_float(0x7fc00000u));
  }
}
