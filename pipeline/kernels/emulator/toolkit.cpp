// The functions of NVRTC and of the CUDA driver that the product calls, over the emulator: "cubins"
// are shared libraries made by g++, and a launch runs on the CPU. What the real ones refuse is
// refused here.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "launch.h"

namespace {
constexpr int SUCCESS = 0;

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// A directory that goes when it is left.
struct Scratch {
  char path[32] = "/tmp/emulated-XXXXXX";
  Scratch() {
    if (!mkdtemp(path)) abort();
  }
  ~Scratch() {
    const std::string command = std::string("rm -r ") + path;
    if (system(command.c_str())) perror("emulator");
  }
};

// Where this library and its headers lie.
std::string own_path() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&own_path), &info);
  return info.dli_fname;
}

struct Program {
  std::string source, name, log, image;
  std::map<std::string, std::string> headers;
};

// Kernels take one struct by value; g++ makes functions of them that take its address.
std::string entries(const std::string& source) {
  static const std::string marker = "__global__", end_of_head = ") {";
  std::string text;
  for (size_t at = source.find(marker); at != std::string::npos; at = source.find(marker, at + 1)) {
    const std::string head = source.substr(at, source.find(end_of_head, at) - at);
    const size_t bracket = head.rfind('('), name_at = head.rfind(' ', bracket) + 1;
    const std::string name = head.substr(name_at, bracket - name_at);
    const std::string type = head.substr(bracket + 1, head.rfind(' ') - bracket - 1);
    text += "extern \"C\" void emulated_" + name + "(const void* params) { " + name + "(*static_cast<const " +
            type + "*>(params)); }\n";
  }
  return text;
}

struct Kernel {
  void (*function)(const void*);
  std::string name;
  unsigned shared_limit = 48 << 10;
  bool is_loaded = false;
};

struct State {
  std::vector<emulator::Range> ranges;
  int schedule = 0;
  std::string error, last;
  std::set<void*> libraries;
  std::set<Kernel*> kernels;
  std::map<char*, size_t> locked;
};

State& state() {
  static State only;
  return only;
}
}  // namespace

extern "C" {
// For tests.

void emulator_allow(const char* first, size_t bytes) { state().ranges.push_back({first, bytes}); }
void emulator_forbid() { state().ranges.clear(); }
void emulator_schedule(int schedule) { state().schedule = schedule; }
const char* emulator_error() { return state().error.c_str(); }
const char* emulator_last_launch() { return state().last.c_str(); }
size_t emulator_locked_bytes() {
  size_t sum = 0;
  for (const auto& pages : state().locked) sum += pages.second;
  return sum;
}

// NVRTC.

int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return SUCCESS;
}

int nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return SUCCESS;
}

int nvrtcGetSupportedArchs(int* architectures) {
  architectures[0] = 75;
  architectures[1] = 80;
  architectures[2] = 90;
  return SUCCESS;
}

const char* nvrtcGetErrorString(int code) {
  return code == 5 ? "NVRTC_ERROR_INVALID_OPTION" : "NVRTC_ERROR_COMPILATION";
}

int nvrtcCreateProgram(Program** program, const char* source, const char* name, int num_headers,
                       const char* const* headers, const char* const* include_names) {
  *program = new Program{source, name, {}, {}, {}};
  for (int i = 0; i < num_headers; i++) (*program)->headers[include_names[i]] = headers[i];
  return SUCCESS;
}

int nvrtcCompileProgram(Program* program, int num_options, const char* const* options) {
  Scratch scratch;
  const std::string folder = scratch.path, library = own_path();
  for (const auto& [name, text] : program->headers) write(folder + "/" + name, text);
  write(folder + "/" + program->name, program->source + entries(program->source));
  // No contraction of products and sums: kernels say where they want one.
  std::string command =
      "g++ -x c++ -std=c++17 -O1 -march=native -ffp-contract=off -fPIC -shared -w -I" + folder + " -I" +
      library.substr(0, library.rfind('/'));
  for (int i = 0; i < num_options; i++) {
    const std::string option = options[i];
    if (option.rfind("-D", 0) == 0) {
      command += " '" + option + "'";
    } else if (option.rfind("-", 0) != 0) {
      return 5;
    }
  }
  command += " " + folder + "/" + program->name + " -x none " + library + " -o " + folder + "/image 2> " +
             folder + "/log";
  const int status = system(command.c_str());
  program->log = contents(folder + "/log");
  if (status != 0) return 6;
  program->image = contents(folder + "/image");
  return SUCCESS;
}

