// The memory traffic of AdamW with next to no arithmetic: the ceiling that a kernel is held to.
//
// Three vectors are read and written and one is read. With NARROW 1 that one is 16 bits wide, and one
// as wide is written as well; with SPLIT 1 instead the first is two of 16 bits. Two of the three have
// numbers of MOMENTS bits: 8, 16 or 32.

#include <cstdint>

#include "../pipeline/kernels/include/threads.h"

namespace {

#if NARROW
using Narrow = uint16_t;
#else
using Narrow = uint32_t;
#endif
#if MOMENTS == 8
using Moment = uint8_t;
#elif MOMENTS == 16
using Moment = uint16_t;
#else
using Moment = uint32_t;
#endif

#if SPLIT
using Wide = uint16_t;
#else
using Wide = uint32_t;
#endif

struct Work {
    Wide* p;
    Moment* m;
    Moment* v;
    const Narrow* g;
    Narrow* o;
    int64_t n;
    int64_t slices;
    int64_t begun;  // of them
};

void stream_slice(const Work& work, int64_t begin, int64_t end) {
    Wide* __restrict p = work.p;
    Moment* __restrict m = work.m;
    Moment* __restrict v = work.v;
    const Narrow* __restrict g = work.g;
    Narrow* __restrict o = work.o;
#pragma GCC ivdep
    for (int64_t i = begin; i < end; i++) {
        const uint32_t x = g[i];
        p[i] = Wide(p[i] + x);
        m[i] = Moment(m[i] + x);
        v[i] = Moment(v[i] ^ x);
#if SPLIT
        o[i] = Narrow(o[i] + x);
#elif NARROW
        o[i] = Narrow(p[i]);
#else
        (void)o;
#endif
    }
}

void run(void* argument) {
    Work& work = *static_cast<Work*>(argument);
    const auto start = [&](int64_t slice) { return slice == work.slices ? work.n : work.n * slice / work.slices / 64 * 64; };
    for (;;) {
        const int64_t slice = __atomic_fetch_add(&work.begun, 1, __ATOMIC_RELAXED);
        if (slice >= work.slices) return;
        stream_slice(work, start(slice), start(slice + 1));
    }
}

}  // namespace

extern "C" void stream(
    void* p, void* m, void* v, const void* g, void* o, int64_t n, Parallel parallel, int32_t threads
) {
    Work work{(Wide*)p, (Moment*)m, (Moment*)v, (const Narrow*)g, (Narrow*)o, n, threads, 0};
    on_threads(parallel, threads, run, &work);
}
