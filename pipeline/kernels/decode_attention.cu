// Attention of one new token per sequence over its keys and values, which are in pages.
// Reference: decode_attention.py.
//
// query and out are (sequence, head, HEAD_SIZE); key and value are (page, kv head, token,
// HEAD_SIZE); the last stride is 1 and the others are arbitrary. A block reads one split of the keys of
// one sequence and kv head, once for all GROUP query heads that share them, so that the kernel is
// bound by memory bandwidth. A few lanes read a key together and keep their own online softmax
// (Milakov & Gimelshein 2018). The results of lanes, warps and, in a second kernel, blocks are
// combined at the end (Flash-Decoding, Dao et al. 2023).
//
// Macros: NUMBER is float, Bf16 or F16; HEAD_SIZE; GROUP is the number of query heads per block;
// PAGE is the number of tokens per page.
#include "prelude.cuh"

#define WARPS 4
#define LOG2_E 1.4426950408889634f

struct DecodeParams {
  const void* query;
  const void* key;
  const void* value;
  void* out;
  float* partials;         // (sequence, head, split, HEAD_SIZE + 2): weighted values, maximum, sum of weights
  const int* lengths;   // (sequence): one past the last key
  const int* pages;     // (sequence, page): in the order of the sequence's tokens
  i64 query_sequence, query_head, out_sequence, out_head;
  i64 key_page, key_head, key_token, value_page, value_head, value_token;
  int heads_per_kv, blocks_per_kv, pages_row, capacity, window, num_splits;
  float scale;
};
static_assert(sizeof(DecodeParams) == PARAMS_BYTES, "see decode_attention.py");

// Consecutive lanes read a key together, 16 bytes each, so that a warp reads full cache lines. A lane's share
// of GROUP queries and sums takes few registers, so that many warps are resident to hide memory latency.
DEVICE constexpr int lanes_per_key(int loads) {
  int lanes = 1;
  while (lanes < loads && lanes < 32) lanes *= 2;
  return lanes;
}
constexpr int PER_LOAD = 16 / sizeof(NUMBER);
constexpr int LOADS = HEAD_SIZE / PER_LOAD;  // per key
constexpr int LANES = lanes_per_key(LOADS);
constexpr int LOADS_PER_LANE = (LOADS + LANES - 1) / LANES;
constexpr int SIZE = LOADS_PER_LANE * PER_LOAD;  // elements of a key that a lane holds
constexpr int KEYS = WARPS * 32 / LANES;  // keys that a block reads at once
constexpr int PREFETCH = GROUP > 4 || LOADS_PER_LANE > 1 ? 2 : 4;  // groups of KEYS in flight
static_assert(HEAD_SIZE % PER_LOAD == 0 && LANES <= 32, "HEAD_SIZE and GROUP don't fit");

template <class T>
DEVICE void unpack(uint4 raw, float (&numbers)[16 / sizeof(T)]) {
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < PER_LOAD; i++) {
    if constexpr (sizeof(T) == 4) {
      numbers[i] = __uint_as_float(words[i]);
    } else {
      numbers[i] = to_float(T{static_cast<u16>(words[i / 2] >> (i % 2 * 16))});
    }
  }
}

// Online softmax state: sums of exp2(score - highest), and of values weighted by it.
struct Sums {
  float highest[GROUP], weight[GROUP], values[GROUP][SIZE];
};
// The score to subtract; 0 before the first key, where the highest score is -inf.
DEVICE float base_score(float highest) { return highest == MINUS_INFINITY ? 0.f : highest; }

