// Runs the thread blocks of a launch sequentially. The threads of a block are fibers that switch
// when they wait at a barrier or a shuffle.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {
struct Index {
  unsigned x, y, z;
};

namespace {
// Memory that kernels may access.
struct Range {
  const char* first;
  size_t bytes;
};

// Schedules: 0 is in order, 1 in reverse, and any other number is the seed of a shuffle.
enum { REVERSE = 1 };

struct Launch {
  void (*kernel)(const void* params);
  const void* params;
  Index grid, block;
  size_t shared_bytes;
  int schedule;
};

constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t GUARD_BYTES = 64;
constexpr unsigned char POISON = 0xff;  // a float of such bytes is NaN

// ucontext saves the signal mask, with two system calls per switch; this saves only callee-saved registers.
struct Context {
  void* stack_pointer = nullptr;
};
extern "C" void emulator_switch(void** from, void* to);
__asm__(R"(
  .text
  .type emulator_switch,@function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
void switch_context(Context& from, Context& to) {
  emulator_switch(&from.stack_pointer, to.stack_pointer);
}
void prepare(Context& context, char* stack, void (*start)()) {
  void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + STACK_BYTES) & ~15ul);
  *--top = nullptr;  // the return address of `start`, which never returns
  *--top = reinterpret_cast<void*>(start);
  for (int saved = 0; saved < 6; saved++) *--top = nullptr;
  context.stack_pointer = top;
}

std::string format(const char* pattern, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(text, sizeof(text), pattern, arguments);
  va_end(arguments);
  return text;
}

// One shuffle, or __syncwarp, of the lanes of one mask. There are two buffers because lanes may still
// read the values of one exchange while other lanes have begun the next.
struct Exchange {
  unsigned arrived = 0;
  uint64_t number = 0;
  int line = 0;
  uint64_t values[2][32] = {};
};

struct Fiber {
  Context context;
  char* stack = nullptr;
  Index index{};
  int linear = 0;
  bool done = false;
  std::string where;
  std::string error;
};

struct Machine {
  Context scheduler;
  std::vector<Fiber> fibers;
  Fiber* current = nullptr;
  int num_threads = 0, num_done = 0;
  uint64_t progress = 0;

  int arrived = 0, barrier_line = 0, predicates[2] = {0, 0};
  uint64_t barrier_number = 0;
  std::vector<std::map<unsigned, Exchange>> warps;

  std::vector<unsigned char> shared;
  unsigned char* shared_base = nullptr;
  std::vector<Range> ranges;
  std::string error;
  const Launch* launch = nullptr;
};

Machine& machine() {
  static Machine instance;
  return instance;
}
}  // namespace

Index thread_index, block_index, block_shape, grid_shape;

namespace {
void wait(const char* what, int line) {
  Machine& m = machine();
  m.current->where = format("%s at line %d", what, line);
  Fiber* self = m.current;
  switch_context(self->context, m.scheduler);
  thread_index = self->index;
}

void run_fiber() {
  Machine& m = machine();
  try {
    m.launch->kernel(m.launch->params);
  } catch (const std::exception& error) {
    m.current->error = error.what();
  }
  m.current->done = true;
  m.num_done++;
  m.progress++;
  switch_context(m.current->context, m.scheduler);
  abort();  // a finished fiber is never resumed
}

void open_barrier() {
  Machine& m = machine();
  m.arrived = 0;
  m.barrier_number++;
  m.predicates[m.barrier_number & 1] = 0;
  m.progress++;
}

std::string deadlock() {
  Machine& m = machine();
  std::map<std::string, int> waiting;
  for (int i = 0; i < m.num_threads; i++)
    if (!m.fibers[i].done) waiting[m.fibers[i].where]++;
  std::string text = "deadlock:";
  for (const auto& [where, count] : waiting) text += format(" %d threads in %s,", count, where.c_str());
  return text + format(" %d have ended", m.num_done);
}

void run_block(unsigned number, std::mt19937& random) {
  Machine& m = machine();
  const Launch& launch = *m.launch;
  block_index = {number % launch.grid.x, number / launch.grid.x % launch.grid.y,
                 number / launch.grid.x / launch.grid.y};
  m.num_done = m.arrived = 0;
  m.barrier_number = 0;
  m.predicates[0] = m.predicates[1] = 0;
  m.warps.assign((m.num_threads + 31) / 32, {});
  std::fill(m.shared.begin(), m.shared.end(), POISON);
  std::vector<int> order(m.num_threads);
  for (int i = 0; i < m.num_threads; i++) {
    Fiber& fiber = m.fibers[i];
    fiber.linear = order[i] = i;
    fiber.index = {i % launch.block.x, i / launch.block.x % launch.block.y,
                   i / launch.block.x / launch.block.y};
    fiber.done = false;
    fiber.error.clear();
    prepare(fiber.context, fiber.stack, run_fiber);
  }
  if (launch.schedule == REVERSE) std::reverse(order.begin(), order.end());
  while (m.num_done < m.num_threads) {
    const uint64_t before = m.progress;
    if (launch.schedule > REVERSE) std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      Fiber& fiber = m.fibers[i];
      if (fiber.done) continue;
      m.current = &fiber;
      thread_index = fiber.index;
      switch_context(m.scheduler, fiber.context);
      if (!fiber.error.empty()) throw std::runtime_error(format("thread %d: ", i) + fiber.error);
    }
    // Threads that have ended are not waited for.
    if (m.arrived && m.arrived == m.num_threads - m.num_done) open_barrier();
    if (m.progress == before) throw std::runtime_error(deadlock());
  }
  for (size_t i = 0; i < GUARD_BYTES; i++)
    if (m.shared_base[launch.shared_bytes + i] != POISON)
      throw std::runtime_error("a write past the end of shared memory");
}
}  // namespace

