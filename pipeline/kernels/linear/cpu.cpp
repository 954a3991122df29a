// A linear layer of few rows on the CPU: out = x w^T + bias. Reference: torch.nn.functional.linear.
//
// A weight is read once for all rows; with few of them memory is the limit. An output is one chain of
// fused multiply-adds over the inputs in their order, cut into blocks whose sums are added one after
// the other:
//
//   sum_b ( fma(x_k, w_k, ... fma(x_1, w_1, 0)) over the inputs of block b )
//
// which is how the libraries under PyTorch add up products of many rows. With their block length the
// bits are theirs: what generates rounds as what trains, and the bits of a row don't depend on how many
// rows there are. Chosen at compile time:
//
//   NUMBER   Float32 | BFloat16   number format of all tensors
//
// The lanes of a vector are neighbouring outputs: weights are turned on their way into the cache.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "../include/vectors.h"

namespace {

constexpr int VECTORS = LANES == 16 ? 2 : 4;         // of outputs computed together: one sum waits for the last
constexpr int PANEL = VECTORS * LANES;
constexpr int MOST_TOGETHER = LANES == 16 ? 12 : 3;  // rows whose sums stay in registers
constexpr int CHUNK = 128 / Number::LINES;  // units of a panel that are turned at a time, at the most
constexpr int AHEAD = 256;        // units after which what is fetched now is turned, at the most
constexpr int MOST_ROWS = 64;     // mirrored in cpu.py

using Factor = Number::Factor;
constexpr int LINES = Number::LINES;

struct Product {  // mirrored in cpu.py
    const void* x;       // (rows, inputs)
    const void* weight;  // (outputs, inputs), or (inputs, outputs) where turned
    const void* bias;    // (outputs), or null
    void* out;           // (rows, outputs)
    int64_t rows;        // at most MOST_ROWS
    int64_t inputs;      // whole units
    int64_t outputs;
    int64_t block;       // inputs of a block; whole units
    int32_t turned;
    int32_t bias_first;  // the sum over blocks begins with the bias; else it is added at the end
    int32_t halves;      // what is left of more than a block and less than two is cut in halves
};

// Inputs of the next block, if so many are left.
inline int64_t block_of(const Product& by, int64_t left) {
    if (left <= by.block) return left;
    if (!by.halves || left >= 2 * by.block) return by.block;
    const int64_t units = left / Number::NUMBERS;
    return (units + 1) / 2 * Number::NUMBERS;
}

// The sums of R rows of x go on over `count` units.
template <int R>
void add_units(const Factor* x, int64_t stride, const uint32_t* panel, int count, float* sums) {
    Vector sum[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = load<Vector>(sums + r * PANEL + v * LANES);
    for (int k = 0; k < count * LINES; k++) {
        // Two by their names: of an array GCC 12 makes code that is a tenth slower.
        if constexpr (VECTORS == 2) {
            const Bits first = load<Bits>(panel + k * PANEL), second = load<Bits>(panel + k * PANEL + LANES);
            for (int r = 0; r < R; r++) {
                const Factor* factor = x + r * stride + k * (Number::NUMBERS / LINES);
                sum[r][0] = Number::add(sum[r][0], first, factor);
                sum[r][1] = Number::add(sum[r][1], second, factor);
            }
        } else {
            Bits line[VECTORS];
            for (int v = 0; v < VECTORS; v++) line[v] = load<Bits>(panel + k * PANEL + v * LANES);
            for (int r = 0; r < R; r++) {
                const Factor* factor = x + r * stride + k * (Number::NUMBERS / LINES);
                for (int v = 0; v < VECTORS; v++) sum[r][v] = Number::add(sum[r][v], line[v], factor);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) std::memcpy(sums + r * PANEL + v * LANES, &sum[r][v], sizeof(Vector));
}

// The same of `rows` rows, R at the most.
template <int R>
void add_rows(const Factor* x, int64_t stride, int64_t rows, const uint32_t* panel, int count, float* sums) {
    if constexpr (R > 1)
        if (rows < R) return add_rows<R - 1>(x, stride, rows, panel, count, sums);
    add_units<R>(x, stride, panel, count, sums);
}

// Units of neighbouring outputs, in the lines that they are multiplied in.
inline void put(Bits units, uint32_t* panel) {
    for (int i = 0; i < LINES; i++) {
        const Bits line = Number::line(units, i);
        std::memcpy(panel + i * PANEL, &line, sizeof line);
    }
}

inline void put_unit(uint32_t unit, uint32_t* panel) {
    for (int i = 0; i < LINES; i++) panel[i * PANEL] = Number::line(unit, i);
}

// `count` units from input `begin` of the outputs from `output` on: (count, LINES, PANEL). Outputs that there
// are not weigh 0.
void fill_panel(const Product& by, int64_t output, int64_t begin, int count, uint32_t* panel) {
    const int64_t across = by.turned ? 1 : by.inputs, along = by.turned ? by.outputs : 1;
    const auto* weight = static_cast<const Stored*>(by.weight) + output * across + begin * along;
    const int live = by.outputs - output < PANEL ? int(by.outputs - output) : PANEL;
    const int64_t units = by.inputs / Number::NUMBERS, ahead = std::min<int64_t>(units, AHEAD);
    int k = 0;
    if (!by.turned && live == PANEL)
        for (; k + LANES <= count; k += LANES)
            for (int v = 0; v < VECTORS; v++) {
                const Stored* from = weight + v * LANES * across + k * Number::NUMBERS;
                Bits tile[LANES];
                turn_rows(from, across * int64_t(sizeof(Stored)), tile);
                // Of this panel or the next, into the second cache: the first is full of this panel.
                const bool is_here = begin / Number::NUMBERS + k + ahead < units;
                const int64_t later = is_here ? ahead : ahead + (PANEL - 1) * units;
                for (int n = 0; n < LANES; n++) __builtin_prefetch(from + n * across + later * Number::NUMBERS, 0, 2);
                for (int i = 0; i < LANES; i++) put(tile[i], panel + (k + i) * LINES * PANEL + v * LANES);
            }
    for (; k < count; k++) {
        const Stored* from = weight + k * Number::NUMBERS * along;
        uint32_t* line = panel + k * LINES * PANEL;
        for (int n = 0; n < live; n++) put_unit(Number::unit(from + n * across, along), line + n);
        for (int n = live; n < PANEL; n++) put_unit(0, line + n);
    }
}

#ifdef __AVX512F__
constexpr bool TURNS_BESIDE = true;
constexpr int FEW = 4;  // units that are turned at a time between products

// FEW units of LANES outputs.
inline void turn_few(const Stored* from, int64_t across, Bits* to) {
    Bits row[4];
    const auto part = [&](int n) { return load<__m128i>(from + n * across); };
    for (int r = 0; r < 4; r++) {
        __m512i four = _mm512_castsi128_si512(part(r));
        four = _mm512_inserti32x4(four, part(r + 4), 1);
        four = _mm512_inserti32x4(four, part(r + 8), 2);
        row[r] = as<Bits>(_mm512_inserti32x4(four, part(r + 12), 3));
    }
    turn_four(row[0], row[1], row[2], row[3], to, VECTORS);
}

// `fill_panel` and `add_units` of a whole panel in one, as far as units come in fours; how many that are. What
// turns units works beside what multiplies them, and they stay in registers.
template <int R>
int turn_and_add(const Factor* x, const Stored* weight, int64_t across, int64_t left, int count, float* sums) {
    const int64_t units = across / Number::NUMBERS, ahead = std::min<int64_t>(units, AHEAD);
    Vector sum[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = load<Vector>(sums + r * PANEL + v * LANES);
    int k = 0;
    for (; k + FEW <= count; k += FEW) {
        Bits turned[FEW * VECTORS];
        for (int v = 0; v < VECTORS; v++)
            turn_few(weight + v * LANES * across + k * Number::NUMBERS, across, turned + v);
        // Of the panel's rows each once in a line of the cache; `left` units of them are still to be read.
        constexpr int ROWS = PANEL * FEW / LANES;
        const int64_t later = k + (k + ahead < left ? ahead : ahead + (PANEL - 1) * units);
        for (int n = k % LANES / FEW * ROWS, i = 0; i < ROWS; i++)
            __builtin_prefetch(weight + (n + i) * across + later * Number::NUMBERS, 0, 2);
        for (int i = 0; i < FEW * LINES; i++) {
            const Bits one = Number::line(turned[i / LINES * VECTORS], i % LINES);
            const Bits two = Number::line(turned[i / LINES * VECTORS + 1], i % LINES);
            for (int r = 0; r < R; r++) {
                const Factor* factor = x + r * across + (k * LINES + i) * (Number::NUMBERS / LINES);
                sum[r][0] = Number::add(sum[r][0], one, factor);
                sum[r][1] = Number::add(sum[r][1], two, factor);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) std::memcpy(sums + r * PANEL + v * LANES, &sum[r][v], sizeof(Vector));
    return k;
}

template <int R>
int turn_and_add_rows(const Factor* x, int64_t rows, const Stored* weight, int64_t across, int64_t left, int count,
                      float* sums) {
    if constexpr (R > 1)
        if (rows < R) return turn_and_add_rows<R - 1>(x, rows, weight, across, left, count, sums);
    return turn_and_add<R>(x, weight, across, left, count, sums);
}
#else
constexpr bool TURNS_BESIDE = false;  // there are too few registers

template <int R>
int turn_and_add_rows(const Factor*, int64_t, const Stored*, int64_t, int64_t, int, float*) { return 0; }
#endif

void compute_panel(const Product& by, const Factor* x, int64_t output) {
    alignas(64) uint32_t panel[CHUNK * LINES * PANEL];
    alignas(64) float sums[MOST_ROWS * PANEL];
    alignas(64) float total[MOST_ROWS * PANEL];
    float shift[PANEL] = {};
    const int live = by.outputs - output < PANEL ? int(by.outputs - output) : PANEL;
    const auto* bias = static_cast<const Stored*>(by.bias);
    const auto* weight = static_cast<const Stored*>(by.weight) + output * by.inputs;
    const int64_t groups = (by.rows + MOST_TOGETHER - 1) / MOST_TOGETHER;
    const int64_t together = (by.rows + groups - 1) / groups;
    // Where all rows' sums stay in registers, products and turning overlap: few units are turned at a time.
    const bool turns_beside = TURNS_BESIDE && groups == 1 && !by.turned && live == PANEL;
    const int chunk = groups > 1 || turns_beside ? CHUNK : LANES;
    for (int n = 0; bias != nullptr && n < live; n++) shift[n] = Number::widen(bias[output + n]);

    for (int64_t first = 0, end; first < by.inputs; first = end) {
        end = first + block_of(by, by.inputs - first);
        std::memset(sums, 0, by.rows * PANEL * sizeof(float));
        for (int64_t begin = first; begin < end; begin += chunk * Number::NUMBERS) {
            const int64_t left = (end - begin) / Number::NUMBERS;
            const int count = left < chunk ? int(left) : chunk;
            int done = 0;
            if (turns_beside)
                done = turn_and_add_rows<MOST_TOGETHER>(x + begin, by.rows, weight + begin, by.inputs,
                                                        (by.inputs - begin) / Number::NUMBERS, count, sums);
            if (done == count) continue;
            const int64_t from = begin + done * Number::NUMBERS;
            fill_panel(by, output, from, count - done, panel);
            for (int64_t row = 0; row < by.rows; row += together)
                add_rows<MOST_TOGETHER>(x + row * by.inputs + from, by.inputs, std::min(by.rows - row, together), panel,
                                        count - done, sums + row * PANEL);
        }
        for (int64_t row = 0; row < by.rows; row++)
            for (int n = 0; n < PANEL; n++) {
                float& sum = total[row * PANEL + n];
                const bool begins = first == 0 && !(by.bias_first && bias != nullptr);
                const float before = first == 0 ? shift[n] : sum;
                sum = begins ? sums[row * PANEL + n] : before + sums[row * PANEL + n];
            }
    }
    const bool bias_last = bias != nullptr && !by.bias_first;
    for (int64_t row = 0; row < by.rows; row++) {
        auto* out = static_cast<Stored*>(by.out) + row * by.outputs + output;
        for (int n = 0; n < live; n++) {
            const float sum = total[row * PANEL + n];
            out[n] = Number::narrow(bias_last ? sum + shift[n] : sum);
        }
    }
}

struct Work {
    const Product* product;
    int64_t panels;
    int64_t share;  // panels that a thread takes at once: neighbours in memory, of which one fetches the next
    int64_t next;   // the first that no thread has taken
};

// All of x as it is multiplied; where that isn't as it is stored, in memory of the thread's own, and the second
// number of each unit first.
const Factor* factors(const Product& by) {
    if constexpr (std::is_same_v<Factor, Stored>) {
        return static_cast<const Factor*>(by.x);
    } else {
        static thread_local std::vector<Factor> room;
        const size_t count = size_t(by.rows * by.inputs);
        if (room.size() < count) room.resize(count);
        const auto* x = static_cast<const Stored*>(by.x);
        for (size_t at = 0; at < count; at++) room[at] = Number::widen(x[at ^ 1]);
        return room.data();
    }
}

void run(void* argument) {
    Work& work = *static_cast<Work*>(argument);
    const Factor* x = factors(*work.product);
    for (;;) {
        const int64_t first = __atomic_fetch_add(&work.next, work.share, __ATOMIC_RELAXED);
        const int64_t end = std::min(first + work.share, work.panels);
        if (first >= end) return;
        for (int64_t panel = first; panel < end; panel++) compute_panel(*work.product, x, panel * PANEL);
    }
}

constexpr int64_t SHARES = 4;     // of each thread at the most, all alike: others may use its core
constexpr int64_t SMALLEST = 12;  // panels of a share, where there are so many for each thread

}  // namespace

extern "C" int64_t structure_bytes() { return sizeof(Product); }

// The bits don't depend on how many threads there are.
extern "C" void linear(const Product* product, Parallel parallel, int32_t threads) {
    if (product->rows == 0) return;
    const int64_t panels = (product->outputs + PANEL - 1) / PANEL;
    const int64_t each = (panels + threads - 1) / threads;
    const int64_t shares = std::min(SHARES, std::max<int64_t>(each / SMALLEST, 1));
    Work work{product, panels, (each + shares - 1) / shares, 0};
    on_threads(parallel, threads, run, &work);
}
