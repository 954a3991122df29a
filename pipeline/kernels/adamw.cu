// AdamW over any number of flat shards in one launch. Bitwise equal to the reference in adamw.py.
//
// Each block updates BLOCK_ELEMENTS elements of one shard, given by `shard_of_block`. Each value is
// read and written once: 30 bytes per element for fp32 gradient, master and moments with a 16-bit
// copy. Scalars that change every step are read from GPU memory, so that a step does not wait for
// the host and a CUDA graph of it can be replayed.
//
// Macros: MOMENT is float or Bf16; COPY, the dtype of the master's copy if HAS_COPY is 1, is Bf16 or
// F16; SPLIT is 1 if the master is stored as Bf16 and 16 low bits.
#include "prelude.cuh"

#define THREADS 256
#define BLOCK_ELEMENTS 16384
#define UNROLL 2

// Mirrored in adamw.py.
struct Shard {
  void* master;
  void* exp_avg;
  void* exp_avg_sq;
  void* copy;
  void* low_bits;
  const float* gradient;
  i64 numel;
  i64 first_block;
  double lr;
  double weight_decay;
};
struct Scalars {
  double rate;  // multiplies the lr of each shard
  double beta1_power, beta2_power;  // beta^t; t is the step number, from 1
  double multiplier;
};
struct AdamwParams {
  const Shard* shards;
  const int* shard_of_block;
  const Scalars* scalars;
  double beta1, beta2, eps;
};
static_assert(sizeof(AdamwParams) == PARAMS_BYTES && sizeof(Shard) == SHARD_BYTES, "see adamw.py");
static_assert(sizeof(Scalars) == SCALARS_BYTES, "see adamw.py");

#if SPLIT
typedef Bf16 Master;
#else
typedef float Master;
#endif

// Scalars of the elementwise update, rounded to fp32 where the reference rounds.
struct Factors {
  float decay, multiplier, avg_weight, avg_from_gradient, beta2, sq_weight, root_correction, eps, step_size;
};
static_assert(sizeof(Factors) == FACTORS_BYTES, "see adamw.py");

DEVICE Factors compute_factors(const AdamwParams& p, const Shard* shard) {
  const double lr = load_double(&shard->lr) * load_double(&p.scalars->rate);
  Factors f;
  f.decay = static_cast<float>(1 - lr * load_double(&shard->weight_decay));
  f.multiplier = static_cast<float>(load_double(&p.scalars->multiplier));
  // Interpolate from the nearer end, like torch.lerp.
  const float weight = static_cast<float>(1 - p.beta1);
  f.avg_from_gradient = weight >= 0.5f ? 1.f : 0.f;
  f.avg_weight = weight >= 0.5f ? weight - 1.f : weight;
  f.beta2 = static_cast<float>(p.beta2);
  f.sq_weight = static_cast<float>(1 - p.beta2);
  f.root_correction = static_cast<float>(sqrt(1 - load_double(&p.scalars->beta2_power)));
  f.eps = static_cast<float>(p.eps);
  f.step_size = static_cast<float>(-lr / (1 - load_double(&p.scalars->beta1_power)));
  return f;
}

// The arrays of a shard, offset to the block's first element.
struct Arrays {
  Master* master;
  MOMENT* exp_avg;
  MOMENT* exp_avg_sq;
  COPY* copy;
  u16* low_bits;
  const float* gradient;
};
template <class T>
DEVICE T* array(T* const* field, i64 offset) {
  return reinterpret_cast<T*>(load_u64(field)) + offset;
}
DEVICE Arrays get_arrays(const Shard* shard, i64 offset) {
  return {array(reinterpret_cast<Master* const*>(&shard->master), offset),
          array(reinterpret_cast<MOMENT* const*>(&shard->exp_avg), offset),
          array(reinterpret_cast<MOMENT* const*>(&shard->exp_avg_sq), offset),
          array(reinterpret_cast<COPY* const*>(&shard->copy), offset),
          array(reinterpret_cast<u16* const*>(&shard->low_bits), offset),
          array(&shard->gradient, offset)};
}
DEVICE bool is_aligned_to_four(const Arrays& a) {
  const u64 rest = reinterpret_cast<u64>(a.master) % (4 * sizeof(Master)) |
                   reinterpret_cast<u64>(a.exp_avg) % (4 * sizeof(MOMENT)) |
                   reinterpret_cast<u64>(a.exp_avg_sq) % (4 * sizeof(MOMENT)) |
                   reinterpret_cast<u64>(a.gradient) % (4 * sizeof(float)) |
                   (HAS_COPY ? reinterpret_cast<u64>(a.copy) % (4 * sizeof(COPY)) : 0) |
                   (SPLIT ? reinterpret_cast<u64>(a.low_bits) % 8 : 0);
  return rest == 0;
}

