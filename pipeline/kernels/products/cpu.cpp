// Products of bf16 matrices with sums in fp32, on a CPU without instructions for them:
// out = alpha a b + beta shift. Reference: definition.py.
//
// Numbers are made fp32 once as they are copied into the cache, for as many fused multiply-adds as there
// fit, so that a product takes about the time of fp32's (Goto and van de Geijn 2008). An output is one
// chain of fused multiply-adds over the inputs, neighbours in pairs and the second of a pair first, cut
// into blocks of BLOCK whose sums are added one after the other, then the shift; it is rounded once. In
// this order linear/cpu.cpp adds up as well, so the bits of a row don't depend on how many rows there are.
//
// The lanes of a vector are neighbouring outputs.

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "../include/vectors.h"

namespace {

static_assert(Number::NUMBERS == 2, "written for bf16");

constexpr int BLOCK = 256;                    // inputs that are added up in one go
constexpr int PANEL = 2 * LANES;              // outputs of a tile
constexpr int ROWS = LANES == 16 ? 12 : 6;    // of a tile, whose sums stay in registers
constexpr int MOST_ROWS = 240;                // of the work that a thread takes at once
constexpr int MOST_OUTPUTS = 256;
constexpr int STRIDE = BLOCK + 8;             // of rows in the cache: not all in the same part of it

static_assert(MOST_ROWS % ROWS == 0 && MOST_OUTPUTS % PANEL == 0 && BLOCK % 2 == 0);

struct Matrix {  // (batch, rows, columns), of which rows or columns lie side by side; mirrored in cpu.py
    void* data;
    int64_t batch;  // strides, in numbers
    int64_t row;
    int64_t column;

