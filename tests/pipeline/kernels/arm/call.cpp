// One call of a kernel in a process of its own, linked with it: `call REQUEST ANSWER`. It may be run by an
// emulator of another processor, whose structures must be laid out alike.
//
// A request is 64-bit numbers and bytes: the number of buffers, then of each its size and content; the
// number of arguments, then of each its kind, and
//
//   NUMBER     the number
//   STRUCTURE  its size and content, the number of pointers in it, and of each its place and its buffer
//
// The answer is what the kernel returns, and the content of each buffer.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" int64_t FUNCTION(int64_t, int64_t, int64_t, int64_t, int64_t);

namespace {

enum Kind { NUMBER_GIVEN, STRUCTURE };

struct Buffer {
    char* bytes;
    int64_t size;
};

int64_t number(FILE* file) {
    int64_t to = 0;
    if (fread(&to, sizeof to, 1, file) != 1) exit(2);
    return to;
}

Buffer buffer(FILE* file) {
    constexpr int64_t CACHE_LINE = 64;
    const int64_t size = number(file), room = (size / CACHE_LINE + 1) * CACHE_LINE;
    const Buffer to = {static_cast<char*>(aligned_alloc(CACHE_LINE, size_t(room))), size};
    if (to.bytes == nullptr || fread(to.bytes, 1, size_t(size), file) != size_t(size)) exit(2);
    return to;
}

}  // namespace

int main(int, char** words) {
    FILE* request = fopen(words[1], "rb");
    std::vector<Buffer> buffers;
    for (int64_t left = number(request); left > 0; left--) buffers.push_back(buffer(request));
    int64_t arguments[5] = {};
    const int64_t count = number(request);
    for (int64_t i = 0; i < count; i++) {
        if (number(request) == NUMBER_GIVEN) {
            arguments[i] = number(request);
            continue;
        }
        const Buffer structure = buffer(request);
        for (int64_t left = number(request); left > 0; left--) {
            const int64_t place = number(request);
            std::memcpy(structure.bytes + place, &buffers[size_t(number(request))].bytes, sizeof(char*));
        }
        arguments[i] = reinterpret_cast<int64_t>(structure.bytes);
    }
    const int64_t result = FUNCTION(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4]);
    FILE* answer = fopen(words[2], "wb");
    fwrite(&result, sizeof result, 1, answer);
    for (const Buffer& each : buffers) fwrite(each.bytes, 1, size_t(each.size), answer);
    return fclose(answer) == 0 ? 0 : 2;
}
