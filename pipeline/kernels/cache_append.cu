// Appends the keys and values of new tokens to a slotted cache in one launch.
// Reference: cache_append.py.
//
// states is (head, token, size) with any strides, except 1 for the last; stored is (slot, head,
// width, size) and contiguous. Rows are treated as bytes: each thread copies 16 of them.
#include "prelude.cuh"

// Mirrored in cache_append.py.
struct Part {
  const void* states;
  void* stored;
  i64 head_bytes, token_bytes;  // strides of the states
  i64 row_bytes;
};
struct AppendParams {
  Part keys, values;
  const i64* places;  // per token: slot * width + position
  i64 num_slots, width;
  int num_heads;
};
static_assert(sizeof(AppendParams) == PARAMS_BYTES, "see cache_append.py");

extern "C" __global__ void cache_append(AppendParams p) {
  const int token = blockIdx.x;
  const i64 place = load_i64(p.places + token);
  if (place < 0 || place >= p.num_slots * p.width) return;
  const i64 slot = place / p.width, position = place % p.width;
  const int of_key = p.keys.row_bytes, of_both = of_key + p.values.row_bytes;
  for (int at = 16 * threadIdx.x; at < p.num_heads * of_both; at += 16 * blockDim.x) {
    const int head = at / of_both, byte = at % of_both;
    const bool is_key = byte < of_key;
    // Select field by field: selecting a struct would spill it to local memory.
    const void* states = is_key ? p.keys.states : p.values.states;
    void* stored = is_key ? p.keys.stored : p.values.stored;
    const i64 of_head = is_key ? p.keys.head_bytes : p.values.head_bytes;
    const i64 of_token = is_key ? p.keys.token_bytes : p.values.token_bytes;
    const i64 of_row = is_key ? p.keys.row_bytes : p.values.row_bytes;
    const i64 of_load = is_key ? byte : byte - of_key;
    const i64 row = (slot * p.num_heads + head) * p.width + position;
    store16(static_cast<char*>(stored) + row * of_row + of_load,
            load16(static_cast<const char*>(states) + head * of_head + token * of_token + of_load));
  }
}