    Stored* at(int64_t b, int64_t r, int64_t c) const { return static_cast<Stored*>(data) + b * batch + r * row + c * column; }
};

struct Product {  // mirrored in cpu.py
    Matrix a;      // (batch, rows, inputs)
    Matrix b;      // (batch, inputs, outputs)
    Matrix shift;  // (batch, rows, outputs), any strides; null where there is none
    Matrix out;    // (batch, rows, outputs), the outputs of a row side by side
    int64_t batch;
    int64_t rows;
    int64_t inputs;
    int64_t outputs;
    float alpha;
    float beta;
};

// What a thread works in, for as long as it lives.
struct Room {
    alignas(64) float a[MOST_ROWS * STRIDE];
    alignas(64) float b[MOST_OUTPUTS * BLOCK];
    alignas(64) float sums[MOST_ROWS * MOST_OUTPUTS];
};

// Up to `count` numbers as fp32, and zeros.
inline Vector numbers(const Stored* from, int64_t count) {
    return wide(count >= LANES ? load<Half>(from) : some<Half>(from, int(count) * int(sizeof(Stored))));
}

inline void store(float* to, Vector values) { std::memcpy(to, &values, sizeof values); }

// Rows of `a` whose inputs lie side by side: (rows, STRIDE).
void widen_rows(const Stored* from, int64_t stride, int64_t rows, int count, float* to) {
    for (int64_t row = 0; row < rows; row++)
        for (int k = 0; k < count; k += LANES) store(to + row * STRIDE + k, numbers(from + row * stride + k, count - k));
}

// Rows of `a` that lie side by side: (strips of ROWS, STRIDE, ROWS). What a vector has beyond a strip's rows is
// written over by the next input, or lies behind the last one.
void widen_strips(const Stored* from, int64_t stride, int64_t rows, int count, float* to) {
    static_assert(LANES - ROWS <= (STRIDE - BLOCK) * ROWS);
    for (int k = 0; k < count; k++)
        for (int64_t row = 0; row < rows; row += ROWS)
            store(to + row * STRIDE + k * ROWS, numbers(from + k * stride + row, rows - row));
    if (count % 2 != 0)
        for (int64_t row = 0; row < rows; row += ROWS) std::memset(to + row * STRIDE + count * ROWS, 0, ROWS * sizeof(float));
}

// Outputs of `b` that lie side by side: (BLOCK, PANEL), zeros where there are none.
void widen_panel(const Stored* from, int64_t stride, int64_t outputs, int count, float* to) {
    for (int k = 0; k < count; k++)
        for (int half = 0; half < PANEL; half += LANES)
            store(to + k * PANEL + half, half < outputs ? numbers(from + k * stride + half, outputs - half) : Vector{});
}

// The same of outputs whose inputs lie side by side.
void turn_panel(const Stored* from, int64_t stride, int64_t outputs, int count, float* to) {
    for (int half = 0; half < PANEL; half += LANES)
        for (int k = 0; k < count; k += 2 * LANES) {
            const Stored* first = from + half * stride + k;
            Bits tile[LANES];
            if (half + LANES <= outputs && k + 2 * LANES <= count) {
                turn_rows(first, stride * int64_t(sizeof(Stored)), tile);
            } else {
                for (int n = 0; n < LANES; n++) {
                    const int bytes = std::min(count - k, 2 * LANES) * int(sizeof(Stored));
                    tile[n] = half + n < outputs ? some<Bits>(first + n * stride, bytes) : Bits{};
                }
                turn(tile);
            }
            const int units = std::min((count - k + 1) / 2, LANES);
            for (int unit = 0; unit < units; unit++) {
                store(to + (k + 2 * unit) * PANEL + half, as<Vector>(tile[unit] << 16));
                store(to + (k + 2 * unit + 1) * PANEL + half, as<Vector>(tile[unit] & 0xffff0000u));
            }
        }
}

// The sums of R rows and a panel over `count` inputs, a whole number of pairs.
template <int R, bool SIDE_BY_SIDE>
void add_up(const float* a, const float* b, int count, float* sums, bool more) {
    Vector sum[R][2] = {};
#pragma GCC unroll 2
    for (int k = 0; k < count; k += 2)
        for (int second = 1; second >= 0; second--) {
            const Vector left = load<Vector>(b + (k + second) * PANEL), right = load<Vector>(b + (k + second) * PANEL + LANES);
            for (int r = 0; r < R; r++) {
                const float x = SIDE_BY_SIDE ? a[r * STRIDE + k + second] : a[(k + second) * ROWS + r];
                sum[r][0] = left * x + sum[r][0];
                sum[r][1] = right * x + sum[r][1];
            }
        }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            float* to = sums + r * MOST_OUTPUTS + half * LANES;
            store(to, more ? load<Vector>(to) + sum[r][half] : sum[r][half]);
        }
}

// The same of `rows` rows, R at the most.
template <int R, bool SIDE_BY_SIDE>
void add_up_rows(const float* a, int64_t rows, const float* b, int count, float* sums, bool more) {
    if constexpr (R > 1)
        if (rows < R) return add_up_rows<R - 1, SIDE_BY_SIDE>(a, rows, b, count, sums, more);
    add_up<R, SIDE_BY_SIDE>(a, b, count, sums, more);
}

// A part of a batch's result: rows and outputs from the first ones on.
struct Part {
    int64_t batch, row, output, rows, outputs;
};

// The inputs from `first` on, at most BLOCK, in the cache.
void widen(const Product& by, const Part& part, int64_t first, int count, Room& room) {
    const Stored* a = by.a.at(part.batch, part.row, first);
    if (by.a.column == 1) {
        widen_rows(a, by.a.row, part.rows, count, room.a);
    } else {
        widen_strips(a, by.a.column, part.rows, count, room.a);
    }
    for (int64_t n = 0; n < part.outputs; n += PANEL) {
        const Stored* from = by.b.at(part.batch, first, part.output + n);
        const int64_t live = std::min<int64_t>(part.outputs - n, PANEL);
        if (by.b.column == 1) {
            widen_panel(from, by.b.row, live, count, room.b + n * BLOCK);
            if (count % 2 != 0) std::memset(room.b + n * BLOCK + count * PANEL, 0, PANEL * sizeof(float));
        } else {
            turn_panel(from, by.b.column, live, count, room.b + n * BLOCK);
        }
    }
}