struct Keys {
  int first, end;
};
DEVICE Keys get_block_keys(const DecodeParams& p, int sequence) {
  const int length = load_int(p.lengths + sequence), end = min(length, p.capacity);
  int first = p.window > 0 && length > p.window ? length - p.window : 0;
  int count = (end - first + p.num_splits - 1) / p.num_splits;
  count = (count + KEYS - 1) / KEYS * KEYS;
  first += static_cast<int>(blockIdx.x) * count;
  return {first, min(end, first + count)};
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) decode_attention(DecodeParams p) {
  const int split = blockIdx.x, sequence = blockIdx.z;
  const int kv_head = blockIdx.y / p.blocks_per_kv;
  const int first_of_group = blockIdx.y % p.blocks_per_kv * GROUP;
  const int first_head = kv_head * p.heads_per_kv + first_of_group;
  const int num_heads = min(GROUP, p.heads_per_kv - first_of_group);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int lane_in_key = lane % LANES, key_in_block = threadIdx.x / LANES;
  const Keys keys = get_block_keys(p, sequence);

  float query[GROUP][SIZE];
  Sums sums;
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    const int head = first_head + min(g, num_heads - 1);
    const NUMBER* from = static_cast<const NUMBER*>(p.query) + sequence * p.query_sequence + head * p.query_head;
    sums.highest[g] = MINUS_INFINITY;
    sums.weight[g] = 0.f;
#pragma unroll
    for (int i = 0; i < LOADS_PER_LANE; i++) {
      const int load = lane_in_key + i * LANES;
      float numbers[PER_LOAD];
      unpack<NUMBER>(load < LOADS ? load16(from + load * PER_LOAD) : uint4{0, 0, 0, 0}, numbers);
#pragma unroll
      for (int e = 0; e < PER_LOAD; e++) {
        query[g][i * PER_LOAD + e] = numbers[e] * (p.scale * LOG2_E);
        sums.values[g][i * PER_LOAD + e] = 0.f;
      }
    }
  }

  const NUMBER* key = static_cast<const NUMBER*>(p.key) + kv_head * p.key_head;
  const NUMBER* value = static_cast<const NUMBER*>(p.value) + kv_head * p.value_head;
  const int* pages = p.pages + static_cast<i64>(sequence) * p.pages_row;
  for (int from = keys.first; from < keys.end; from += KEYS * PREFETCH) {
    uint4 raw_key[PREFETCH][LOADS_PER_LANE], raw_value[PREFETCH][LOADS_PER_LANE];
#pragma unroll
    for (int a = 0; a < PREFETCH; a++) {
      const int token = from + a * KEYS + key_in_block;
      const i64 page = token < keys.end ? load_int(pages + token / PAGE) : 0;
      const NUMBER* key_row = key + page * p.key_page + token % PAGE * p.key_token;
      const NUMBER* value_row = value + page * p.value_page + token % PAGE * p.value_token;
#pragma unroll
      for (int i = 0; i < LOADS_PER_LANE; i++) {
        const int load = lane_in_key + i * LANES;
        const bool is_valid = token < keys.end && load < LOADS;
        raw_key[a][i] = is_valid ? load16_once(key_row + load * PER_LOAD) : uint4{0, 0, 0, 0};
        raw_value[a][i] = is_valid ? load16_once(value_row + load * PER_LOAD) : uint4{0, 0, 0, 0};
      }
    }
    float score[PREFETCH][GROUP];
#pragma unroll
    for (int a = 0; a < PREFETCH; a++) {
      const int token = from + a * KEYS + key_in_block;
#pragma unroll
      for (int g = 0; g < GROUP; g++) score[a][g] = 0.f;
#pragma unroll
      for (int i = 0; i < LOADS_PER_LANE; i++) {
        float numbers[PER_LOAD];
        unpack<NUMBER>(raw_key[a][i], numbers);
#pragma unroll
        for (int g = 0; g < GROUP; g++)
#pragma unroll
          for (int e = 0; e < PER_LOAD; e++)
            score[a][g] = fmaf(query[g][i * PER_LOAD + e], numbers[e], score[a][g]);
      }
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2)
          score[a][g] += __shfl_xor_sync(0xffffffffu, score[a][g], other);
        if (token >= keys.end) score[a][g] = MINUS_INFINITY;
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float highest = sums.highest[g];
#pragma unroll
      for (int a = 0; a < PREFETCH; a++) highest = fmaxf(highest, score[a][g]);
      const float base = base_score(highest), rescale = exp2_fast(sums.highest[g] - base);
      sums.highest[g] = highest;
      sums.weight[g] *= rescale;
#pragma unroll
      for (int e = 0; e < SIZE; e++) sums.values[g][e] *= rescale;
#pragma unroll
      for (int a = 0; a < PREFETCH; a++) {
        score[a][g] = exp2_fast(score[a][g] - base);
        sums.weight[g] += score[a][g];
      }
    }
#pragma unroll
    for (int a = 0; a < PREFETCH; a++)