void* shared_memory() { return machine().shared_base; }

int lane() { return machine().current->linear & 31; }

void fail(const char* reason, int line) {
  throw std::runtime_error(format("%s, at line %d", reason, line));
}

void check_access(const void* address, unsigned bytes, int line) {
  const char* first = static_cast<const char*>(address);
  if (reinterpret_cast<uintptr_t>(address) % bytes)
    throw std::runtime_error(format("a misaligned access of %u bytes at line %d", bytes, line));
  for (const Range& range : machine().ranges)
    if (first >= range.first && first + bytes <= range.first + range.bytes) return;
  throw std::runtime_error(format("an access outside of all arrays at line %d", line));
}

int barrier(int predicate, int line) {
  Machine& m = machine();
  const uint64_t number = m.barrier_number;
  if (m.arrived && m.barrier_line != line)
    throw std::runtime_error(
        format("threads of a block in barriers at line %d and line %d", m.barrier_line, line));
  m.barrier_line = line;
  int& result = m.predicates[number & 1];
  result |= predicate != 0;
  m.progress++;
  if (++m.arrived == m.num_threads - m.num_done) open_barrier();
  while (m.barrier_number == number) wait("__syncthreads", line);
  return result;
}

void exchange(unsigned mask, const void* value, unsigned bytes, uint64_t* out, const char* what,
              int line) {
  Machine& m = machine();
  const int self = lane(), warp = m.current->linear / 32;
  if (!(mask >> self & 1)) throw std::runtime_error(format("%s at line %d by a lane outside of its mask", what, line));
  const int lanes = std::min(32, m.num_threads - 32 * warp);
  if (lanes < 32) mask &= (1u << lanes) - 1;
  Exchange& shuffle = m.warps[warp][mask];
  if (shuffle.arrived && shuffle.line != line)
    throw std::runtime_error(
        format("lanes of a warp in shuffles at line %d and line %d", shuffle.line, line));
  shuffle.line = line;
  const uint64_t number = shuffle.number;
  uint64_t* values = shuffle.values[number & 1];
  memcpy(&values[self], value, bytes);
  shuffle.arrived |= 1u << self;
  m.progress++;
  if (shuffle.arrived == mask) {
    shuffle.arrived = 0;
    shuffle.number++;
  }
  while (shuffle.number == number) wait(what, line);
  memcpy(out, values, sizeof(shuffle.values[0]));
}

int run(const Launch& launch) {
  Machine& m = machine();
  m.launch = &launch;
  block_shape = launch.block;
  grid_shape = launch.grid;
  m.num_threads = launch.block.x * launch.block.y * launch.block.z;
  while (m.fibers.size() < static_cast<size_t>(m.num_threads)) {
    Fiber fiber;
    fiber.stack = static_cast<char*>(mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    m.fibers.push_back(fiber);
  }
  m.shared.resize(launch.shared_bytes + 128 + GUARD_BYTES);
  m.shared_base = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<uintptr_t>(m.shared.data()) + 127) & ~127ul);
  std::mt19937 random(launch.schedule);
  std::vector<unsigned> blocks(size_t{launch.grid.x} * launch.grid.y * launch.grid.z);
  for (size_t i = 0; i < blocks.size(); i++) blocks[i] = i;
  if (launch.schedule == REVERSE) std::reverse(blocks.begin(), blocks.end());
  if (launch.schedule > REVERSE) std::shuffle(blocks.begin(), blocks.end(), random);
  for (unsigned block : blocks) {
    try {
      run_block(block, random);
    } catch (const std::exception& failure) {
      m.error = format("block %u, ", block) + failure.what();
      return 1;
    }
  }
  return 0;
}
}  // namespace emulator

extern "C" {
void emulator_allow(const char* first, size_t bytes) { emulator::machine().ranges.push_back({first, bytes}); }
void emulator_forbid() { emulator::machine().ranges.clear(); }
const char* emulator_error() { return emulator::machine().error.c_str(); }

// 0, or 1 with the fault in `emulator_error`.
int emulator_launch(void (*kernel)(const void*), const void* params, const unsigned* grid_and_block, size_t shared_bytes,
                    int schedule) {
  const unsigned* n = grid_and_block;
  return emulator::run({kernel, params, {n[0], n[1], n[2]}, {n[3], n[4], n[5]}, shared_bytes, schedule});
}
}
