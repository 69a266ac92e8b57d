// The CUDA runtime, and as much of cuBLAS and NCCL as a step calls, without a device.
//
// 1. Kernels do nothing, unless kernels.cpp gives them numbers. Memory, copies, streams, events and attributes are what
//    CUDA's manual says.
// 2. Device memory can not be touched by the host: its addresses are no one's, and what is copied there lies elsewhere.
// 3. What CUDA refuses is refused: more memory than there is, a copy that is not within one piece of memory of the kind
//    that was said, memory locked twice or unlocked by another address, an event or a stream that is not there.
// 4. An error is kept for the thread that made it until it is asked for.
// 5. There may be several devices. Each thread has a current one; a kernel goes to a stream of that, and an event to a
//    stream of the device that it was made on. A device is touched when anything is made, queued or asked for there.
// 6. Work is done when it is queued; or, with NULLCUDA_LATE, when something that must come after it is to be done: a
//    kernel of its stream, what waits for its event, the host that waits. Memory that is not locked is read at once.
// 7. Two accesses to memory that nothing orders, one of them a write, are refused (simgpu/csrc/order.h): of copies, and
//    of kernels that have numbers.
#include <dlfcn.h>
#include <driver_types.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../../simgpu/csrc/order.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Error = cudaError_t;
constexpr int kVersion = CUDA_VERSION_MADE_FOR;

size_t setting(const char* name, size_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::strtoull(value, nullptr, 10) : otherwise;
}

const size_t kDeviceBytes = setting("NULLCUDA_BYTES", size_t{140} << 30);
const size_t kLockableBytes = setting("NULLCUDA_LOCKABLE", SIZE_MAX);
const bool kLate = setting("NULLCUDA_LATE", 0);
const bool kNumbers = std::getenv("NULLCUDA_KERNELS");
const int kDevices = int(setting("NULLCUDA_DEVICES", 1));
constexpr int kCapability = 80;

thread_local Error last_error = cudaSuccess;
thread_local std::string last_race;  // that was refused as an illegal address

Error refuse(Error error) { return last_error = error; }

// ---- devices (Rule 5)

thread_local int current = 0;
std::atomic<long> touches[64];

int touched() { return ++touches[current], current; }

// ---- memory

enum class Kind { device, locked, registered };

struct Piece {
  size_t nbytes;
  Kind kind;
  char* bytes;  // where the host finds them
  int device;
};

using Lock = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex mutex;  // of all that follows
std::map<char*, Piece> pieces;
size_t device_bytes[64], locked_bytes = 0;

struct Counts {
  std::atomic<long> up{0}, down{0}, not_locked{0}, kernels{0};
} counts;

std::pair<char* const, Piece>* piece_at(const void* address) {
  auto after = pieces.upper_bound((char*)address);
  if (after == pieces.begin()) return nullptr;
  auto& found = *std::prev(after);
  return (char*)address < found.first + found.second.nbytes ? &found : nullptr;
}

bool on_device(const void* address) {
  auto* found = piece_at(address);
  return found && found->second.kind == Kind::device;
}

bool is_free(const void* address, size_t nbytes) {  // of pieces
  auto next = pieces.lower_bound((char*)address);
  return !piece_at(address) && (next == pieces.end() || next->first >= (char*)address + nbytes);
}

bool within_one(const void* address, size_t nbytes) {
  auto* found = piece_at(address);
  return found ? (char*)address + nbytes <= found->first + found->second.nbytes : is_free(address, nbytes);
}

void* bytes_at(const void* address) {
  auto* found = piece_at(address);
  return found ? found->second.bytes + ((char*)address - found->first) : (void*)address;
}

// ---- order (Rules 6 and 7)

using Work = std::function<void()>;

struct Stream {
  int device;
  size_t id;
  order::Clock clock{};
  std::deque<Work> waiting{};
  long queued = 0, done = 0;
};

struct Event {
  unsigned flags;
  int device;  // that it was made on
  double at_ms = -1;
  Stream* stream = nullptr;  // where it was recorded, after so much of its work
  long position = 0;
  order::Clock clock{};
  bool is_there() const { return !stream || stream->done >= position; }
};

