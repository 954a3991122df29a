// Heads of whole sequences in bf16, and the products of attention to them: one loop, of a unit of 32 bits
// of one side times a vector of such units of the other.

#pragma once

#include "../include/exponential.h"

namespace {

static_assert(Number::NUMBERS == 2, "written for units of two numbers");

constexpr int MOST_TOGETHER = LANES == 16 ? 4 : 2;  // vectors of a row whose sums stay in registers

struct Heads {  // (batch, heads, tokens, size), the numbers of a head side by side
    const void* data;
    int64_t sequence;  // strides, in numbers
    int64_t head;
    int64_t token;
};

inline int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// The rows of one sequence's head.
struct Rows {
    Stored* first;
    int64_t stride;

    Rows(const Heads& of, int64_t sequence, int64_t head)
        : first(static_cast<Stored*>(const_cast<void*>(of.data)) + sequence * of.sequence + head * of.head), stride(of.token) {}
    Stored* operator[](int64_t token) const { return first + token * stride; }
};

inline Half part_of(const Stored* row, int64_t numbers) {
    return numbers >= LANES ? load<Half>(row) : some<Half>(row, int(numbers) * int(sizeof(Stored)));
}

void write_row(const Vector* sums, int64_t size, Stored* to) {
    for (int64_t d = 0; d < size; d += LANES) {
        const Half part = __builtin_convertvector(as<Bits>(Number::round(sums[d / LANES])) >> 16, Half);
        std::memcpy(to + d, &part, sizeof(Stored) * size_t(size - d < LANES ? size - d : LANES));
    }
}

// Places in memory that is handed out piece by piece, each of whole cache lines.
struct Shelf {
    char* first;
    int64_t bytes;  // handed out

    template <class To>
    void take(To*& to, int64_t count) {
        constexpr int64_t CACHE_LINE = 64;
        to = reinterpret_cast<To*>(first + bytes);
        bytes += round_up(count * int64_t(sizeof(To)), CACHE_LINE);
    }
};

// Has `work` done for each of so many items, by threads that take them in turn and have a room each; `by` is
// a call with `rooms` of them.
template <class Room, class Call, class Work>
void in_rooms(const Call& by, int64_t items, Parallel parallel, int32_t threads, const Work& work) {
    struct Team {
        const Call& by;
        const Work& work;
        int64_t items;
        int64_t bytes;    // of a room
        int64_t next;     // the first item that no thread has taken
        int64_t members;  // threads that have begun
    } team{by, work, items, Room(by.tokens, by.size, nullptr).bytes, 0, 0};
    const auto run = [](void* argument) {
        auto& team = *static_cast<Team*>(argument);
        const int64_t member = __atomic_fetch_add(&team.members, 1, __ATOMIC_RELAXED);
        if (member >= team.by.rooms) return;
        const Room room(team.by.tokens, team.by.size, static_cast<char*>(team.by.room) + member * team.bytes);
        for (;;) {
            const int64_t item = __atomic_fetch_add(&team.next, 1, __ATOMIC_RELAXED);
            if (item >= team.items) return;
            team.work(item, room);
        }
    };
    on_threads(parallel, threads, run, &team);
}

// The two numbers of a unit at its place among rows and units.
struct Units {
    const void* first;
    int64_t row;  // bytes from one to the next
    int64_t unit;

    uint32_t at(int64_t i, int64_t k) const { return load<uint32_t>(static_cast<const char*>(first) + i * row + k * unit); }
};

// Vectors of units, `next` of them from one unit to the next and `part` from one part of a row to the next.
struct Lines {
    const Bits* first;
    int64_t next;
    int64_t part;
};

template <class Terms, int ROWS, int PARTS>
inline void multiply(const Units& a, int64_t row, const Lines& b, int64_t part, int units, Vector* to, int64_t stride, bool more) {
    Vector sum[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) sum[r][p] = more ? to[(row + r) * stride + part + p] : Vector{};
    for (int k = 0; k < units; k++) {
        Bits line[PARTS];
        for (int p = 0; p < PARTS; p++) line[p] = b.first[k * b.next + (part + p) * b.part];
        for (int r = 0; r < ROWS; r++) {
            const uint32_t x = a.at(row + r, k);
            for (int p = 0; p < PARTS; p++) sum[r][p] = Terms::add(sum[r][p], line[p], x);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) to[(row + r) * stride + part + p] = sum[r][p];
}

template <class Terms, int PARTS>
inline void multiply_rows(const Units& a, int rows, const Lines& b, int64_t part, int units, Vector* to, int64_t stride, bool more) {
    constexpr int MOST = LANES == 16 && PARTS < 4 ? 8 : 4;
    int row = 0;
    for (; row + MOST <= rows; row += MOST) multiply<Terms, MOST, PARTS>(a, row, b, part, units, to, stride, more);
    for (; row + 2 <= rows; row += 2) multiply<Terms, 2, PARTS>(a, row, b, part, units, to, stride, more);
    for (; row < rows; row++) multiply<Terms, 1, PARTS>(a, row, b, part, units, to, stride, more);
}

// to = a b, or to = to + a b where there is more: (rows, parts) vectors, of sums over units.
template <class Terms>
void product(const Units& a, int rows, const Lines& b, int parts, int units, Vector* to, int64_t stride, bool more) {
    int part = 0;
    for (; part + MOST_TOGETHER <= parts; part += MOST_TOGETHER)
        multiply_rows<Terms, MOST_TOGETHER>(a, rows, b, part, units, to, stride, more);
    if constexpr (MOST_TOGETHER == 4) {
        if (parts - part == 3) multiply_rows<Terms, 3>(a, rows, b, part, units, to, stride, more);
        if (parts - part == 2) multiply_rows<Terms, 2>(a, rows, b, part, units, to, stride, more);
    }
    if (parts - part == 1) multiply_rows<Terms, 1>(a, rows, b, part, units, to, stride, more);
}

}  // namespace
