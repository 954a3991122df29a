// A linear layer of few rows on the CPU: out = x w^T + bias. Reference: torch.nn.functional.linear.
//
// Weights are read once for all rows, one after the other: with few rows memory is the limit. The lanes of a
// vector are neighbouring inputs, and are summed at the end. NUMBER is the number format of all tensors.

#include <algorithm>

#include "include/vectors.h"

namespace {

// A tile of outputs and rows whose sums stay in registers.
constexpr int OUTPUTS = LANES == 16 ? 4 : 2;
constexpr int ROWS = LANES == 16 ? 6 : 4;
constexpr int FEW = 3;  // rows of which more outputs fit into a tile

struct Product {  // mirrored in linear.py
    const void* x;       // (rows, inputs)
    const void* weight;  // (outputs, inputs)
    const void* bias;    // (outputs), or null
    void* out;           // (rows, outputs)
    int64_t rows;
    int64_t inputs;      // whole units
    int64_t outputs;
};

template <int N, int R>
inline void add(const Stored* weight, const Stored* x, int64_t inputs, int bytes, Vector (&sum)[N][R]) {
    const auto read = [bytes](const Stored* from) {
        return bytes == sizeof(Bits) ? load<Bits>(from) : load_part<Bits>(from, bytes);
    };
    Bits line[N];
    for (int n = 0; n < N; n++) line[n] = read(weight + n * inputs);
    for (int r = 0; r < R; r++) {
        const Bits row = read(x + r * inputs);
        for (int n = 0; n < N; n++) sum[n][r] = Number::add(sum[n][r], line[n], row);
    }
}

// N outputs of R rows.
template <int N, int R>
void compute_tile(const Product& by, int64_t output, int64_t row) {
    constexpr int STEP = LANES * Number::NUMBERS;
    const auto* weight = static_cast<const Stored*>(by.weight) + output * by.inputs;
    const auto* x = static_cast<const Stored*>(by.x) + row * by.inputs;
    Vector sum[N][R] = {};
    int64_t k = 0;
    for (; k + STEP <= by.inputs; k += STEP) {
        for (int n = 0; n < N; n++) __builtin_prefetch(weight + (N + n) * by.inputs + k, 0, 2);  // the next tile
        add<N, R>(weight + k, x + k, by.inputs, sizeof(Bits), sum);
    }
    if (k < by.inputs) add<N, R>(weight + k, x + k, by.inputs, int(by.inputs - k) * int(sizeof(Stored)), sum);

    Vector sums[(N * R + LANES - 1) / LANES];
    for (int first = 0; first < N * R; first += LANES) {
        Vector part[LANES] = {};
        for (int i = first; i < std::min(first + LANES, N * R); i++) part[i - first] = sum[i / R][i % R];
        sums[first / LANES] = horizontal_sums(part);
    }
    const auto* bias = static_cast<const Stored*>(by.bias);
    auto* out = static_cast<Stored*>(by.out) + row * by.outputs + output;
    for (int n = 0; n < N; n++) {
        float shift = 0;
        if (bias != nullptr) {
            const uint32_t stored = sizeof(Stored) == 2 ? uint32_t(as<uint16_t>(load<uint16_t>(bias + output + n))) << 16
                                                        : load<uint32_t>(bias + output + n);
            shift = as<float>(stored);
        }
        for (int r = 0; r < R; r++)
            out[r * by.outputs + n] = Number::narrow(sums[(n * R + r) / LANES][(n * R + r) % LANES] + shift);
    }
}

template <int N, int R>
void compute_rows(const Product& by, int64_t output, int64_t row, int64_t rows) {
    if constexpr (R > 1)
        if (rows < R) return compute_rows<N, R - 1>(by, output, row, rows);
    compute_tile<N, R>(by, output, row);
}

// Outputs of a tile of few rows: a horizontal sum takes as long for one tile as for LANES sums.
constexpr int outputs_for(int rows) { return LANES / rows; }

// All rows at once.
template <int R>
void compute_few(const Product& by, int64_t output, int64_t end) {
    if constexpr (R > 1)
        if (by.rows < R) return compute_few<R - 1>(by, output, end);
    constexpr int N = outputs_for(R);
    for (; output + N <= end; output += N) compute_tile<N, R>(by, output, 0);
    for (; output < end; output++) compute_tile<1, R>(by, output, 0);
}

template <int N>
void compute_outputs(const Product& by, int64_t output, int64_t end) {
    const int64_t groups = (by.rows + ROWS - 1) / ROWS, most = (by.rows + groups - 1) / groups;
    for (; output + N <= end; output += N)
        for (int64_t row = 0; row < by.rows; row += most)
            compute_rows<N, ROWS>(by, output, row, std::min(most, by.rows - row));
    if constexpr (N > 1)
        if (output < end) compute_outputs<1>(by, output, end);
}

struct Work {
    const Product* product;
    int64_t share;  // outputs that a thread takes at once: neighbours in memory
    int64_t next;   // the first that no thread has taken
};

void run(void* argument) {
    Work& work = *static_cast<Work*>(argument);
    for (;;) {
        const int64_t first = __atomic_fetch_add(&work.next, work.share, __ATOMIC_RELAXED);
        if (first >= work.product->outputs) return;
        const int64_t end = std::min(first + work.share, work.product->outputs);
        if (work.product->rows <= FEW) compute_few<FEW>(*work.product, first, end);
        else compute_outputs<OUTPUTS>(*work.product, first, end);
    }
}

constexpr int64_t SHARES = 4;       // of each thread at the most: another program may use its core
constexpr int64_t SMALLEST = 384;   // outputs of a share, where there are so many

}  // namespace

extern "C" void linear(const Product* product, Parallel parallel, int32_t threads) {
    const int64_t each = (product->outputs + threads - 1) / threads;
    const int64_t shares = std::min(SHARES, std::max<int64_t>(each / SMALLEST, 1));
    const int64_t share = ((each + shares - 1) / shares + OUTPUTS - 1) / OUTPUTS * OUTPUTS;
    Work work{product, share, 0};
    on_threads(parallel, threads, run, &work);
}