std::set<void*> events;
std::map<void*, Stream> streams;
std::vector<Stream>& defaults = *[] {
  auto* made = new std::vector<Stream>;
  for (int device = 0; device < kDevices; ++device) made->push_back({device, size_t(device)});
  return made;
}();
order::Clock host_clock;
order::History history;

void run(Stream& stream, long until) {
  while (stream.done < until) {
    Work next = std::move(stream.waiting.front());
    stream.waiting.pop_front();
    next();
    ++stream.done;
  }
}

void queue(Stream& stream, Work work) {
  stream.waiting.push_back(std::move(work));
  ++stream.queued;
  if (!kLate) run(stream, stream.queued);
}

Error look(Stream& stream, const char* name, const std::vector<order::Access>& accesses) {
  std::string race = history.add(stream.clock, stream.id, host_clock, name, accesses);
  if (race.empty()) return cudaSuccess;
  last_race = "null CUDA race: " + race;
  return refuse(cudaErrorIllegalAddress);
}

void wait_for(Stream& stream) {  // the host does
  run(stream, stream.queued);
  order::join(host_clock, stream.clock);
}

void wait_for_device(int device) {
  wait_for(defaults[device]);
  for (auto& [handle, stream] : streams)
    if (stream.device == device) wait_for(stream);
}

Stream* stream_at(void* handle) {
  if (size_t(handle) <= 2) return &defaults[current];  // the default one of the current device
  auto found = streams.find(handle);
  return found == streams.end() ? (refuse(cudaErrorInvalidResourceHandle), nullptr) : &found->second;
}

Stream* touched_stream(void* handle) {
  Stream* stream = stream_at(handle);
  if (stream) ++touches[stream->device];
  return stream;
}

Event* event_at(void* handle) {
  return events.count(handle) ? (Event*)handle : (refuse(cudaErrorInvalidResourceHandle), nullptr);
}

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

// What is asked again and again comes about in the end.
bool not_yet() {
  static long asked = 0;
  return ++asked % 64 != 0;
}

// ---- memory that is taken and given back, copied and filled