// One element in registers.
struct Element {
  Master master;
  MOMENT exp_avg, exp_avg_sq;
  COPY copy;
  u16 low_bits;
  float gradient;
};

// Rounds a master weight to bf16, to nearest with ties away from zero.
DEVICE u16 nearest_weight(u32 bits) {
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<u16>(is_nan ? 0x7fc0u : (bits + 0x8000u) >> 16);
}
DEVICE void store_weight(float value, F16& out) { round_to(value, out); }
DEVICE void store_weight(float value, Bf16& out) { out.bits = nearest_weight(__float_as_uint(value)); }

// Updates an element and its moments.
DEVICE void step(const Factors& f, Element& x, float& average, float& square) {
  const float gradient = x.gradient * f.multiplier;
#if SPLIT
  const u32 half = static_cast<u32>(x.master.bits) << 16;
  float master = __uint_as_float(half + static_cast<u32>(static_cast<int>(static_cast<short>(x.low_bits))));
#else
  float master = x.master;
#endif
  master = master * f.decay;
  average = fmaf(f.avg_weight, gradient - average, f.avg_from_gradient != 0.f ? gradient : average);
  square = fmaf(f.sq_weight * gradient, gradient, square * f.beta2);
  master = master + f.step_size * average / (sqrtf(square) / f.root_correction + f.eps);
  if (HAS_COPY) store_weight(master, x.copy);
#if SPLIT
  const u32 bits = __float_as_uint(master);
  x.master.bits = nearest_weight(bits);
  x.low_bits = static_cast<u16>(bits);
#else
  x.master = master;
#endif
}
DEVICE void update(const Factors& f, Element& x) {
  float average = to_float(x.exp_avg), square = to_float(x.exp_avg_sq);
  step(f, x, average, square);
  round_to(average, x.exp_avg);
  round_to(square, x.exp_avg_sq);
}

// Four consecutive elements: 16 bytes of fp32, 8 of a 16-bit type.
DEVICE void load_four(const float* p, float (&v)[4] LINE) {
  const uint4 raw = load16(p SAME_LINE);
  v[0] = __uint_as_float(raw.x), v[1] = __uint_as_float(raw.y);
  v[2] = __uint_as_float(raw.z), v[3] = __uint_as_float(raw.w);
}
DEVICE void store_four(float* p, const float (&v)[4] LINE) {
  store16(p, uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])}
          SAME_LINE);
}
DEVICE u16 get_bits(u16 x) { return x; }
DEVICE u16 get_bits(Bf16 x) { return x.bits; }
DEVICE u16 get_bits(F16 x) { return x.bits; }
DEVICE void set_bits(u16& x, u32 bits) { x = static_cast<u16>(bits); }
DEVICE void set_bits(Bf16& x, u32 bits) { x.bits = static_cast<u16>(bits); }
template <class T>
DEVICE void load_four(const T* p, T (&v)[4] LINE) {
  const uint2 raw = load8(p SAME_LINE);
  set_bits(v[0], raw.x & 0xffffu), set_bits(v[1], raw.x >> 16);
  set_bits(v[2], raw.y & 0xffffu), set_bits(v[3], raw.y >> 16);
}
template <class T>
DEVICE void store_four(T* p, const T (&v)[4] LINE) {
  store8(p, uint2{get_bits(v[0]) | static_cast<u32>(get_bits(v[1])) << 16,
                  get_bits(v[2]) | static_cast<u32>(get_bits(v[3])) << 16}
         SAME_LINE);
}

