// How a launch reaches the emulator.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace emulator {
struct Index {
  unsigned x, y, z;
};

// Memory that kernels may touch.
struct Range {
  const char* first;
  size_t bytes;
};

// Schedules: threads and blocks in order, in reverse, and from there on shuffled by that seed.
enum { FORWARD = 0, REVERSE = 1 };

struct Launch {
  void (*kernel)(const void* params);
  const void* params;
  Index grid, block;
  size_t shared_bytes;
  int schedule;
};

// Run a kernel; 0, or 1 with what was wrong in `error`.
int run(const Launch& launch, const std::vector<Range>& ranges, std::string& error);
}  // namespace emulator
