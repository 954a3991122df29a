// Samples the next token of each sequence from its logits.
// Reference: sampling.py.
//
// logits is (row, word) with any row stride; one block per row. Nothing is sorted. Each word's
// distance below the highest score, in units of 2^-27 nats, and its weight are integers, so that
// sums don't depend on their order and comparisons are exact. The words kept are those below a
// threshold distance and the first ones at it. The threshold is found by radix selection: a
// histogram of the next 8 bits of the words that match the bits found so far. Weights are summed
// over segments of 128 consecutive words: the draw finds the segment first, then the word in it.
//
// Macros: NUMBER, the dtype of the logits, is float, Bf16 or F16.
#include "prelude.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)
#define SEGMENT 128
#define BINS 256
#define WHOLE 17592186044416.f  // 2^44, the weight of the most likely word
#define FARTHEST 0xffffffffu    // 32 nats or more below the most likely word: weight 0
#define ALL 0x7fffffff
#define FULL 0xffffffffu

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
  int num_words, top_k;  // top_k 0 keeps all
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
// probability relative to the most likely word is at least `least`.
struct Cut {
  u32 distance;
  int ties;
  double least;
};

struct Row {
  const NUMBER* logits;
  float temperature, highest;
  int num_words, num_segments;
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
  return nats < 32.f ? static_cast<u32>(nats * 134217728.f) : FARTHEST;  // also for NaN
}
DEVICE float relative(u32 distance) { return expf(static_cast<float>(distance) * -(1.f / 134217728.f)); }
DEVICE u64 weight(u32 distance) { return static_cast<u64>(relative(distance) * WHOLE); }
DEVICE bool is_likely(const Cut& cut, u32 distance) {
  return cut.least == 0 || static_cast<double>(relative(distance)) >= cut.least;
}

template <class T>
DEVICE T sum_of_warp(T value LINE) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(FULL, value, other SAME_LINE);
  return value;
}
// Inclusive prefix sum over the lanes.
template <class T>
DEVICE T sum_so_far(T value LINE) {
#pragma unroll
  for (int other = 1; other < 32; other *= 2) {
    const T before = __shfl_up_sync(FULL, value, other SAME_LINE);
    if (threadIdx.x % 32 >= other) value += before;
  }
  return value;
}

// Finds the highest score and its first word; returns false for NaN or an infinite highest score.
DEVICE bool find_highest(Row& row, int& first) {
  float highest = MINUS_INFINITY;
  bool is_number = true;
  first = ALL;
  for (int word = threadIdx.x; word < row.num_words; word += THREADS) {
    const float x = score(row, word);
    is_number = is_number && x == x;
    if (x > highest) highest = x, first = word;
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    const float their_highest = __shfl_xor_sync(FULL, highest, other);
    const int their_first = __shfl_xor_sync(FULL, first, other);
    if (their_highest > highest || (their_highest == highest && their_first < first))
      highest = their_highest, first = their_first;
  }
  if (threadIdx.x % 32 == 0) {
    row.shared->highest[threadIdx.x / 32] = highest;
    row.shared->first[threadIdx.x / 32] = first;
  }
  is_number = !__syncthreads_or(!is_number);
  for (int warp = 0; warp < WARPS; warp++) {
    const float theirs = row.shared->highest[warp];
    if (theirs > highest || (theirs == highest && row.shared->first[warp] < first))
      highest = theirs, first = row.shared->first[warp];
  }
  if (first == ALL) first = 0;  // all scores are -inf
  row.highest = highest;
  return is_number && highest > MINUS_INFINITY && highest < -MINUS_INFINITY;
}

// Computes the weights of the segments under a cut, and returns their sum.
DEVICE u64 fill(const Row& row, const Cut& cut) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int segment = warp; segment < row.num_segments; segment += WARPS) {
    u64 sum = 0;
    int ties = 0;
#pragma unroll
    for (int part = 0; part < SEGMENT; part += 32) {
      const int word = segment * SEGMENT + part + lane;
      if (word >= row.num_words) continue;
      const u32 d = distance(row, word);
      if (d < cut.distance && is_likely(cut, d)) sum += weight(d);
      ties += d == cut.distance;
    }
    sum = sum_of_warp(sum);
    ties = sum_of_warp(ties);
    if (lane == 0) row.weights[segment] = sum, row.ties[segment] = ties;
  }
  __syncthreads();
  if (warp == 0) {
    const u64 of_tie = is_likely(cut, cut.distance) ? weight(cut.distance) : 0;
    u64 total = 0;
    int before = 0;
    for (int first = 0; first < row.num_segments; first += 32) {
      const int segment = first + lane;
      const bool real = segment < row.num_segments;
      const int ties = real ? row.ties[segment] : 0;
      const int up_to = before + sum_so_far(ties);
      const int kept = min(ties, max(0, cut.ties - (up_to - ties)));
      const u64 sum = real ? row.weights[segment] + kept * of_tie : 0;
      if (real) row.weights[segment] = sum;
      total += sum_of_warp(sum);
      before = __shfl_sync(FULL, up_to, 31);
    }
    if (lane == 0) row.shared->total = total;
  }
  __syncthreads();
  const u64 total = row.shared->total;
  __syncthreads();  // the next call overwrites it
  return total;
}

