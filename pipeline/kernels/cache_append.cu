// Appends the keys and values of new tokens to a slotted cache in one launch.
// Reference: cache_append.py.
//
// states is (head, token, size); its last stride is 1 and the others are arbitrary. stored is (slot,
// head, width, size) and contiguous. Rows are treated as bytes: each thread copies 16 at a time.
#include "prelude.cuh"

// Mirrored in cache_append.py.
struct StateArgs {
  const void* states;
  void* stored;
  i64 head_bytes, token_bytes;  // strides of the states
  i64 row_bytes;
};
struct AppendParams {
  StateArgs keys, values;
  const i64* slot_mapping;  // per token: slot * width + position
  i64 num_slots, width;
  int num_heads;
};
static_assert(sizeof(AppendParams) == PARAMS_BYTES, "see cache_append.py");

extern "C" __global__ void cache_append(AppendParams p) {
  const int token = blockIdx.x;
  const i64 index = load_i64(p.slot_mapping + token);
  if (index < 0 || index >= p.num_slots * p.width) return;
  const i64 slot = index / p.width, position = index % p.width;
  const int key_bytes = p.keys.row_bytes, both_bytes = key_bytes + p.values.row_bytes;
  for (int i = 16 * threadIdx.x; i < p.num_heads * both_bytes; i += 16 * blockDim.x) {
    const int head = i / both_bytes, byte = i % both_bytes;
    const bool is_key = byte < key_bytes;
    // Select field by field: selecting a struct would spill it to local memory.
    const void* states = is_key ? p.keys.states : p.values.states;
    void* stored = is_key ? p.keys.stored : p.values.stored;
    const i64 head_stride = is_key ? p.keys.head_bytes : p.values.head_bytes;
    const i64 token_stride = is_key ? p.keys.token_bytes : p.values.token_bytes;
    const i64 row_stride = is_key ? p.keys.row_bytes : p.values.row_bytes;
    const i64 offset = is_key ? byte : byte - key_bytes;
    const i64 row = (slot * p.num_heads + head) * p.width + position;
    store16(static_cast<char*>(stored) + row * row_stride + offset,
            load16(static_cast<const char*>(states) + head * head_stride + token * token_stride + offset));
  }
}