int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  *bytes = program->log.size() + 1;
  return SUCCESS;
}
int nvrtcGetProgramLog(Program* program, char* log) {
  memcpy(log, program->log.c_str(), program->log.size() + 1);
  return SUCCESS;
}
int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  *bytes = program->image.size();
  return SUCCESS;
}
int nvrtcGetCUBIN(Program* program, char* image) {
  memcpy(image, program->image.data(), program->image.size());
  return SUCCESS;
}
int nvrtcGetPTXSize(Program* program, size_t* bytes) { return nvrtcGetCUBINSize(program, bytes); }
int nvrtcGetPTX(Program* program, char* image) { return nvrtcGetCUBIN(program, image); }
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return SUCCESS;
}

// The driver.

// Pages that are locked, by their address; there is a MiB of them.
constexpr size_t PAGE = 4096, LOCKABLE = 1 << 20;

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, INVALID_HANDLE = 400, NOT_FOUND = 500, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILED = 719 };

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

int cuGetErrorName(int code, const char** name) {
  static const std::map<int, const char*> names = {
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},   {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
      {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"}, {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
      {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
  };
  const auto found = names.find(code);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? INVALID_VALUE : SUCCESS;
}

int cuLibraryLoadData(void** library, const char* image, void*, void*, unsigned num_options, void*,
                      void*, unsigned num_library_options) {
  if (memcmp(image, "\x7f""ELF", 4) || num_options || num_library_options) return INVALID_IMAGE;
  // The length of an image is not given; an ELF file ends with its table of sections.
  uint64_t table;
  uint16_t entry, count;
  memcpy(&table, image + 0x28, sizeof(table));
  memcpy(&entry, image + 0x3a, sizeof(entry));
  memcpy(&count, image + 0x3c, sizeof(count));
  Scratch scratch;
  const std::string path = std::string(scratch.path) + "/image";
  write(path, std::string(image, table + size_t{entry} * count));
  *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!*library) return INVALID_IMAGE;
  state().libraries.insert(*library);
  return SUCCESS;
}

int cuLibraryGetKernel(Kernel** kernel, void* library, const char* name) {
  if (!state().libraries.count(library)) return INVALID_HANDLE;
  void* function = dlsym(library, (std::string("emulated_") + name).c_str());
  if (!function) return NOT_FOUND;
  *kernel = new Kernel{reinterpret_cast<void (*)(const void*)>(function), name};
  state().kernels.insert(*kernel);
  return SUCCESS;
}

// Loads the code of a kernel, which a real driver else does at the first launch.
int cuKernelGetFunction(void** function, Kernel* kernel) {
  if (!state().kernels.count(kernel)) return INVALID_HANDLE;
  kernel->is_loaded = true;
  *function = kernel;
  return SUCCESS;
}

int cuLaunchKernel(Kernel* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                   void** params, void** extra) {
  if (!state().kernels.count(kernel)) return INVALID_HANDLE;
  if (!kernel->is_loaded) {
    state().error = kernel->name + " was not loaded before its first launch";
    return LAUNCH_FAILED;
  }
  const bool grid = grid_x && grid_y && grid_z && grid_x < 1u << 31 && grid_y < 65536 && grid_z < 65536;
  const bool block = block_x && block_y && block_z && block_x <= 1024 && block_y <= 1024 &&
                     block_z <= 64 && block_x * block_y * block_z <= 1024;
  if (!grid || !block || shared_bytes > kernel->shared_limit || !params || !params[0] || extra)
    return INVALID_VALUE;
  std::ostringstream text;
  text << kernel->name << " grid " << grid_x << " " << grid_y << " " << grid_z << " block " << block_x << " "
       << block_y << " " << block_z << " shared " << shared_bytes << " stream " << stream;
  state().last = text.str();
  const emulator::Launch launch = {kernel->function, params[0], {grid_x, grid_y, grid_z}, {block_x, block_y, block_z},
                         shared_bytes, state().schedule};
  return emulator::run(launch, state().ranges, state().error) ? LAUNCH_FAILED : SUCCESS;
}

int cuMemHostRegister_v2(void* first, size_t bytes, unsigned flags) {
  if (!bytes || reinterpret_cast<uintptr_t>(first) % PAGE || bytes % PAGE || flags != 1) return INVALID_VALUE;
  auto& locked = state().locked;
  const auto next = locked.lower_bound(static_cast<char*>(first));
  if (next != locked.end() && next->first < static_cast<char*>(first) + bytes) return ALREADY_REGISTERED;
  if (next != locked.begin() && std::prev(next)->first + std::prev(next)->second > first) return ALREADY_REGISTERED;
  if (emulator_locked_bytes() + bytes > LOCKABLE) return OUT_OF_MEMORY;
  locked[static_cast<char*>(first)] = bytes;
  return SUCCESS;
}

int cuMemHostUnregister(void* first) {
  return state().locked.erase(static_cast<char*>(first)) ? SUCCESS : NOT_REGISTERED;
}
}