// Returns the distance at which the words, by increasing distance, reach `wanted` in number or in
// weight; `above` becomes the amount of those below that distance.
DEVICE u32 reach(const Row& row, u64 wanted, bool by_weight, u64& above) {
  Shared* shared = row.shared;
  u32 found = 0;
  above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared->bins[bin] = 0;
    __syncthreads();
    for (int word = threadIdx.x; word < row.num_words; word += THREADS) {
      const u32 d = distance(row, word);
      const bool has_bits = shift == 24 || d >> (shift + 8) == found >> (shift + 8);
      const u64 amount = !has_bits ? 0 : by_weight ? weight(d) : 1;
      if (amount) atomicAdd(&shared->bins[d >> shift & (BINS - 1)], amount);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x, of_lane = BINS / 32;
      u64 own = 0;
#pragma unroll
      for (int bin = 0; bin < of_lane; bin++) own += shared->bins[lane * of_lane + bin];
      u64 sum = above + sum_so_far(own);
      const u32 reached = __ballot_sync(FULL, sum >= wanted);
      if (lane == (reached ? __ffs(reached) - 1 : 31)) {
        int bin = lane * of_lane;
        for (sum -= own; bin < lane * of_lane + of_lane - 1; bin++) {
          if (sum + shared->bins[bin] >= wanted) break;
          sum += shared->bins[bin];
        }
        shared->digit = bin;
        shared->above = sum;
      }
    }
    __syncthreads();
    found |= shared->digit << shift;
    above = shared->above;
  }
  return found;
}

DEVICE Cut cut_of(const SampleParams& p, const Row& row, u64 total) {
  Cut cut = {FARTHEST, ALL, 0};
  u64 above;
  if (p.top_k > 0) cut.distance = reach(row, p.top_k, false, above);
  if (p.top_p < 1) {
    if (p.top_k > 0) total = fill(row, cut);
    const double share = ceil(p.top_p * static_cast<double>(total));
    const u64 wanted = share < static_cast<double>(total) ? static_cast<u64>(share) : total;
    // Covers all words: the threshold falls within those that top-k keeps.
    cut.distance = reach(row, wanted, true, above);
    const u64 of_tie = weight(cut.distance);
    if (of_tie) cut.ties = static_cast<int>((wanted - above + of_tie - 1) / of_tie);
  }
  cut.least = p.min_p;
  return cut;
}

DEVICE u64 mixed(u64 state) {
  state += 0x9e3779b97f4a7c15ull;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebull;
  return state ^ (state >> 31);
}

// Returns the word where the cumulative weight passes `point`. Called by the first warp.
DEVICE int word_at(const Row& row, const Cut& cut, u64 point) {
  const int lane = threadIdx.x % 32;
  u64 before = 0;
  int ties = 0, segment = 0;
  for (int first = 0; first < row.num_segments; first += 32) {
    const bool real = first + lane < row.num_segments;
    const u64 own = real ? row.weights[first + lane] : 0;
    const int own_ties = real ? row.ties[first + lane] : 0;
    const u64 up_to = before + sum_so_far(own);
    const int ties_up_to = ties + sum_so_far(own_ties);
    const u32 passed = __ballot_sync(FULL, up_to > point);
    const int from = passed ? __ffs(passed) - 1 : 31;
    before = __shfl_sync(FULL, passed ? up_to - own : up_to, from);
    ties = __shfl_sync(FULL, passed ? ties_up_to - own_ties : ties_up_to, from);
    segment = first + from;
    if (passed) break;
  }
  for (int part = 0; part < SEGMENT; part += 32) {
    const int word = segment * SEGMENT + part + lane;
    const bool real = word < row.num_words;
    const u32 d = real ? distance(row, word) : FARTHEST;
    const u32 tied = __ballot_sync(FULL, real && d == cut.distance);
    const int rank = ties + __popc(tied & ((1u << lane) - 1));
    const bool kept = real && (d < cut.distance || (d == cut.distance && rank < cut.ties));
    const u64 up_to = before + sum_so_far(kept && is_likely(cut, d) ? weight(d) : u64{0});
    const u32 passed = __ballot_sync(FULL, up_to > point);
    if (passed) return segment * SEGMENT + part + __ffs(passed) - 1;
    before = __shfl_sync(FULL, up_to, 31);
    ties += __popc(tied);
  }
  return row.num_words - 1;  // unreachable: the chosen segment passes the point
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sampling(SampleParams p) {
  SHARED(Shared, shared);
  Row row;
  row.logits = static_cast<const NUMBER*>(p.logits) + blockIdx.x * p.row_stride;
  row.temperature = p.temperature;
  row.num_words = p.num_words;
  row.num_segments = (p.num_words + SEGMENT - 1) / SEGMENT;
  row.shared = shared;
  row.weights = reinterpret_cast<u64*>(shared + 1);
  row.ties = reinterpret_cast<int*>(row.weights + row.num_segments);
  int word;
  const bool is_valid = find_highest(row, word);
  const u64 all = fill(row, {FARTHEST, ALL, 0});
  if (p.temperature > 0) {
    const Cut cut = cut_of(p, row, all);
    const bool whole = cut.distance == FARTHEST && cut.least == 0;
    const u64 total = whole ? all : fill(row, cut);
    if (threadIdx.x < 32 && total > 0) {
      u64 state = mixed(p.seed);
      state = mixed(state ^ static_cast<u64>(load_i64(p.keys + blockIdx.x)));
      state = mixed(state ^ static_cast<u64>(load_i64(p.positions + blockIdx.x)));
      const double share = static_cast<double>(state >> 11) * (1.0 / 9007199254740992.0);
      const u64 point = static_cast<u64>(share * static_cast<double>(total));
      word = word_at(row, cut, point < total ? point : total - 1);
    }
  }
  if (threadIdx.x == 0) {
    const double nats = static_cast<double>(score(row, word) - row.highest);
    const float logprob = static_cast<float>(nats - log(static_cast<double>(all) / WHOLE));
    store8(p.tokens + blockIdx.x, uint2{static_cast<u32>(word), 0});
    write(p.logprobs + blockIdx.x, is_valid ? logprob : __uint_as_float(0x7fc00000u));
  }
}