void* map(size_t nbytes, int protection) {
  return mmap(nullptr, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

Error take(void** address, size_t nbytes, Kind kind) {
  Lock guard(mutex);
  *address = nullptr;
  if (!nbytes) return cudaSuccess;
  size_t& used = kind == Kind::device ? device_bytes[touched()] : locked_bytes;
  size_t most = kind == Kind::device ? kDeviceBytes : kLockableBytes;
  if (nbytes > most - used) return refuse(cudaErrorMemoryAllocation);
  void* bytes = map(nbytes, PROT_READ | PROT_WRITE);
  *address = kind == Kind::device ? map(nbytes, PROT_NONE) : bytes;  // Rule 2
  if (bytes == MAP_FAILED || *address == MAP_FAILED) return refuse(cudaErrorMemoryAllocation);
  pieces[(char*)*address] = {nbytes, kind, (char*)bytes, current};
  used += nbytes;
  return cudaSuccess;
}

Error give_back(void* address) {
  if (!address) return cudaSuccess;
  Lock guard(mutex);
  auto found = pieces.find((char*)address);
  if (found == pieces.end() || found->second.kind == Kind::registered) return refuse(cudaErrorInvalidValue);
  wait_for_device(found->second.device);
  const Piece& piece = found->second;
  (piece.kind == Kind::device ? device_bytes[piece.device] : locked_bytes) -= piece.nbytes;
  if (piece.bytes != address) munmap(piece.bytes, piece.nbytes);
  munmap(address, piece.nbytes);
  pieces.erase(found);
  return cudaSuccess;
}

Error copy(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind, void* handle) {
  Lock guard(mutex);
  Stream* stream = touched_stream(handle);
  if (!stream) return last_error;
  if (!nbytes) return cudaSuccess;
  bool up = !on_device(from) && on_device(to), down = on_device(from) && !on_device(to);
  bool across = on_device(from) && on_device(to);
  bool as_said = kind == cudaMemcpyDefault || kind == (up       ? cudaMemcpyHostToDevice
                                                       : down   ? cudaMemcpyDeviceToHost
                                                       : across ? cudaMemcpyDeviceToDevice
                                                                : cudaMemcpyHostToHost);
  if (!as_said || !within_one(to, nbytes) || !within_one(from, nbytes)) return refuse(cudaErrorInvalidValue);
  if (up) counts.up += nbytes;
  if (down) counts.down += nbytes;
  if ((up && !piece_at(from)) || (down && !piece_at(to))) ++counts.not_locked;
  std::vector<order::Access> accesses;
  if (piece_at(from)) accesses.push_back({(const char*)from, nbytes, false});
  if (piece_at(to)) accesses.push_back({(const char*)to, nbytes, true});
  if (Error race = look(*stream, up ? "a copy up" : down ? "a copy down" : "a copy", accesses)) return race;
  const bool read_now = kLate && !piece_at(from), wait = !piece_at(to);
  char *target = (char*)bytes_at(to), *source = (char*)bytes_at(from);
  if (read_now) {
    std::vector<char> read(source, source + nbytes);
    queue(*stream, [=, read = std::move(read)] { std::memcpy(target, read.data(), nbytes); });
  } else {
    queue(*stream, [=] { std::memmove(target, source, nbytes); });
  }
  if (wait) wait_for(*stream);
  return cudaSuccess;
}

void fill_bytes(char* bytes, int value, size_t nbytes) {
  char* first = (char*)(((size_t)bytes + 4095) & ~size_t{4095});
  char* last = (char*)((size_t)(bytes + nbytes) & ~size_t{4095});
  if (value || last <= first) {
    std::memset(bytes, value, nbytes);
    return;
  }
  std::memset(bytes, 0, first - bytes);
  madvise(first, last - first, MADV_DONTNEED);  // zeros that take no memory of the host
  std::memset(last, 0, bytes + nbytes - last);
}

Error fill(void* address, int value, size_t nbytes, void* handle) {
  Lock guard(mutex);
  Stream* stream = touched_stream(handle);
  if (!stream) return last_error;
  if (!nbytes) return cudaSuccess;
  if (!on_device(address) || !within_one(address, nbytes)) return refuse(cudaErrorInvalidValue);
  if (Error race = look(*stream, "a fill", {{(const char*)address, nbytes, true}})) return race;
  char* bytes = (char*)bytes_at(address);
  queue(*stream, [=] { fill_bytes(bytes, value, nbytes); });
  return cudaSuccess;
}

// ---- kernels

Error launch(void* handle, const char* name = "a kernel", const std::vector<order::Access>& accesses = {}) {
  Lock guard(mutex);
  Stream* stream = touched_stream(handle);
  if (!stream) return last_error;
  if (stream->device != current) return refuse(cudaErrorInvalidResourceHandle);
  if (Error race = look(*stream, name, accesses)) return race;
  run(*stream, stream->queued);
  return ++counts.kernels, cudaSuccess;
}

template <class Handle>
int made(Handle* handle) {
  return *handle = (Handle)std::calloc(1, 4096), 0;
}

}  // namespace

// ---- memory

API Error cudaMalloc(void** address, size_t nbytes) { return take(address, nbytes, Kind::device); }
API Error cudaFree(void* address) { return give_back(address); }
API Error cudaHostAlloc(void** address, size_t nbytes, unsigned) { return take(address, nbytes, Kind::locked); }
API Error cudaMallocHost(void** address, size_t nbytes) { return take(address, nbytes, Kind::locked); }
API Error cudaFreeHost(void* address) { return give_back(address); }

API Error cudaHostRegister(void* address, size_t nbytes, unsigned) {
  Lock guard(mutex);
  if (!nbytes) return refuse(cudaErrorInvalidValue);
  if (!is_free(address, nbytes)) return refuse(cudaErrorHostMemoryAlreadyRegistered);
  if (nbytes > kLockableBytes - locked_bytes) return refuse(cudaErrorMemoryAllocation);
  pieces[(char*)address] = {nbytes, Kind::registered, (char*)address, touched()};
  locked_bytes += nbytes;
  return cudaSuccess;
}

API Error cudaHostUnregister(void* address) {
  Lock guard(mutex);
  auto found = pieces.find((char*)address);
  if (found == pieces.end() || found->second.kind != Kind::registered) return refuse(cudaErrorHostMemoryNotRegistered);
  wait_for_device(found->second.device);
  locked_bytes -= found->second.nbytes;
  pieces.erase(found);
  return cudaSuccess;
}

API Error cudaMemGetInfo(size_t* free, size_t* total) {
  Lock guard(mutex);
  *total = kDeviceBytes, *free = kDeviceBytes - device_bytes[touched()];
  return cudaSuccess;
}

API Error cudaPointerGetAttributes(cudaPointerAttributes* said, const void* address) {
  Lock guard(mutex);
  auto* found = piece_at(address);
  *said = {};
  said->type = !found ? cudaMemoryTypeUnregistered : on_device(address) ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  said->device = found ? found->second.device : -2;
  said->devicePointer = found ? (void*)address : nullptr;
  said->hostPointer = found && !on_device(address) ? (void*)address : nullptr;
  return cudaSuccess;
}

API Error cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, void* stream) {
  return copy(to, from, n, kind, stream);
}