struct FourElements {
  Master master[4];
  MOMENT exp_avg[4], exp_avg_sq[4];
  COPY copy[4];
  u16 low_bits[4];
  float gradient[4];
};
DEVICE void load(const Arrays& a, int i, FourElements& x) {
  load_four(a.gradient + i, x.gradient);
  load_four(a.master + i, x.master);
  load_four(a.exp_avg + i, x.exp_avg);
  load_four(a.exp_avg_sq + i, x.exp_avg_sq);
  if (SPLIT) load_four(a.low_bits + i, x.low_bits);
}
DEVICE void store(const Arrays& a, int i, const FourElements& x) {
  store_four(a.master + i, x.master);
  store_four(a.exp_avg + i, x.exp_avg);
  store_four(a.exp_avg_sq + i, x.exp_avg_sq);
  if (HAS_COPY) store_four(a.copy + i, x.copy);
  if (SPLIT) store_four(a.low_bits + i, x.low_bits);
}
DEVICE Element load_element(const Arrays& a, int i) {
  Element x;
  x.gradient = load_float(a.gradient + i);
  load_one(a.master + i, x.master);
  load_one(a.exp_avg + i, x.exp_avg);
  load_one(a.exp_avg_sq + i, x.exp_avg_sq);
  if (SPLIT) x.low_bits = load2(a.low_bits + i);
  return x;
}
DEVICE void store_element(const Arrays& a, int i, const Element& x) {
  store_one(a.master + i, x.master);
  store_one(a.exp_avg + i, x.exp_avg);
  store_one(a.exp_avg_sq + i, x.exp_avg_sq);
  if (HAS_COPY) store_one(a.copy + i, x.copy);
  if (SPLIT) store2(a.low_bits + i, x.low_bits);
}
DEVICE Element get_element(const FourElements& x, int e) {
  Element one;
  one.master = x.master[e], one.exp_avg = x.exp_avg[e], one.exp_avg_sq = x.exp_avg_sq[e];
  one.gradient = x.gradient[e];
  if (HAS_COPY) one.copy = x.copy[e];
  if (SPLIT) one.low_bits = x.low_bits[e];
  return one;
}
DEVICE void set_element(const Element& one, FourElements& x, int e) {
  x.master[e] = one.master, x.exp_avg[e] = one.exp_avg, x.exp_avg_sq[e] = one.exp_avg_sq;
  if (HAS_COPY) x.copy[e] = one.copy;
  if (SPLIT) x.low_bits[e] = one.low_bits;
}
DEVICE void update_four(const Factors& f, FourElements& x) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    Element one = get_element(x, e);
    update(f, one);
    set_element(one, x, e);
  }
}
DEVICE void update_one(const Factors& f, const Arrays& a, int i) {
  Element x = load_element(a, i);
  update(f, x);
  store_element(a, i, x);
}

DEVICE void update_elements(const Factors& f, const Arrays& a, int count, int thread) {
  int done = 0;
  if (is_aligned_to_four(a)) {
    done = count / 4 * 4;
    for (int from = 4 * thread; from < done; from += 4 * THREADS * UNROLL) {
      FourElements x[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; u++)
        if (from + 4 * THREADS * u < done) load(a, from + 4 * THREADS * u, x[u]);
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const int i = from + 4 * THREADS * u;
        if (i >= done) continue;
        update_four(f, x[u]);
        store(a, i, x[u]);
      }
    }
  }
  for (int i = done + thread; i < count; i += THREADS) update_one(f, a, i);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) adamw(AdamwParams p) {
  const int block = blockIdx.x, thread = threadIdx.x;
  const Shard* shard = p.shards + load_int(p.shard_of_block + block);
  SHARED(Factors, shared);
  if (thread == 0) *shared = compute_factors(p, shard);
  __syncthreads();
  const Factors factors = *shared;

  const i64 offset = (block - load_i64(&shard->first_block)) * BLOCK_ELEMENTS;
  const i64 left = load_i64(&shard->numel) - offset;
  const int count = left < BLOCK_ELEMENTS ? static_cast<int>(left) : BLOCK_ELEMENTS;
  const Arrays arrays = get_arrays(shard, offset);

  update_elements(factors, arrays, count, thread);
}