// Up to LANES numbers of a row of the shift.
Vector shift_of(const Matrix& shift, const Stored* from, int64_t count) {
    if (shift.column == 1) return numbers(from, count);
    Vector to = {};
    for (int n = 0; n < std::min<int64_t>(count, LANES); n++) to[n] = Number::widen(from[n * shift.column]);
    return to;
}

void write(const Product& by, const Part& part, const Room& room) {
    for (int64_t row = 0; row < part.rows; row++) {
        Stored* out = by.out.at(part.batch, part.row + row, part.output);
        for (int64_t n = 0; n < part.outputs; n += LANES) {
            const int64_t live = std::min<int64_t>(part.outputs - n, LANES);
            Vector sum = load<Vector>(room.sums + row * MOST_OUTPUTS + n) * by.alpha;
            if (by.shift.data != nullptr) {
                const Stored* from = by.shift.at(part.batch, part.row + row, part.output + n);
                sum = shift_of(by.shift, from, live) * by.beta + sum;
            }
            const Half rounded = __builtin_convertvector(as<Bits>(Number::round(sum)) >> 16, Half);
            std::memcpy(out + n, &rounded, sizeof(Stored) * size_t(live));
        }
    }
}

void multiply(const Product& by, const Part& part, Room& room) {
    const bool side_by_side = by.a.column == 1;
    for (int64_t first = 0; first < by.inputs; first += BLOCK) {
        const int count = int(std::min<int64_t>(by.inputs - first, BLOCK)), even = (count + 1) / 2 * 2;
        widen(by, part, first, count, room);
        for (int64_t n = 0; n < part.outputs; n += PANEL)
            for (int64_t row = 0; row < part.rows; row += ROWS) {
                const float *a = room.a + row * STRIDE, *b = room.b + n * BLOCK;
                float* sums = room.sums + row * MOST_OUTPUTS + n;
                const auto add = side_by_side ? add_up_rows<ROWS, true> : add_up_rows<ROWS, false>;
                add(a, std::min<int64_t>(part.rows - row, ROWS), b, even, sums, first > 0);
            }
    }
    write(by, part, room);
}

// Parts of a whole that are alike, each a multiple of a number and at most `most`.
struct Parts {
    int64_t whole, size, count;

    Parts(int64_t whole, int64_t multiple, int64_t most) : whole(whole) {
        const int64_t fewest = (whole + most - 1) / most;
        size = ((whole + fewest - 1) / fewest + multiple - 1) / multiple * multiple;
        count = (whole + size - 1) / size;
    }
    int64_t begin(int64_t part) const { return part * size; }
    int64_t length(int64_t part) const { return std::min(size, whole - part * size); }
};

struct Work {
    const Product& by;
    Parts rows, outputs;
    int64_t next;  // the first part that no thread has taken
};

void run(void* argument) {
    static thread_local std::unique_ptr<Room> room;
    Work& work = *static_cast<Work*>(argument);
    const int64_t each = work.rows.count * work.outputs.count;
    for (;;) {
        const int64_t item = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
        if (item >= work.by.batch * each) return;
        if (room == nullptr) room.reset(new Room);
        const int64_t row = item % each / work.outputs.count, output = item % work.outputs.count;
        const Part part = {item / each, work.rows.begin(row), work.outputs.begin(output), work.rows.length(row),
                           work.outputs.length(output)};
        multiply(work.by, part, *room);
    }
}

}  // namespace

extern "C" int64_t structure_bytes() { return sizeof(Product); }

// The bits don't depend on how many threads there are.
extern "C" void multiply(const Product* product, Parallel parallel, int32_t threads) {
    Work work{*product, Parts(product->rows, ROWS, MOST_ROWS), Parts(product->outputs, PANEL, MOST_OUTPUTS), 0};
    on_threads(parallel, threads, run, &work);
}