API Error cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind,
    void* stream) {
  for (size_t row = 0; row < height; ++row) {
    void* line = (char*)to + row * to_pitch;
    if (Error error = copy(line, (const char*)from + row * from_pitch, width, kind, stream)) return error;
  }
  return cudaSuccess;
}

API Error cudaMemsetAsync(void* address, int value, size_t n, void* stream) { return fill(address, value, n, stream); }

API Error cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
  Error error = copy(to, from, n, kind, nullptr);
  Lock guard(mutex);
  wait_for(defaults[current]);
  return error;
}

API Error cudaMemset(void* address, int value, size_t n) { return fill(address, value, n, nullptr); }

// ---- the device

API Error cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }
API Error cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
API Error cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return refuse(cudaErrorInvalidDevice);
  return current = device, cudaSuccess;
}
API Error cudaDriverGetVersion(int* version) { return *version = kVersion, cudaSuccess; }
API Error cudaRuntimeGetVersion(int* version) { return *version = kVersion, cudaSuccess; }

API Error cudaGetDeviceProperties(cudaDeviceProp* is, int) {
  *is = {};
  std::strcpy(is->name, "Null CUDA");
  is->major = kCapability / 10, is->minor = kCapability % 10;
  is->totalGlobalMem = kDeviceBytes;
  is->sharedMemPerBlock = 48 << 10, is->sharedMemPerBlockOptin = is->sharedMemPerMultiprocessor = 160 << 10;
  is->regsPerBlock = is->regsPerMultiprocessor = 64 << 10;
  is->warpSize = 32, is->multiProcessorCount = 108;
  is->maxThreadsPerBlock = is->maxThreadsDim[0] = is->maxThreadsDim[1] = 1024, is->maxThreadsDim[2] = 64;
  is->maxThreadsPerMultiProcessor = 2048, is->maxBlocksPerMultiProcessor = 32;
  is->maxGridSize[0] = 0x7fffffff, is->maxGridSize[1] = is->maxGridSize[2] = 0xffff;
  is->memPitch = 0x7fffffff, is->textureAlignment = 512, is->totalConstMem = 64 << 10, is->l2CacheSize = 40 << 20;
  is->memoryBusWidth = 5120, is->concurrentKernels = is->cooperativeLaunch = is->streamPrioritiesSupported = 1;
  is->canMapHostMemory = is->unifiedAddressing = is->hostRegisterSupported = is->canUseHostPointerForRegisteredMem = 1;
  is->asyncEngineCount = 3, is->pciBusID = 1;
  return cudaSuccess;
}

