// The way back through causal attention of whole sequences in bf16, on the CPU. Reference: autograd
// through definition.py. After Dao et al. 2022, FlashAttention, algorithm 4:
//
//   P = exp(scaling * Q K^T - logsumexp), 0 where a key comes after its token
//   dV = P^T dO
//   dS = scaling * P * (dO V^T - sum over a row of dO * O)
//   dQ = dS K
//   dK = dS^T Q
//
// A tile of TOKENS x KEYS of P and dS exists at a time. Products of two bf16 numbers are added up in
// fp32; P and dS are rounded to bf16 for theirs. All five products are one loop: a unit of two
// neighbouring numbers of one side times a vector of such units of the other, so that each side is laid
// out in pairs, along the dimension that is added up, where it isn't already. What a sequence and a head
// get depends on neither threads nor what shares the call.

#include <algorithm>

#include "heads.h"

namespace {

constexpr int TOKENS = 32;             // of a tile
constexpr int KEYS = 64;
constexpr int TILES = KEYS / LANES;    // vectors of keys

struct Backward {  // mirrored in cpu.py
    Heads query;
    Heads key;
    Heads value;
    Heads out;
    Heads grad;        // of out
    Heads grad_query;  // written
    Heads grad_key;
    Heads grad_value;
    const float* logsumexp;  // (batch, heads, tokens), strides given
    int64_t logsumexp_sequence;
    int64_t logsumexp_head;
    int64_t logsumexp_token;
    int64_t batch;
    int64_t heads;
    int64_t tokens;
    int64_t size;      // whole units
    void* room;        // several of room_bytes() bytes, at an address of a whole cache line
    int64_t rooms;     // threads that are to work: others of the team have nothing to do
    float scaling;
};

// Rows in pairs of neighbours: (pairs, parts) vectors of units, zeros where there is no row.
void pair_rows(const Rows& rows, int64_t count, int64_t pairs, int64_t size, Bits* to) {
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t d = 0; d < size; d += LANES, to++) {
            const Half first = 2 * pair < count ? part_of(rows[2 * pair] + d, size - d) : Half{};
            const Half second = 2 * pair + 1 < count ? part_of(rows[2 * pair + 1] + d, size - d) : Half{};
            *to = __builtin_convertvector(first, Bits) | __builtin_convertvector(second, Bits) << 16;
        }
}

// Rows turned, LANES of them at a time: (tiles, units) vectors, zeros where there is no row.
void turn_all(const Rows& rows, int64_t count, int64_t tiles, int units, Bits* to) {
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int unit = 0; unit < units; unit += LANES) {
            const int width = units - unit < LANES ? units - unit : LANES;
            Bits part[LANES];
            for (int n = 0; n < LANES; n++) {
                const int64_t row = tile * LANES + n;
                part[n] = row < count ? begun(rows[row] + unit * Number::NUMBERS, width) : Bits{};
            }
            turn(part);
            for (int i = 0; i < width; i++) *to++ = part[i];
        }
}

// Of a tile: weights and gradients of scores, in pairs of tokens and, the gradients, token by token.
struct Tile {
    Vector scores[TOKENS][TILES];
    Vector grads[TOKENS][TILES];
    Bits paired_weights[TOKENS / 2][TILES];
    Bits paired_scores[TOKENS / 2][TILES];
    Half score_grads[TOKENS][TILES];
};

// What a thread works in. Of a head: keys turned and in pairs, values turned, tokens' queries and
// gradients in pairs, and by token the sum of its row of dO * O and its gradient of the query.
struct Room {
    int64_t keys, pairs, parts;
    int units;
    Bits* turned_keys;
    Bits* turned_values;
    Bits* paired_keys;
    Bits* paired_queries;
    Bits* paired_grads;
    Vector* grad_queries;
    float* deltas;
    Vector* grad_keys;  // of a tile's keys, like their values
    Vector* grad_values;
    Tile* tile;
    int64_t bytes;

    Room(int64_t tokens, int64_t size, char* at) {
        keys = round_up(tokens, KEYS);
        pairs = keys / 2;
        parts = round_up(size, LANES) / LANES;
        units = int(size) / Number::NUMBERS;
        Shelf shelf{at, 0};
        shelf.take(turned_keys, keys / LANES * units);
        shelf.take(turned_values, keys / LANES * units);
        shelf.take(paired_keys, pairs * parts);
        shelf.take(paired_queries, pairs * parts);
        shelf.take(paired_grads, pairs * parts);
        shelf.take(grad_queries, keys * parts);
        shelf.take(deltas, keys);
        shelf.take(grad_keys, KEYS * parts);
        shelf.take(grad_values, KEYS * parts);
        shelf.take(tile, 1);
        bytes = shelf.bytes;
    }
};

inline Bits pair_of(const Bits& first, const Bits& second) { return first >> 16 | (second & 0xffff0000u); }

