// Single-pass RMSNorm, rotary embedding, SwiGLU gate and 4-bit codes in fp32 on the CPU. Reference: the models' operators.

#include <algorithm>

#define NUMBER Float32
#include "include/vectors.h"

extern "C" void rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t size, float epsilon) {
    for (int64_t row = 0; row < rows; row++, x += size, out += size) {
        Vector sums = {}, partial = {};  // short partial sums, for accuracy
        int64_t k = 0;
        for (; k + LANES <= size; k += LANES) {
            const Vector part = load<Vector>(x + k);
            partial = part * part + partial;
            if (k % (8 * LANES) == 7 * LANES) sums = sums + partial, partial = Vector{};
        }
        float sum = horizontal_sum(sums + partial);
        for (; k < size; k++) sum += x[k] * x[k];
        const auto scale = float(1.0 / std::sqrt(double(sum) / double(size) + epsilon));
        for (k = 0; k < size; k++) out[k] = x[k] * scale * weight[k];
    }
}

// x cos + (-x2, x1) sin; x and out are (heads, tokens, 2 * half), and cos and sin (tokens, 2 * half), with the given strides.
extern "C" void rotate(const float* x, const float* cos, const float* sin, float* out, int64_t heads, int64_t tokens, int64_t half,
                       int64_t x_head, int64_t x_token, int64_t angle_stride, int64_t out_head, int64_t out_token) {
    for (int64_t token = 0; token < tokens; token++, cos += angle_stride, sin += angle_stride)
        for (int64_t head = 0; head < heads; head++) {
            const float *first = x + head * x_head + token * x_token, *second = first + half;
            float* out_row = out + head * out_head + token * out_token;
            for (int64_t k = 0; k < half; k++) {
                out_row[k] = first[k] * cos[k] - second[k] * sin[k];
                out_row[k + half] = second[k] * cos[k + half] + first[k] * sin[k + half];
            }
        }
}

// x / (1 + exp(-x)) * up
extern "C" void silu_product(const float* x, const float* up, float* out, int64_t count) {
    constexpr float MAX_EXPONENT = 88.0f;  // exp(MAX_EXPONENT) is still finite
    for (int64_t k = 0; k < count; k += LANES) {
        const int bytes = int(count - k < LANES ? count - k : LANES) * int(sizeof(float));
        const Vector gate = load_partial<Vector>(x + k, bytes);
        const Vector result = gate / (exp_lanes(-gate > MAX_EXPONENT ? broadcast(MAX_EXPONENT) : -gate) + 1.0f) * load_partial<Vector>(up + k, bytes);
        std::memcpy(out + k, &result, bytes);
    }
}

struct Codes {
    const uint8_t* codes;  // (blocks, 32): two codes per byte
    const float* pairs;    // (256, 2): the numbers of each byte
    const float* scales;   // (blocks)
    float* out;            // (blocks, 64)
    int64_t blocks;
    int64_t next;  // the first block not yet claimed
};

static void scale_blocks(void* argument) {
    constexpr int64_t CHUNK = 256;
    Codes& work = *static_cast<Codes*>(argument);
    for (int64_t first; (first = __atomic_fetch_add(&work.next, CHUNK, __ATOMIC_RELAXED)) < work.blocks;)
        for (int64_t block = first; block < std::min(first + CHUNK, work.blocks); block++) {
            const float scale = work.scales[block];
            for (int64_t i = 32 * block; i < 32 * (block + 1); i++) {
                const float* pair = work.pairs + 2 * work.codes[i];
                work.out[2 * i] = pair[0] * scale, work.out[2 * i + 1] = pair[1] * scale;
            }
        }
}

extern "C" void dequantize(const uint8_t* codes, const float* pairs, const float* scales, float* out, int64_t blocks, Parallel parallel, int32_t threads) {
    Codes work{codes, pairs, scales, out, blocks, 0};
    run_on_threads(parallel, threads, scale_blocks, &work);
}