API Error cudaGetDeviceProperties_v2(cudaDeviceProp* is, int device) { return cudaGetDeviceProperties(is, device); }

API Error cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  cudaDeviceProp is;
  cudaGetDeviceProperties(&is, 0);
  static const std::map<int, int> said = {
      {cudaDevAttrMaxThreadsPerBlock, is.maxThreadsPerBlock},
      {cudaDevAttrMaxBlockDimX, is.maxThreadsDim[0]},
      {cudaDevAttrMaxBlockDimY, is.maxThreadsDim[1]},
      {cudaDevAttrMaxBlockDimZ, is.maxThreadsDim[2]},
      {cudaDevAttrMaxGridDimX, is.maxGridSize[0]},
      {cudaDevAttrMaxGridDimY, is.maxGridSize[1]},
      {cudaDevAttrMaxGridDimZ, is.maxGridSize[2]},
      {cudaDevAttrMaxSharedMemoryPerBlock, int(is.sharedMemPerBlock)},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, int(is.sharedMemPerBlockOptin)},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, int(is.sharedMemPerMultiprocessor)},
      {cudaDevAttrWarpSize, is.warpSize},
      {cudaDevAttrMaxRegistersPerBlock, is.regsPerBlock},
      {cudaDevAttrMultiProcessorCount, is.multiProcessorCount},
      {cudaDevAttrMaxThreadsPerMultiProcessor, is.maxThreadsPerMultiProcessor},
      {cudaDevAttrMaxBlocksPerMultiprocessor, is.maxBlocksPerMultiProcessor},
      {cudaDevAttrComputeCapabilityMajor, is.major},
      {cudaDevAttrComputeCapabilityMinor, is.minor},
      {cudaDevAttrCanMapHostMemory, 1},
      {cudaDevAttrConcurrentKernels, 1},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrHostRegisterSupported, 1},
      {cudaDevAttrCooperativeLaunch, 1},
  };
  auto found = said.find(which);
  *value = found == said.end() ? 0 : found->second;
  return cudaSuccess;
}

API Error cudaDeviceGetPCIBusId(char* text, int nbytes, int) {
  std::snprintf(text, nbytes, "0000:01:00.0");
  return cudaSuccess;
}

API Error cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

API Error cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }

// ---- streams and events

API Error cudaStreamCreateWithPriority(void** stream, unsigned, int) {
  made(stream);
  Lock guard(mutex);
  streams.insert({*stream, Stream{touched(), kDevices + streams.size()}});
  return cudaSuccess;
}
API Error cudaStreamCreateWithFlags(void** stream, unsigned) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API Error cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API Error cudaStreamSynchronize(void* handle) {
  Lock guard(mutex);
  Stream* stream = touched_stream(handle);
  return stream ? wait_for(*stream), cudaSuccess : last_error;
}
API Error cudaStreamQuery(void* handle) {
  Lock guard(mutex);
  Stream* stream = touched_stream(handle);
  if (!stream) return last_error;
  if (stream->done < stream->queued && not_yet()) return refuse(cudaErrorNotReady);
  return wait_for(*stream), cudaSuccess;
}
API Error cudaDeviceSynchronize() {
  Lock guard(mutex);
  return wait_for_device(touched()), cudaSuccess;
}
API Error cudaStreamGetPriority(void* stream, int* priority) {
  Lock guard(mutex);
  return *priority = 0, stream_at(stream) ? cudaSuccess : last_error;
}

API Error cudaStreamIsCapturing(void* stream, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;  // an optimizer of torch asks it of the current device, whatever it steps
  Lock guard(mutex);
  return stream_at(stream) ? cudaSuccess : last_error;
}
API Error cudaStreamGetCaptureInfo(void* stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
  if (id) *id = 0;
  return cudaStreamIsCapturing(stream, status);
}
API Error cudaStreamGetCaptureInfo_v2(void* stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
  return cudaStreamGetCaptureInfo(stream, status, id);
}

