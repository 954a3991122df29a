// Causal attention of whole sequences in bf16, on the CPU. Reference:
// torch.nn.functional.scaled_dot_product_attention. A token has the bits that decode_attention/cpu.cpp gives it,
// where is said what is added up in which order: PyTorch's, but for sums that it cuts by the length of a call.
//
// Keys, values and queries of a head are made fp32 once: a score and a sum of values are chains of fused
// multiply-adds, TOKENS of them side by side for all keys that the last one sees. What others do not see
// of these weighs 0, which changes no sum of finite numbers.

#include <algorithm>

#include "../include/softmax.h"
#include "heads.h"

namespace {

constexpr int TOKENS = 32;   // of a tile; mirrored in cpu.py
constexpr int TILES = BLOCK / LANES;

static_assert(BLOCK % TOKENS == 0, "a tile of tokens begins and ends in the same block of keys");

struct Forward {  // mirrored in cpu.py
    Heads query;
    Heads key;
    Heads value;
    Heads out;         // written
    float* logsumexp;  // written: (batch, heads, tokens - first)
    int64_t batch;
    int64_t heads;
    int64_t tokens;    // of keys and values
    int64_t first;     // token whose query is the first one: those before it are seen, and ask nothing
    int64_t size;      // whole units
    void* room;        // several of room_bytes() bytes, at an address of a whole cache line
    int64_t rooms;     // threads that are to work: others of the team have nothing to do
    int32_t piece;     // how many products are added up in one go
    float scaling;
};

// What a thread works in: keys turned and values of a head, and of a tile of tokens their queries, the
// weights of a block of keys, and sums of values.
struct Room {
    int64_t parts;
    Vector* keys;    // (tiles, size): LANES keys each
    Vector* values;  // (keys, parts)
    float* queries;  // (TOKENS, size)
    Vector* weights; // (TOKENS, TILES)
    Vector* sums;    // (TOKENS, parts)
    Vector* more;    // what is to be added to sums or to weights
    int64_t bytes;

