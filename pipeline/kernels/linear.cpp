// Linear layers on the CPU: out = x w^T + bias. Reference: torch.nn.functional.linear.
//
// The lanes of a vector hold consecutive inputs and are summed at the end. Each weight is read from memory once per
// PACKED rows, which are packed contiguously. NUMBER is the dtype of all tensors.

#include <algorithm>
#include <vector>

#include "include/vectors.h"

namespace {

// Size of a tile: its sums stay in registers, and one or two horizontal sums reduce them.
constexpr int OUTPUTS = LANES == 16 ? 4 : 2;
constexpr int ROWS = LANES == 16 ? 4 : 6;
constexpr int MAX_UNPACKED_ROWS = 3;  // maximum number of rows that are not packed; their tiles have more outputs

constexpr int64_t PACKED = 128;  // rows packed at once; with DEPTH inputs, they fit into the cache
constexpr int64_t DEPTH = sizeof(Stored) == 4 ? 768 : INT64_MAX;  // bf16 partial sums would be rounded

struct LinearParams {  // mirrored in linear.py
    const void* x;       // (rows, inputs)
    const void* weight;  // (outputs, inputs)
    const void* bias;    // (outputs), or null
    void* out;           // (rows, outputs)
    int64_t rows;
    int64_t inputs;      // a multiple of Number::NUMBERS
    int64_t outputs;
};

inline float widen(float number) { return number; }
inline float widen(uint16_t number) { return as<float>(uint32_t(number) << 16); }

// A range of the inputs of a tile's rows. If packed, vector k of row r is line k * R + r.
struct Inputs {
    const void* x;
    int64_t first;   // first input
    int64_t number;  // number of inputs
    bool packed;
};

struct alignas(4 * LANES) Line {
    Vector numbers;
};

// Number of rows of a tile, so that the tiles of all rows are of similar size.
int64_t tile_rows(int64_t rows) {
    const int64_t tiles = (rows - 1) / ROWS + 1;
    return (rows - 1) / tiles + 1;
}

// Copies vector k of row r to line k * rows + r, padded with zeros.
void pack(const Stored* x, int64_t stride, int64_t inputs, int64_t rows, Line* to) {
    constexpr int STEP = LANES * Number::NUMBERS;
    for (int64_t k = 0; k < inputs; k += STEP)
        for (int64_t r = 0; r < rows; r++, to++) {
            const int64_t left = inputs - k;
            to->numbers = left >= STEP ? load<Vector>(x + r * stride + k)
                                       : load_partial<Vector>(x + r * stride + k, int(left) * int(sizeof(Stored)));
        }
}

// Adds the products of the remaining inputs, which do not fill a vector, to the sums of a tile.
[[gnu::noinline]] void add_remainder(const Stored* weight, int64_t inputs, int outputs, const Stored* x, int64_t row_stride, int count, int64_t number, float* sums) {
    for (int i = 0; i < count; i++)
        for (int64_t k = 0; k < number; k++)
            sums[i] += widen(weight[i % outputs * inputs + k]) * widen(x[i / outputs * row_stride + k]);
}

template <int N, int R>
inline void add(const Stored* weight, int64_t inputs, const Stored* x, int64_t row_stride, Vector (&sum)[N][R]) {
    Bits line[N];
    for (int n = 0; n < N; n++) line[n] = load<Bits>(weight + n * inputs);
    for (int r = 0; r < R; r++) {
        const Bits row = load<Bits>(x + r * row_stride);
        for (int n = 0; n < N; n++) sum[n][r] = Number::add(sum[n][r], line[n], row);
    }
}

// Computes N outputs of R rows.
template <int N, int R>
void compute_tile(const LinearParams& params, const Inputs& from, int64_t output, int64_t row) {
    constexpr int STEP = LANES * Number::NUMBERS;
    const int64_t inputs = params.inputs, full = from.number - from.number % STEP;
    const int64_t row_stride = from.packed ? STEP : inputs, stride = from.packed ? R : 1;
    const auto* weight = static_cast<const Stored*>(params.weight) + output * inputs + from.first;
    const auto* x = static_cast<const Stored*>(from.x);
    Vector sum[N][R] = {};
    // Halves the number of iterations, so that the exit of a short loop is predicted: a misprediction flushes the pipeline.
#pragma GCC unroll 2
    for (int64_t k = 0; k < full; k += STEP) {
        for (int n = 0; n < N; n++) __builtin_prefetch(weight + (N + n) * inputs + k, 0, 2);  // the next tile
        add<N, R>(weight + k, inputs, x + k * stride, row_stride, sum);
    }
    float sums[(N * R + LANES - 1) / LANES * LANES];
    for (int first = 0; first < N * R; first += LANES) {
        Vector part[LANES] = {};
        for (int i = first; i < std::min(first + LANES, N * R); i++) part[i - first] = sum[i % N][i / N];
        const Vector totals = horizontal_sums(part);
        std::memcpy(sums + first, &totals, sizeof totals);
    }
    if (full < from.number)
        add_remainder(weight + full, inputs, N, x + full * stride, row_stride, N * R, from.number - full, sums);

    static constexpr Stored NONE[LANES] = {};
    const auto* bias = static_cast<const Stored*>(params.bias);
    auto* out = static_cast<Stored*>(params.out) + row * params.outputs + output;
    const Stored* initial = from.first > 0 ? out : bias != nullptr ? bias + output : NONE;
    const int64_t initial_stride = from.first > 0 ? params.outputs : 0;
    for (int r = 0; r < R; r++, out += params.outputs, initial += initial_stride) {
        Stored numbers[N];
        for (int n = 0; n < N; n++) numbers[n] = Number::narrow(sums[r * N + n] + widen(initial[n]));
        std::memcpy(out, numbers, sizeof numbers);
    }
}

// Outputs per tile with few rows: one horizontal sum reduces up to LANES sums.
constexpr int outputs_for(int rows) { return LANES / rows; }

// Computes all rows at once.
template <int R>
void compute_unpacked(const LinearParams& params, int64_t output, int64_t end) {
    if constexpr (R > 1)
        if (params.rows < R) return compute_unpacked<R - 1>(params, output, end);
    constexpr int N = outputs_for(R);
    const Inputs all{params.x, 0, params.inputs, false};
    for (; output + N <= end; output += N) compute_tile<N, R>(params, all, output, 0);
    for (; output < end; output++) compute_tile<1, R>(params, all, output, 0);
}

template <int N, int R>
void compute_rows(const LinearParams& params, const Inputs& from, int64_t output, int64_t row, int64_t rows) {
    if constexpr (R > 1)
        if (rows < R) return compute_rows<N, R - 1>(params, from, output, row, rows);
    compute_tile<N, R>(params, from, output, row);
}

template <int N>
void compute_outputs(const LinearParams& params, const Line* packed, Inputs from, int64_t output, int64_t end, int64_t row, int64_t rows) {
    const int64_t tile = tile_rows(rows);
    const int64_t lines = (from.number * int64_t(sizeof(Stored)) + int64_t(sizeof(Line)) - 1) / int64_t(sizeof(Line));
    for (; output + N <= end; output += N)
        for (int64_t r = 0; r < rows; r += tile) {
            from.x = packed + r * lines;
            compute_rows<N, ROWS>(params, from, output, row + r, std::min(tile, rows - r));
        }
    if constexpr (N > 1)
        if (output < end) compute_outputs<1>(params, packed, from, output, end, row, rows);
}

void compute_packed(const LinearParams& params, int64_t output, int64_t end) {
    thread_local std::vector<Line> packed;
    const int64_t blocks = (params.inputs - 1) / DEPTH + 1, unit = sizeof(Line) / sizeof(Stored);
    const int64_t depth = ((params.inputs - 1) / blocks / unit + 1) * unit;
    packed.resize(size_t(std::min(PACKED, params.rows) * depth / unit));
    for (int64_t row = 0; row < params.rows; row += PACKED)
        for (int64_t first = 0; first < params.inputs; first += depth) {
            const int64_t number = std::min(depth, params.inputs - first), rows = std::min(PACKED, params.rows - row);
            const auto* x = static_cast<const Stored*>(params.x) + row * params.inputs + first;
            for (int64_t r = 0, tile = tile_rows(rows); r < rows; r += tile)
                pack(x + r * params.inputs, params.inputs, number, std::min(tile, rows - r), packed.data() + r * ((number - 1) / unit + 1));
            compute_outputs<OUTPUTS>(params, packed.data(), Inputs{nullptr, first, number, true}, output, end, row, rows);
        }
}

struct Work {
    const LinearParams* params;
    int64_t chunk;  // consecutive outputs that a thread claims at once
    int64_t next;   // the first output not yet claimed
};

void run(void* argument) {
    Work& work = *static_cast<Work*>(argument);
    for (;;) {
        const int64_t first = __atomic_fetch_add(&work.next, work.chunk, __ATOMIC_RELAXED);
        if (first >= work.params->outputs) return;
        const int64_t end = std::min(first + work.chunk, work.params->outputs);
        if (work.params->rows <= MAX_UNPACKED_ROWS) compute_unpacked<MAX_UNPACKED_ROWS>(*work.params, first, end);
        else compute_packed(*work.params, first, end);
    }
}

constexpr int64_t MAX_CHUNKS = 4;   // maximum chunks per thread; several balance the load if other programs use a core
constexpr int64_t MIN_CHUNK = 384;  // minimum outputs per chunk, if there are enough

}  // namespace

extern "C" void linear(const LinearParams* params, Parallel parallel, int32_t threads) {
    const int64_t outputs_per_thread = (params->outputs + threads - 1) / threads;
    const int64_t chunks = threads == 1 ? 1 : std::min(MAX_CHUNKS, std::max<int64_t>(outputs_per_thread / MIN_CHUNK, 1));
    const int64_t chunk = ((outputs_per_thread + chunks - 1) / chunks + OUTPUTS - 1) / OUTPUTS * OUTPUTS;
    Work work{params, chunk, 0};
    run_on_threads(parallel, threads, run, &work);
}