API Error cudaLaunchHostFunc(void* stream, void (*call)(void*), void* data) {
  Error error = cudaStreamSynchronize(stream);
  return error ? error : (call(data), cudaSuccess);
}
API Error cudaStreamAddCallback(void* stream, void (*call)(void*, Error, void*), void* data, unsigned) {
  Error error = cudaStreamSynchronize(stream);
  return error ? error : (call(stream, cudaSuccess, data), cudaSuccess);
}

API Error cudaEventCreateWithFlags(void** event, unsigned flags) {
  Lock guard(mutex);
  events.insert(*event = new Event{flags, touched()});
  return cudaSuccess;
}
API Error cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

API Error cudaEventDestroy(void* event) {
  Lock guard(mutex);
  if (!events.erase(event)) return refuse(cudaErrorInvalidResourceHandle);
  delete (Event*)event;
  return cudaSuccess;
}

API Error cudaEventRecord(void* handle, void* stream_handle) {
  Lock guard(mutex);
  Event* event = event_at(handle);
  Stream* stream = event ? touched_stream(stream_handle) : nullptr;
  if (!stream) return last_error;
  if (event->device != stream->device) return refuse(cudaErrorInvalidResourceHandle);
  order::join(stream->clock, host_clock);
  event->stream = stream, event->position = stream->queued, event->clock = stream->clock;
  event->at_ms = now_ms();
  return cudaSuccess;
}
API Error cudaEventRecordWithFlags(void* event, void* stream, unsigned) { return cudaEventRecord(event, stream); }

API Error cudaEventSynchronize(void* handle) {
  Lock guard(mutex);
  Event* event = event_at(handle);
  if (!event) return last_error;
  if (event->stream) run(*event->stream, event->position);
  return order::join(host_clock, event->clock), cudaSuccess;
}
API Error cudaEventQuery(void* handle) {
  Lock guard(mutex);
  Event* event = event_at(handle);
  if (event && !event->is_there() && not_yet()) return refuse(cudaErrorNotReady);
  return cudaEventSynchronize(handle);
}

API Error cudaStreamWaitEvent(void* stream_handle, void* handle, unsigned) {
  Lock guard(mutex);
  Event* event = event_at(handle);
  Stream* stream = event ? touched_stream(stream_handle) : nullptr;
  if (!stream) return last_error;
  order::join(stream->clock, event->clock);
  if (!event->is_there()) queue(*stream, [from = event->stream, until = event->position] { run(*from, until); });
  return cudaSuccess;
}

API Error cudaEventElapsedTime(float* ms, void* from, void* to) {
  for (void* event : {from, to}) {
    Lock guard(mutex);
    if (!event_at(event)) return last_error;
    const Event& at = *(Event*)event;
    if (at.flags & cudaEventDisableTiming || at.at_ms < 0) return refuse(cudaErrorInvalidResourceHandle);
  }
  *ms = float(((Event*)to)->at_ms - ((Event*)from)->at_ms);
  return cudaSuccess;
}

// ---- errors (Rule 4)

API Error cudaGetLastError() {
  Error error = last_error;
  last_error = cudaSuccess;
  return error;
}
API Error cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(Error) { return "cudaErrorOfNullCuda"; }
API const char* cudaGetErrorString(Error error) {
  if (error == cudaErrorIllegalAddress) return last_race.c_str();
  return error == cudaErrorMemoryAllocation ? "out of memory" : "refused by the null CUDA runtime";
}

// ---- kernels (Rule 1)

API Error cudaFuncGetAttributes(cudaFuncAttributes* has, const void*) {
  *has = {};
  has->maxThreadsPerBlock = 1024, has->numRegs = 32, has->maxDynamicSharedSizeBytes = 160 << 10;
  has->binaryVersion = has->ptxVersion = kCapability;
  return cudaSuccess;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  return *count = 2, cudaSuccess;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  return *count = 2, cudaSuccess;
}
API Error cudaGetSymbolAddress(void** address, const void*) {
  static char symbol[1 << 16];
  return *address = symbol, cudaSuccess;
}
struct Size {
  unsigned x, y, z;
};

