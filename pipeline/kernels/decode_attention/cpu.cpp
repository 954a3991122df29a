// Attention of one new token of each sequence to a cache of keys and values, on the CPU. Reference:
// torch.nn.functional.scaled_dot_product_attention of whole sequences; in bf16 causal_attention/cpu_forward.cpp has their bits.
//
// What is added up is what PyTorch's own kernel adds up, in its order, with its two formulas for the
// exponential function: keys in blocks of 512, each with a maximum of its own; the sum of a softmax in
// as many parts as a vector has lanes; products of values in the order of their keys. NUMBER chooses the
// number format of all tensors, PIECE after how many terms a sum is cut: values over keys into pieces, a
// score over the numbers of a head, where it is shorter than two pieces, into halves. A head of keys is turned
// once for all query heads that share it.

#include <algorithm>
#include <vector>

#include "../include/softmax.h"

namespace {

constexpr int MOST_SIZE = 256;  // of a head; mirrored in cpu.py

struct Attention {  // mirrored in cpu.py
    const void* query;       // (rows, heads, size), strides given
    const void* key;         // (slots, kv_heads, width, size), the first slots being the rows'
    const void* value;
    void* out;               // (rows, heads, size)
    const int32_t* lengths;  // of each row: one past the last key that it sees; beyond width is width
    int64_t rows;
    int64_t heads;
    int64_t kv_heads;
    int64_t width;
    int64_t size;            // whole units
    int64_t query_row;       // strides, in numbers
    int64_t query_head;
    int32_t window;          // a row sees its last so many keys; 0 is all
    float scaling;
};

using Line = decltype(Number::line());  // LANES numbers as they are stored

constexpr int MOST_UNITS = MOST_SIZE / Number::NUMBERS;

// Memory on its way into the second cache, a piece with each piece of work that reads other memory.
struct Ahead {
    const char* from = nullptr;
    const char* end = nullptr;

