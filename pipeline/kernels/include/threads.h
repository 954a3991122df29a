// The threads of PyTorch's own OpenMP, which are awake for a while after each of its operators.

#pragma once

#include <cstdint>

namespace {

// Has a function called with an argument by so many threads: `GOMP_parallel`.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

// `parallel` may be null: the calling thread does the work.
inline void on_threads(Parallel parallel, int32_t threads, void (*run)(void*), void* work) {
    if (parallel == nullptr || threads < 2)
        run(work);
    else
        parallel(run, work, unsigned(threads), 0);
}

}  // namespace