// One of torch's own, which does nothing: where there are numbers it would have given some.
static Error launch_null(void* stream) { return kNumbers ? refuse(cudaErrorNotSupported) : launch(stream); }

API Error cudaLaunchKernel(const void*, Size, Size, void**, size_t, void* stream) { return launch_null(stream); }
API Error __cudaLaunchKernel(const void*, Size, Size, void**, size_t, void* stream) { return launch_null(stream); }
API Error cudaLaunchCooperativeKernel(const void*, Size, Size, void**, size_t, void* stream) {
  return launch_null(stream);
}
API Error cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void*, void**) { return launch_null(how->stream); }
API Error __cudaGetKernel(void** kernel, const void* function) { return *kernel = (void*)function, cudaSuccess; }
API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

thread_local struct {
  Size grid, block;
  size_t shared;
  void* stream;
} launched;

API unsigned __cudaPushCallConfiguration(Size grid, Size block, size_t shared, void* stream) {
  return launched = {grid, block, shared, stream}, 0;
}
API Error __cudaPopCallConfiguration(Size* grid, Size* block, size_t* shared, void* stream) {
  *grid = launched.grid, *block = launched.block, *shared = launched.shared, *(void**)stream = launched.stream;
  return cudaSuccess;
}

// ---- the driver, of which torch asks the runtime for functions by name

namespace {
long nothing() { return 0; }
}  // namespace

API Error cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (!*function) *function = (void*)nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- libraries: handles, one algorithm for each product, and collectives of one process

API int cublasCreate_v2(void** handle) { return made(handle); }
API int cusolverDnCreate(void** handle) { return made(handle); }
API int cusparseCreate(void** handle) { return made(handle); }
API int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
API int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
API int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* found, int* count) {
  return std::memset(found, 0, 64), *count = 1, 0;
}

struct UniqueId {
  char text[128];
};

API int ncclGetUniqueId(UniqueId* id) { return *id = {}, 0; }
API int ncclCommInitRank(void** comm, int, UniqueId, int) { return made(comm); }
API int ncclCommInitRankConfig(void** comm, int, UniqueId, int, void*) { return made(comm); }
API int ncclCommGetAsyncError(void*, int* error) { return *error = 0; }
API int ncclCommUserRank(void*, int* rank) { return *rank = 0; }
API int ncclCommCount(void*, int* count) { return *count = 1, 0; }

namespace {
int whole(const void* from, void* to, size_t count, int type, void* stream) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return from == to ? 0 : int(copy(to, from, count * sizes[type], cudaMemcpyDeviceToDevice, stream));
}
}  // namespace

API int ncclAllGather(const void* from, void* to, size_t n, int type, void*, void* stream) {
  return whole(from, to, n, type, stream);
}
API int ncclAllReduce(const void* from, void* to, size_t n, int type, int, void*, void* stream) {
  return whole(from, to, n, type, stream);
}
API int ncclReduceScatter(const void* from, void* to, size_t n, int type, int, void*, void* stream) {
  return whole(from, to, n, type, stream);
}
API int ncclBroadcast(const void* from, void* to, size_t n, int type, int, void*, void* stream) {
  return whole(from, to, n, type, stream);
}

// ---- what tests ask

API void nullcuda_counts(long* out) {
  out[0] = counts.up, out[1] = counts.down, out[2] = counts.not_locked, out[3] = counts.kernels;
  Lock guard(mutex);
  out[4] = 0, out[5] = long(locked_bytes);
  for (int device = 0; device < kDevices; ++device) out[4] += long(device_bytes[device]);
}

API long nullcuda_touches(int device) { return touches[device]; }

// ---- what kernels.cpp asks

API void* nullcuda_bytes(const void* address) {
  Lock guard(mutex);
  return bytes_at(address);
}

// The kernel is launched, and may run now; or the race that it would be.
API const char* nullcuda_kernel(void* stream, const char* name, const order::Access* accesses, size_t count) {
  return launch(stream, name, {accesses, accesses + count}) ? cudaGetErrorString(last_error) : nullptr;
}