    void fetch(int64_t bytes) {
        constexpr int CACHE_LINE = 64;
        const char* until = bytes < end - from ? from + bytes : end;
        for (; from < until; from += CACHE_LINE) __builtin_prefetch(from, 0, 2);
    }
};

// The units of LANES keys, turned: (units, LANES). Keys that there are not are zeros.
void turn_keys(const Stored* key, int64_t size, int live, Bits* turned) {
    const int units = int(size) / Number::NUMBERS;
    for (int unit = 0; unit < units; unit += LANES) {
        const Stored* from = key + unit * Number::NUMBERS;
        const int count = units - unit < LANES ? units - unit : LANES;
        if (count == LANES && live >= LANES) {
            turn_rows(from, size * int64_t(sizeof(Stored)), turned + unit);
            continue;
        }
        Bits tile[LANES];
        for (int n = 0; n < LANES; n++) tile[n] = n < live ? begun(from + n * size, count) : Bits{};
        turn(tile);
        for (int i = 0; i < count; i++) turned[unit + i] = tile[i];
    }
}

// The products of a unit, one after the other: attention multiplies what was made fp32 before.
inline Vector add_in_turn(Vector sum, Bits keys, const float* query) {
    return as<Vector>(keys) * *query + sum;
}

inline Vector add_in_turn(Vector sum, Bits keys, const uint16_t* query) {
    sum = as<Vector>(keys << 16) * as<float>(uint32_t(query[0]) << 16) + sum;
    return as<Vector>(keys & 0xffff0000u) * as<float>(uint32_t(query[1]) << 16) + sum;
}

// Scores of TILES * LANES keys: their chains of sums run side by side.
template <int TILES>
void score(const Attention& by, const Stored* query, const Bits* turned, float* scores) {
    const int size = int(by.size), units = size / Number::NUMBERS, piece = piece_of(size, PIECE);
    Vector total[TILES] = {};
    for (int first = 0; first < size; first += piece) {
        const int end = first + piece < size ? first + piece : size;
        Vector sum[TILES] = {};
        for (int k = first; k < end; k += Number::NUMBERS)
            for (int tile = 0; tile < TILES; tile++)
                sum[tile] = add_in_turn(sum[tile], turned[tile * units + k / Number::NUMBERS], query + k);
        for (int tile = 0; tile < TILES; tile++) total[tile] = total[tile] + sum[tile];
    }
    for (int tile = 0; tile < TILES; tile++) {
        const Vector scaled = total[tile] * by.scaling;
        std::memcpy(scores + tile * LANES, &scaled, sizeof scaled);
    }
}

// Sums of the numbers of a head.
struct Values {
    Vector sum[MOST_SIZE / LANES];
};

// Which keys of a block are seen, counted from its first one.
struct Keys {
    int first;  // of a whole vector: a softmax has a sum for each lane
    int end;
};

constexpr int FEW = 16;  // keys whose values are added up between two looks ahead

// Adds weights times values to sums; PARTS vectors of them run side by side.
template <int PARTS, class Load>
void add_parts(const Stored* value, int64_t size, const float* weights, const Keys& keys, Vector* to, Ahead& ahead,
               Load line) {
    Vector total[PARTS];
    for (int part = 0; part < PARTS; part++) total[part] = to[part];
    for (int piece = 0; piece < keys.end; piece += PIECE) {
        const int end = piece + PIECE < keys.end ? piece + PIECE : keys.end;
        Vector sum[PARTS] = {};
        for (int t = piece < keys.first ? keys.first : piece, stop; t < end; t = stop) {
            stop = t + FEW < end ? t + FEW : end;
            ahead.fetch(PARTS * LANES * (stop - t) * int64_t(sizeof(Stored)));
            for (int k = t; k < stop; k++)
                for (int part = 0; part < PARTS; part++)
                    sum[part] = wide(line(value + k * size + part * LANES)) * weights[k] + sum[part];
        }
        for (int part = 0; part < PARTS; part++) total[part] = total[part] + sum[part];
    }
    for (int part = 0; part < PARTS; part++) to[part] = total[part];
}

void add_values(const Stored* value, int64_t size, const float* weights, const Keys& keys, Ahead& ahead, Values& to) {
    const auto whole = [](const Stored* from) { return load<Line>(from); };
    int part = 0;
    for (; (part + 4) * LANES <= size; part += 4)
        add_parts<4>(value + part * LANES, size, weights, keys, to.sum + part, ahead, whole);
    const int left = int(size) / LANES - part;
    if (left == 3) add_parts<3>(value + part * LANES, size, weights, keys, to.sum + part, ahead, whole);
    if (left == 2) add_parts<2>(value + part * LANES, size, weights, keys, to.sum + part, ahead, whole);
    if (left == 1) add_parts<1>(value + part * LANES, size, weights, keys, to.sum + part, ahead, whole);
    part += left;
    const int rest = int(size - part * LANES) * int(sizeof(Stored));
    const auto some_of = [rest](const Stored* from) { return some<Line>(from, rest); };
    if (rest > 0) add_parts<1>(value + part * LANES, size, weights, keys, to.sum + part, ahead, some_of);
}

// What is known of a query head after some blocks of keys.
struct Head {
    Known softmax;
    Values values = {};
};

// What a thread works in.
struct Room {
    Bits turned[BLOCK / LANES * MOST_UNITS];  // a block of keys: (BLOCK / LANES, units of a head)
    float weights[BLOCK];
};

// The keys that a row sees: from the first one to one past the last.
struct Seen {
    int64_t start;
    int64_t end;
};

Seen seen_by(const Attention& by, int64_t row) {
    const int64_t said = by.lengths[row], live = said < by.width ? said : by.width;
    const int64_t start = by.window > 0 && said > by.window ? said - by.window : 0;
    return start < live ? Seen{start, live} : Seen{0, 0};  // no key is seen: nothing is read
}

// Keys and values of a block that will be read after the one at hand.
struct Next {
    Ahead keys, values;
};

// Turns the keys of a block that are seen.
void turn_block(const Attention& by, const Stored* key, const Keys& keys, Ahead& ahead, Bits* turned) {
    const int units = int(by.size) / Number::NUMBERS;
    const int64_t bytes = LANES * by.size * int64_t(sizeof(Stored));  // of a tile
    for (int tile = keys.first / LANES; tile * LANES < keys.end; tile++) {
        ahead.fetch(bytes);
        turn_keys(key + tile * LANES * by.size, by.size, keys.end - tile * LANES, turned + tile * units);
    }
}

// Adds a block of keys to what is known of a query head. Of the keys those before `seen` are masked.
void add_block(const Attention& by, const Stored* query, const Stored* value, const Keys& keys, int seen, bool is_first,
               Ahead& ahead, Room& room, Head& known) {
    Bits* turned = room.turned;
    float* weights = room.weights;
    const int units = int(by.size) / Number::NUMBERS;
    const int last = (keys.end + LANES - 1) / LANES;
    int tile = keys.first / LANES;
    for (; tile + 4 <= last; tile += 4) score<4>(by, query, turned + tile * units, weights + tile * LANES);
    for (; tile + 2 <= last; tile += 2) score<2>(by, query, turned + tile * units, weights + tile * LANES);
    for (; tile < last; tile++) score<1>(by, query, turned + tile * units, weights + tile * LANES);
    for (int t = keys.first; t < seen; t++) weights[t] = -INFINITY;
    for (int t = keys.end; t < last * LANES; t++) weights[t] = -INFINITY;
    const float shrink = weigh(weights, keys.first, keys.end, known.softmax);
    if (!is_first)
        for (Vector& part : known.values.sum) part = part * shrink;
    add_values(value, by.size, weights, keys, ahead, known.values);
}

void write(const Attention& by, const Head& known, Stored* out) {
    const float share = known.softmax.sum == 0 ? 1 : 1 / known.softmax.sum;
    for (int64_t d = 0; d < by.size; d++)
        out[d] = Number::narrow(known.values.sum[d / LANES][d % LANES] * share);
}

// Which keys of a block a row sees, counted from the block's first one; `masked` are not seen before that.
Keys keys_in(const Seen& by_row, int64_t block, int& masked) {
    masked = by_row.start > block ? int(by_row.start - block) : 0;
    const int64_t end = by_row.end - block;
    return {masked / LANES * LANES, int(end < BLOCK ? end : BLOCK)};
}

// What is seen of a block of an item, a head of keys of a row.
Next block_of(const Attention& by, int64_t item, const Seen& seen, int64_t block) {
    const int64_t bytes = by.size * int64_t(sizeof(Stored)), place = item * by.width;
    const int64_t first = std::max(block, seen.start), end = std::min(block + BLOCK, seen.end);
    if (first >= end) return {};
    const int64_t from = (place + first) * bytes, until = (place + end) * bytes;
    const auto* key = static_cast<const char*>(by.key);
    const auto* value = static_cast<const char*>(by.value);
    return {{key + from, key + until}, {value + from, value + until}};
}

// What is read after a block of an item of which `seen` is seen: its next block, or the first of the next item, of
// which `then` is.
Next after(const Attention& by, int64_t item, const Seen& seen, int64_t block, const Seen& then) {
    if (block + BLOCK < seen.end) return block_of(by, item, seen, block + BLOCK);
    return block_of(by, item + 1, then, then.start / BLOCK * BLOCK);
}

void attend(const Attention& by, int64_t item, Room& room) {
    const int64_t row = item / by.kv_heads, kv_head = item % by.kv_heads;
    const int64_t group = by.heads / by.kv_heads;
    const Seen seen = seen_by(by, row);
    const bool is_last = item + 1 == by.rows * by.kv_heads;
    const Seen then = is_last ? Seen{0, 0} : seen_by(by, (item + 1) / by.kv_heads);
    const int64_t place = item * by.width * by.size;
    const auto* key = static_cast<const Stored*>(by.key) + place;
    const auto* value = static_cast<const Stored*>(by.value) + place;
    const auto* query = static_cast<const Stored*>(by.query) + row * by.query_row;
    auto* out = static_cast<Stored*>(by.out) + row * by.heads * by.size;

    for (int64_t each = 0; each < group; each++) {
        const int64_t head = kv_head * group + each;
        Head known;
        for (int64_t block = seen.start / BLOCK * BLOCK; block < seen.end; block += BLOCK) {
            int masked;
            const Keys keys = keys_in(seen, block, masked);
            Next next = each == 0 ? after(by, item, seen, block, then) : Next{};
            // One block of keys stays turned for the group; more are turned again.
            if (each == 0 || seen.end > BLOCK)
                turn_block(by, key + block * by.size, keys, next.keys, room.turned);
            add_block(by, query + head * by.query_head, value + block * by.size, keys, masked, block <= seen.start,
                      next.values, room, known);
        }
        write(by, known, out + head * by.size);
    }
}

// Rows of one sequence, the first one's: each block of keys is turned once for all of them.
void attend_together(const Attention& by, int64_t kv_head, Room& room) {
    const int64_t group = by.heads / by.kv_heads, place = kv_head * by.width * by.size;
    const auto* key = static_cast<const Stored*>(by.key) + place;
    const auto* value = static_cast<const Stored*>(by.value) + place;
    const auto* query = static_cast<const Stored*>(by.query);
    auto* out = static_cast<Stored*>(by.out);
    Seen all = {by.width, 0};  // what any row sees
    for (int64_t row = 0; row < by.rows; row++) {
        const Seen seen = seen_by(by, row);
        if (seen.start < all.start) all.start = seen.start;
        if (seen.end > all.end) all.end = seen.end;
    }
    const Seen then = kv_head + 1 == by.kv_heads ? Seen{0, 0} : all;
    std::vector<Head> known(size_t(by.rows * group));
    for (int64_t block = all.start / BLOCK * BLOCK; block < all.end; block += BLOCK) {
        int masked;
        Next next = after(by, kv_head, all, block, then);
        turn_block(by, key + block * by.size, keys_in(all, block, masked), next.keys, room.turned);
        for (int64_t row = 0; row < by.rows; row++) {
            const Seen seen = seen_by(by, row);
            if (block >= seen.end || block + BLOCK <= seen.start) continue;
            const Keys keys = keys_in(seen, block, masked);
            for (int64_t each = 0; each < group; each++)
                add_block(by, query + row * by.query_row + (kv_head * group + each) * by.query_head,
                          value + block * by.size, keys, masked, block <= seen.start, next.values, room,
                          known[size_t(row * group + each)]);
        }
    }
    for (int64_t row = 0; row < by.rows; row++)
        for (int64_t each = 0; each < group; each++)
            write(by, known[size_t(row * group + each)], out + (row * by.heads + kv_head * group + each) * by.size);
}

struct Work {
    const Attention* attention;
    bool together;  // whether all rows are of one sequence
    int64_t share;  // items that a thread takes at once: neighbours in memory
    int64_t next;   // the first that no thread has taken
};

void run(void* argument) {
    Work& work = *static_cast<Work*>(argument);
    const Attention& by = *work.attention;
    const int64_t items = work.together ? by.kv_heads : by.rows * by.kv_heads;
    static thread_local Room room;
    for (;;) {
        int64_t item = __atomic_fetch_add(&work.next, work.share, __ATOMIC_RELAXED);
        const int64_t end = item + work.share < items ? item + work.share : items;
        if (item >= items) return;
        for (; item < end; item++) {
            if (work.together)
                attend_together(by, item, room);
            else
                attend(by, item, room);
        }
    }
}

constexpr int SHARES = 8;  // of each thread: lengths differ

}  // namespace

extern "C" int64_t structure_bytes() { return sizeof(Attention); }

// The bits don't depend on how many threads there are.
extern "C" void decode_attention(const Attention* attention, Parallel parallel, int32_t threads) {
    const int64_t share = attention->rows * attention->kv_heads / (SHARES * threads);
    Work work{attention, false, share > 1 ? share : 1, 0};
    on_threads(parallel, threads, run, &work);
}

// The same of rows that are tokens of one sequence, that of the first slot.
extern "C" void sequence_attention(const Attention* attention, Parallel parallel, int32_t threads) {
    Work work{attention, true, 1, 0};
    on_threads(parallel, threads, run, &work);
}
