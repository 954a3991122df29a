// Runs kernels on PyTorch's OpenMP threads, which spin for a while after each operator.

#pragma once

#include <cstdint>

namespace {

// The type of GOMP_parallel: calls a function with an argument on a number of threads.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

// If `parallel` is null, the calling thread does the work.
inline void run_on_threads(Parallel parallel, int32_t threads, void (*run)(void*), void* work) {
    if (parallel == nullptr || threads < 2)
        run(work);
    else
        parallel(run, work, unsigned(threads), 0);
}

}  // namespace