// Scores to weights, and gradients of weights to those of scores; of `rows` tokens from `token` on and the
// keys from `key` on, in `tiles` vectors.
void weigh(Tile& tile, int rows, int tiles, int64_t token, int64_t key, const float* logsumexp, int64_t stride, const float* deltas, float scaling) {
    typedef int32_t Places __attribute__((vector_size(4 * LANES)));
    Places lane;
    for (int n = 0; n < LANES; n++) lane[n] = n;
    for (int r = 0; r < rows; r += 2)
        for (int t = 0; t < tiles; t++) {
            Bits weight[2] = {}, grad[2] = {};
            for (int i = 0; i < 2 && r + i < rows; i++) {
                const int64_t row = token + r + i;
                const Bits seen = as<Bits>(lane <= int32_t(row - key - t * LANES));
                // Of keys that come later it may be anything.
                const Bits x = as<Bits>(tile.scores[r + i][t] * scaling - logsumexp[row * stride]) & seen;
                const Vector p = as<Vector>(as<Bits>(exp_of(as<Vector>(x), Number{})) & seen);
                weight[i] = as<Bits>(Number::round(p));
                grad[i] = as<Bits>(Number::round(p * (tile.grads[r + i][t] - deltas[row]) * scaling)) & seen;
                tile.score_grads[r + i][t] = __builtin_convertvector(grad[i] >> 16, Half);
            }
            tile.paired_weights[r / 2][t] = pair_of(weight[0], weight[1]);
            tile.paired_scores[r / 2][t] = pair_of(grad[0], grad[1]);
        }
}

void go_back(const Backward& by, int64_t sequence, int64_t head, const Room& room) {
    const Rows query(by.query, sequence, head), key(by.key, sequence, head), value(by.value, sequence, head);
    const Rows out(by.out, sequence, head), grad(by.grad, sequence, head);
    const Rows grad_query(by.grad_query, sequence, head), grad_key(by.grad_key, sequence, head);
    const Rows grad_value(by.grad_value, sequence, head);
    const float* logsumexp = by.logsumexp + sequence * by.logsumexp_sequence + head * by.logsumexp_head;
    const int64_t tokens = by.tokens, parts = room.parts, size = by.size;
    const int units = room.units;

    turn_all(key, tokens, room.keys / LANES, units, room.turned_keys);
    turn_all(value, tokens, room.keys / LANES, units, room.turned_values);
    pair_rows(key, tokens, room.pairs, size, room.paired_keys);
    pair_rows(query, tokens, room.pairs, size, room.paired_queries);
    pair_rows(grad, tokens, room.pairs, size, room.paired_grads);
    for (int64_t token = 0; token < tokens; token++) {
        Vector sum = {};
        for (int64_t d = 0; d < size; d += LANES)
            sum = wide(part_of(out[token] + d, size - d)) * wide(part_of(grad[token] + d, size - d)) + sum;
        room.deltas[token] = sum_of(sum);
    }

    Tile& tile = *room.tile;
    Vector* const grad_keys = room.grad_keys;
    Vector* const grad_values = room.grad_values;
    for (int64_t first = 0; first < tokens; first += KEYS) {
        const int live = int(tokens - first < KEYS ? tokens - first : KEYS);
        std::fill_n(grad_keys, live * parts, Vector{});
        std::fill_n(grad_values, live * parts, Vector{});
        for (int64_t token = first; token < tokens; token += TOKENS) {
            const int rows = int(tokens - token < TOKENS ? tokens - token : TOKENS);
            // No token here sees a key beyond the last of them.
            const int64_t last = token + rows - first;
            const int seen = int(last < live ? last : live), tiles = (seen + LANES - 1) / LANES;
            const int64_t at = first / LANES * units;
            const int pairs = (rows + 1) / 2;
            const int64_t bytes = sizeof(Stored);
            product<Number>({query[token], query.stride * bytes, 4}, rows, {room.turned_keys + at, 1, units}, tiles, units, tile.scores[0], TILES, false);
            product<Number>({grad[token], grad.stride * bytes, 4}, rows, {room.turned_values + at, 1, units}, tiles, units, tile.grads[0], TILES, false);
            weigh(tile, rows, tiles, token, first, logsumexp, by.logsumexp_token, room.deltas, by.scaling);
            const Units weights = {tile.paired_weights, 4, sizeof tile.paired_weights[0]};
            const Units scores = {tile.paired_scores, 4, sizeof tile.paired_scores[0]};
            const int64_t pair = token / 2 * parts;
            product<Number>(weights, seen, {room.paired_grads + pair, parts, 1}, int(parts), pairs, grad_values, parts, true);
            product<Number>(scores, seen, {room.paired_queries + pair, parts, 1}, int(parts), pairs, grad_keys, parts, true);
            const Units back = {tile.score_grads, sizeof tile.score_grads[0], 4};
            product<Number>(back, rows, {room.paired_keys + first / 2 * parts, parts, 1}, int(parts), tiles * LANES / 2, room.grad_queries + token * parts, parts, first > 0);
        }
        for (int row = 0; row < live; row++) {
            write_row(grad_keys + row * parts, size, grad_key[first + row]);
            write_row(grad_values + row * parts, size, grad_value[first + row]);
        }
    }
    for (int64_t token = 0; token < tokens; token++)
        write_row(room.grad_queries + token * parts, size, grad_query[token]);
}

}  // namespace

extern "C" int64_t structure_bytes() { return sizeof(Backward); }

extern "C" int64_t room_bytes(int64_t tokens, int64_t size) { return Room(tokens, size, nullptr).bytes; }

// The bits don't depend on how many threads there are.
extern "C" void attention_grad(const Backward* backward, Parallel parallel, int32_t threads) {
    const Backward& by = *backward;
    in_rooms<Room>(by, by.batch * by.heads, parallel, threads,
                   [&](int64_t item, const Room& room) { go_back(by, item / by.heads, item % by.heads, room); });
}