#pragma unroll
      for (int i = 0; i < LOADS_PER_LANE; i++) {
        float numbers[PER_LOAD];
        unpack<NUMBER>(raw_value[a][i], numbers);
#pragma unroll
        for (int g = 0; g < GROUP; g++)
#pragma unroll
          for (int e = 0; e < PER_LOAD; e++) {
            float& sum = sums.values[g][i * PER_LOAD + e];
            sum = fmaf(score[a][g], numbers[e], sum);
          }
      }
  }

  // Combine the lanes of a warp that read different keys, then the warps through shared memory.
  SHARED(float, shared);  // [WARPS][GROUP][HEAD_SIZE] values, then [WARPS][GROUP][2]
  float* shared_weights = shared + WARPS * GROUP * HEAD_SIZE;
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
#pragma unroll
    for (int other = LANES; other < 32; other *= 2) {
      const float other_highest = __shfl_xor_sync(0xffffffffu, sums.highest[g], other);
      const float other_weight = __shfl_xor_sync(0xffffffffu, sums.weight[g], other);
      const float highest = fmaxf(sums.highest[g], other_highest), base = base_score(highest);
      const float own_scale = exp2_fast(sums.highest[g] - base), other_scale = exp2_fast(other_highest - base);
      sums.highest[g] = highest;
      sums.weight[g] = sums.weight[g] * own_scale + other_weight * other_scale;
#pragma unroll
      for (int e = 0; e < SIZE; e++) {
        const float other_value = __shfl_xor_sync(0xffffffffu, sums.values[g][e], other);
        sums.values[g][e] = sums.values[g][e] * own_scale + other_value * other_scale;
      }
    }
    if (lane >= LANES) continue;
    const int row = warp * GROUP + g;
#pragma unroll
    for (int i = 0; i < LOADS_PER_LANE; i++) {
      const int load = lane_in_key + i * LANES;
      if (load < LOADS)
#pragma unroll
        for (int e = 0; e < PER_LOAD; e++)
          shared[row * HEAD_SIZE + load * PER_LOAD + e] = sums.values[g][i * PER_LOAD + e];
    }
    if (lane == 0) {
      shared_weights[row * 2] = sums.highest[g];
      shared_weights[row * 2 + 1] = sums.weight[g];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_heads * HEAD_SIZE; i += WARPS * 32) {
    const int g = i / HEAD_SIZE, e = i % HEAD_SIZE;
    float highest = MINUS_INFINITY, weight = 0.f, value_sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, shared_weights[(w * GROUP + g) * 2]);
    const float base = base_score(highest);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const int row = w * GROUP + g;
      const float share = exp2_fast(shared_weights[row * 2] - base);
      weight = fmaf(share, shared_weights[row * 2 + 1], weight);
      value_sum = fmaf(share, shared[row * HEAD_SIZE + e], value_sum);
    }
    const int head = first_head + g;
    if (p.num_splits == 1) {
      NUMBER* to = static_cast<NUMBER*>(p.out) + sequence * p.out_sequence + head * p.out_head;
      write(to + e, weight > 0.f ? value_sum / weight : 0.f);
    } else {
      const i64 total_heads = static_cast<i64>(gridDim.y / p.blocks_per_kv) * p.heads_per_kv;
      float* to = p.partials + ((sequence * total_heads + head) * p.num_splits + split) * (HEAD_SIZE + 2);
      write(to + e, value_sum);
      if (e == 0) {
        write(to + HEAD_SIZE, highest);
        write(to + HEAD_SIZE + 1, weight);
      }
    }
  }
}

// Combines the splits of a sequence and head: one block per head, one thread per element.
extern "C" __global__ void __launch_bounds__(HEAD_SIZE) decode_attention_combine(DecodeParams p) {
  const int head = blockIdx.x, sequence = blockIdx.y, e = threadIdx.x;
  const float* partials = p.partials + (static_cast<i64>(sequence) * gridDim.x + head) * p.num_splits * (HEAD_SIZE + 2);
  float highest = MINUS_INFINITY, weight = 0.f, value_sum = 0.f;
  for (int s = 0; s < p.num_splits; s++) highest = fmaxf(highest, read(partials + s * (HEAD_SIZE + 2) + HEAD_SIZE));
  const float base = base_score(highest);
  for (int s = 0; s < p.num_splits; s++) {
    const float* part = partials + s * (HEAD_SIZE + 2);
    const float share = exp2_fast(read(part + HEAD_SIZE) - base);
    weight = fmaf(share, read(part + HEAD_SIZE + 1), weight);
    value_sum = fmaf(share, read(part + e), value_sum);
  }
  NUMBER* to = static_cast<NUMBER*>(p.out) + sequence * p.out_sequence + head * p.out_head;
  write(to + e, weight > 0.f ? value_sum / weight : 0.f);
}
