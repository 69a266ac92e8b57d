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
#pragma once
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

namespace {

using Error = cudaError_t;
constexpr int kVersion = CUDA_VERSION_MADE_FOR;

size_t setting(const char* name, size_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::strtoull(value, nullptr, 10) : otherwise;
}

struct Settings {
  size_t device_bytes = setting("NULLCUDA_BYTES", size_t{140} << 30);
  size_t lockable_bytes = setting("NULLCUDA_LOCKABLE", SIZE_MAX);
  bool late = setting("NULLCUDA_LATE", 0);
  int devices = int(setting("NULLCUDA_DEVICES", 1));
  int capability = int(setting("NULLCUDA_CAPABILITY", 80));
} settings;

const bool kNumbers = std::getenv("NULLCUDA_KERNELS");
constexpr int kMostDevices = 64;

thread_local Error last_error = cudaSuccess;
thread_local std::string last_race;  // that was refused as an illegal address

Error refuse(Error error) { return last_error = error; }

// ---- devices (Rule 5)

thread_local int current = 0;
std::atomic<long> touches[kMostDevices];

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
size_t device_bytes[kMostDevices], locked_bytes = 0;

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
  bool captures = false;  // for a graph that does nothing: what is queued meanwhile is done as ever
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
  for (int device = 0; device < kMostDevices; ++device) made->push_back({device, size_t(device)});
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
  if (!settings.late) run(stream, stream.queued);
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
  size_t most = kind == Kind::device ? settings.device_bytes : settings.lockable_bytes;
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
  const bool read_now = settings.late && !piece_at(from), wait = !piece_at(to);
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
