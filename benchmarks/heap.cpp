// What the C library's heap holds, counted in place of it: a library to preload.
//
// Blocks of LEAST bytes or more are counted, by all threads, so that a tensor that a thread of a
// collective frees is seen as well. Names of the C library's own functions are glibc's.

#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);
}

namespace {

std::atomic<long> held{0}, highest{0};

long size_of(void* block) {
    const long bytes = block == nullptr ? 0 : static_cast<long>(malloc_usable_size(block));
    return bytes < LEAST ? 0 : bytes;
}

void* taken(void* block) {
    if (const long bytes = size_of(block)) {
        const long now = held.fetch_add(bytes) + bytes;
        long before = highest.load();
        while (now > before && !highest.compare_exchange_weak(before, now)) {
        }
    }
    return block;
}

void given(void* block) {
    if (const long bytes = size_of(block)) {
        held.fetch_sub(bytes);
    }
}

}  // namespace

extern "C" {

void* malloc(size_t bytes) noexcept { return taken(__libc_malloc(bytes)); }

void* calloc(size_t count, size_t bytes) noexcept { return taken(__libc_calloc(count, bytes)); }

void* memalign(size_t place, size_t bytes) noexcept {
    return taken(__libc_memalign(place, bytes));
}

void* aligned_alloc(size_t place, size_t bytes) noexcept {
    return taken(__libc_memalign(place, bytes));
}

int posix_memalign(void** out, size_t place, size_t bytes) noexcept {
    void* block = taken(__libc_memalign(place, bytes));
    if (block == nullptr) {
        return ENOMEM;
    }
    *out = block;
    return 0;
}

void* realloc(void* block, size_t bytes) noexcept {
    given(block);
    return taken(__libc_realloc(block, bytes));
}

void free(void* block) noexcept {
    given(block);
    __libc_free(block);
}

long heap_held() { return held.load(); }

long heap_highest() { return highest.load(); }

void heap_begin() { highest.store(held.load()); }
}