    Room(int64_t tokens, int64_t size, char* at) {
        const int64_t keys_here = round_up(tokens, LANES);
        parts = round_up(size, LANES) / LANES;
        Shelf shelf{at, 0};
        shelf.take(keys, keys_here / LANES * size);
        shelf.take(values, keys_here * parts);
        shelf.take(queries, TOKENS * size);
        shelf.take(weights, TOKENS * TILES);
        shelf.take(sums, TOKENS * parts);
        shelf.take(more, TOKENS * std::max(parts, int64_t(TILES)));
        bytes = shelf.bytes;
    }
};

// to = a b, where it begins, or to = to + a b: sums over pieces of the units, one piece after the other.
void product_in_pieces(Units a, int rows, Lines b, int parts, int units, int piece, Vector* to, int64_t stride, bool begins, Vector* more) {
    for (int first = 0; first < units; first += piece, begins = false) {
        const int count = std::min(piece, units - first);
        product<Float32>(a, rows, b, parts, count, begins ? to : more, stride, false);
        a.first = static_cast<const char*>(a.first) + count * a.unit;
        b.first += count * b.next;
        if (begins) continue;
        for (int row = 0; row < rows; row++)
            for (int part = 0; part < parts; part++) to[row * stride + part] = to[row * stride + part] + more[row * stride + part];
    }
}

// The first `count` keys, turned, and values of a head as fp32.
void widen(const Rows& key, const Rows& value, int64_t count, int64_t size, const Room& room) {
    Vector* turned = room.keys;
    for (int64_t tile = 0; tile < count; tile += LANES)
        for (int64_t first = 0; first < size; first += LANES * Number::NUMBERS) {
            const int units = int(std::min(size - first, int64_t(LANES) * Number::NUMBERS)) / Number::NUMBERS;
            Bits part[LANES];
            for (int n = 0; n < LANES; n++) part[n] = tile + n < count ? begun(key[tile + n] + first, units) : Bits{};
            turn(part);
            for (int unit = 0; unit < units; unit++) {
                *turned++ = as<Vector>(part[unit] << 16);
                *turned++ = as<Vector>(part[unit] & 0xffff0000u);
            }
        }
    Vector* to = room.values;
    for (int64_t token = 0; token < count; token++)
        for (int64_t d = 0; d < size; d += LANES) *to++ = wide(part_of(value[token] + d, size - d));
}

// Scores of a token's keys become weights, those from `seen` on 0; what earlier sums shrink by.
float weigh_seen(Vector* row, int seen, int tiles, float scaling, Known& known) {
    auto* scores = reinterpret_cast<float*>(row);
    const int last = (seen + LANES - 1) / LANES;
    for (int t = 0; t < last; t++) row[t] = row[t] * scaling;
    for (int key = seen; key < last * LANES; key++) scores[key] = -INFINITY;
    for (int t = last; t < tiles; t++) row[t] = Vector{};
    return weigh(scores, 0, seen, known);
}

// Attention of `rows` tokens from `token` on, all of one tile, whose keys and values are in the room.
void attend(const Forward& by, const Rows& query, const Rows& out, int64_t token, int rows, float* logsumexp, const Room& room) {
    const int size = int(by.size), parts = int(room.parts);
    const int64_t asked = token - by.first;
    for (int row = 0; row < rows; row++)
        for (int d = 0; d < size; d++) room.queries[row * size + d] = Number::widen(query[asked + row][d]);
    const Units queries = {room.queries, 4 * size, 4};
    Known known[TOKENS];
    for (int64_t block = 0; block < token + rows; block += BLOCK) {
        const int keys = int(std::min(token + rows - block, int64_t(BLOCK))), tiles = (keys + LANES - 1) / LANES;
        const Lines turned = {reinterpret_cast<const Bits*>(room.keys + block / LANES * size), 1, size};
        product_in_pieces(queries, rows, turned, tiles, size, piece_of(size, by.piece), room.weights, TILES, true, room.more);
        for (int row = 0; row < rows; row++) {
            const int seen = int(std::min(token + row + 1 - block, int64_t(BLOCK)));
            const float shrink = weigh_seen(room.weights + row * TILES, seen, tiles, by.scaling, known[row]);
            if (block == 0) continue;
            for (int part = 0; part < parts; part++) room.sums[row * parts + part] = room.sums[row * parts + part] * shrink;
        }
        const Units weights = {room.weights, BLOCK * 4, 4};
        const Lines values = {reinterpret_cast<const Bits*>(room.values + block * parts), parts, 1};
        product_in_pieces(weights, rows, values, parts, keys, by.piece, room.sums, parts, block == 0, room.more);
    }
    for (int row = 0; row < rows; row++) {
        const float share = 1 / known[row].sum;
        for (int part = 0; part < parts; part++) room.sums[row * parts + part] = room.sums[row * parts + part] * share;
        write_row(room.sums + row * parts, size, out[asked + row]);
        logsumexp[asked + row] = known[row].most + std::log(known[row].sum);
    }
}

constexpr int SHARES = 4;  // of each thread, where there are fewer heads

}  // namespace

extern "C" int64_t structure_bytes() { return sizeof(Forward); }

extern "C" int64_t room_bytes(int64_t tokens, int64_t size) { return Room(tokens, size, nullptr).bytes; }

// The bits don't depend on how many threads there are.
extern "C" void attention(const Forward* forward, Parallel parallel, int32_t threads) {
    const Forward& by = *forward;
    const int64_t heads = by.batch * by.heads, before = by.first / TOKENS;
    const int64_t tiles = (by.tokens + TOKENS - 1) / TOKENS - before;
    const int64_t wanted = threads > 1 ? (SHARES * threads + heads - 1) / heads : 1;
    const int64_t shares = std::min(tiles, wanted);  // of a head's tiles of tokens
    in_rooms<Room>(by, heads * shares, parallel, threads, [&](int64_t item, const Room& room) {
        const int64_t at = item / shares, share = shares - 1 - item % shares;  // the longest first
        const int64_t sequence = at / by.heads, head = at % by.heads;
        const int64_t begin = std::max((before + share * tiles / shares) * TOKENS, by.first);
        const int64_t end = std::min((before + (share + 1) * tiles / shares) * TOKENS, by.tokens);
        const Rows query(by.query, sequence, head), out(by.out, sequence, head);
        widen({by.key, sequence, head}, {by.value, sequence, head}, end, by.size, room);
        for (int64_t token = begin; token < end;) {
            const int rows = int(std::min(end - token, TOKENS - token % TOKENS));
            attend(by, query, out, token, rows, by.logsumexp + at * (by.tokens - by.first), room);
            token += rows;
        }
    });
}
