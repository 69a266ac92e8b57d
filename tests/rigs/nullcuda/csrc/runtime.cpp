// What torch calls of the CUDA runtime, and as much of cuBLAS and NCCL as a step calls; state.h says by which rules.
#include <dlfcn.h>

#include "state.h"

#define API extern "C" __attribute__((visibility("default")))

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
  if (nbytes > settings.lockable_bytes - locked_bytes) return refuse(cudaErrorMemoryAllocation);
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
  *total = settings.device_bytes, *free = settings.device_bytes - device_bytes[touched()];
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

API Error cudaGetDeviceCount(int* count) { return *count = settings.devices, cudaSuccess; }
API Error cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
API Error cudaSetDevice(int device) {
  if (device < 0 || device >= settings.devices) return refuse(cudaErrorInvalidDevice);
  return current = device, cudaSuccess;
}
API Error cudaDriverGetVersion(int* version) { return *version = kVersion, cudaSuccess; }
API Error cudaRuntimeGetVersion(int* version) { return *version = kVersion, cudaSuccess; }

API Error cudaGetDeviceProperties(cudaDeviceProp* is, int) {
  *is = {};
  std::strcpy(is->name, "Null CUDA");
  is->major = settings.capability / 10, is->minor = settings.capability % 10;
  is->totalGlobalMem = settings.device_bytes;
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
  streams.insert({*stream, Stream{touched(), settings.devices + streams.size()}});
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

API Error cudaStreamIsCapturing(void* handle, cudaStreamCaptureStatus* status) {
  Lock guard(mutex);
  Stream* stream = stream_at(handle);  // an optimizer of torch asks it of the current device, whatever it steps
  *status = stream && stream->captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return stream ? cudaSuccess : last_error;
}
API Error cudaStreamGetCaptureInfo(void* stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
  Error error = cudaStreamIsCapturing(stream, status);
  if (id) *id = *status == cudaStreamCaptureStatusActive;
  return error;
}
API Error cudaStreamBeginCapture(void* handle, cudaStreamCaptureMode) {
  Lock guard(mutex);
  Stream* stream = touched_stream(handle);
  return stream ? stream->captures = true, cudaSuccess : last_error;
}
API Error cudaStreamEndCapture(void* handle, cudaGraph_t* graph) {
  Lock guard(mutex);
  Stream* stream = touched_stream(handle);
  return stream ? stream->captures = false, made(graph), cudaSuccess : last_error;
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

// ---- errors (state.h, Rule 4)

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

// ---- kernels (state.h, Rule 1)

API Error cudaFuncGetAttributes(cudaFuncAttributes* has, const void*) {
  *has = {};
  has->maxThreadsPerBlock = 1024, has->numRegs = 32, has->maxDynamicSharedSizeBytes = 160 << 10;
  has->binaryVersion = has->ptxVersion = settings.capability;
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

API void nullcuda_read_settings() { settings = Settings{}; }

API void nullcuda_counts(long* out) {
  out[0] = counts.up, out[1] = counts.down, out[2] = counts.not_locked, out[3] = counts.kernels;
  Lock guard(mutex);
  out[4] = 0, out[5] = long(locked_bytes);
  for (int device = 0; device < settings.devices; ++device) out[4] += long(device_bytes[device]);
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
