// The memory traffic of AdamW with next to no arithmetic: the ceiling that a kernel is held to.
//
// Three vectors are read and written and one is read. With NARROW 1 that one is 16 bits wide, and one
// as wide is written as well; with SPLIT 1 instead the first is two of 16 bits. With MOMENTS 1 two of
// the three are 16 bits wide.

#include <pthread.h>

#include <cstdint>

namespace {

#if NARROW
using Narrow = uint16_t;
#else
using Narrow = uint32_t;
#endif
#if MOMENTS
using Moment = uint16_t;
#else
using Moment = uint32_t;
#endif

#if SPLIT
using Wide = uint16_t;
#else
using Wide = uint32_t;
#endif

struct Slice {
    Wide* p;
    Moment* m;
    Moment* v;
    const Narrow* g;
    Narrow* o;
    int64_t begin, end;
};

void* stream_slice(void* argument) {
    const Slice s = *static_cast<Slice*>(argument);
    Wide* __restrict p = s.p;
    Moment* __restrict m = s.m;
    Moment* __restrict v = s.v;
    const Narrow* __restrict g = s.g;
    Narrow* __restrict o = s.o;
#pragma GCC ivdep
    for (int64_t i = s.begin; i < s.end; i++) {
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
    return nullptr;
}

}  // namespace

extern "C" void stream(
    void* p, void* m, void* v, const void* g, void* o, int64_t n, int32_t threads
) {
    pthread_t started[64];
    Slice slices[64];
    int32_t running = 0;
    for (int32_t t = 0; t < threads; t++) {
        slices[t] = {(Wide*)p, (Moment*)m, (Moment*)v, (const Narrow*)g, (Narrow*)o,
                     n * t / threads / 64 * 64, t + 1 == threads ? n : n * (t + 1) / threads / 64 * 64};
        if (t + 1 == threads || pthread_create(&started[running], nullptr, stream_slice, &slices[t]))
            stream_slice(&slices[t]);
        else
            running++;
    }
    for (int32_t t = 0; t < running; t++) pthread_join(started[t], nullptr);
}
