// A CUDA runtime without a GPU, laid in front of the real one with LD_PRELOAD. Device memory is host memory, kernels do nothing,
// copies copy, and what a program asks of the GPU is counted by thread: launches, memsets, copies, synchronisations,
// allocations. Streams can be captured into graphs, under CUDA's rules; a graph's launch counts as one.
//
// It shows control flow, devices and what the host does in a step. It shows no numbers, no races and no speed.
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "counts.h"

#define API extern "C" __attribute__((visibility("default")))
#define RT API cudaError_t CUDARTAPI

// --- Counting ----------------------------------------------------------------------------------------------------------

static std::mutex counting;
static std::map<std::string, long>& counts() {
    static auto* all = new std::map<std::string, long>;  // never destroyed: threads count until the process has ended
    return *all;
}

static const char* thread_name() {
    static thread_local char name[16];
    if (!*name) {
        if (syscall(SYS_gettid) == getpid()) {
            strcpy(name, "main");
        } else {
            pthread_getname_np(pthread_self(), name, sizeof name);
            strcpy(name, strncmp(name, "pt_autograd", 11) ? "other" : "backward");
        }
    }
    return name;
}

void count(const char* what, long number) {
    std::lock_guard<std::mutex> guard(counting);
    counts()[std::string(thread_name()) + " " + what] += number;
}

static void (*told_of_waiting)(const char*) = nullptr;
static cudaError_t wait(const char* function) {
    count("synchronisations");
    if (told_of_waiting) told_of_waiting(function);
    return cudaSuccess;
}

API void rehearsal_forget() {
    std::lock_guard<std::mutex> guard(counting);
    counts().clear();
}
API void rehearsal_counts(char* text, int size) {  // lines of "thread what=number"
    std::lock_guard<std::mutex> guard(counting);
    std::string all;
    for (auto& [name, number] : counts()) all += name + "=" + std::to_string(number) + "\n";
    snprintf(text, size, "%s", all.c_str());
}
API void rehearsal_on_waiting(void (*function)(const char*)) { told_of_waiting = function; }

// --- Capture -----------------------------------------------------------------------------------------------------------

struct Capture {
    unsigned long long id;
    cudaStreamCaptureMode mode;
    pid_t thread;
    long launches = 0;
};
static std::mutex capturing;
static auto& captured_streams = *new std::map<cudaStream_t, Capture*>;  // never destroyed, like the counts
static auto& captured_events = *new std::map<cudaEvent_t, Capture*>;
static thread_local cudaStreamCaptureMode own_mode = cudaStreamCaptureModeGlobal;

static Capture* capture_of(cudaStream_t stream) {
    std::lock_guard<std::mutex> guard(capturing);
    auto found = captured_streams.find(stream);
    return found == captured_streams.end() ? nullptr : found->second;
}

// Whether a call that might wait is forbidden now: CUDA's rules of cudaStreamBeginCapture.
static bool forbidden() {
    std::lock_guard<std::mutex> guard(capturing);
    for (auto& [stream, capture] : captured_streams) {
        bool own = capture->thread == syscall(SYS_gettid);
        if (own_mode == cudaStreamCaptureModeRelaxed || capture->mode == cudaStreamCaptureModeRelaxed) continue;
        if (own || (own_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal)) return true;
    }
    return false;
}

// Work on a stream: part of a graph where it is captured, else counted. The legacy stream waits for all others, which are captured.
static cudaError_t work(const char* what, cudaStream_t stream) {
    if (Capture* capture = capture_of(stream)) {
        capture->launches++;
        return cudaSuccess;
    }
    if (!stream && forbidden()) return cudaErrorStreamCaptureImplicit;
    count(what);
    return cudaSuccess;
}
static cudaError_t unsafe(const char* what) {
    if (forbidden()) return cudaErrorStreamCaptureUnsupported;
    if (what) count(what);
    return cudaSuccess;
}

static std::atomic<unsigned long long> serial{4096};
template <class Handle>
static Handle handle() { return (Handle)(serial += 16); }

RT cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    if (!stream) return cudaErrorStreamCaptureUnsupported;
    std::lock_guard<std::mutex> guard(capturing);
    captured_streams[stream] = new Capture{serial += 16, mode, (pid_t)syscall(SYS_gettid)};
    return cudaSuccess;
}
RT cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    std::lock_guard<std::mutex> guard(capturing);
    auto found = captured_streams.find(stream);
    if (found == captured_streams.end()) return cudaErrorIllegalState;
    Capture* capture = found->second;
    for (auto all = captured_streams.begin(); all != captured_streams.end();)
        all = all->second == capture ? captured_streams.erase(all) : std::next(all);
    for (auto all = captured_events.begin(); all != captured_events.end();)
        all = all->second == capture ? captured_events.erase(all) : std::next(all);
    *graph = (cudaGraph_t)capture;
    return cudaSuccess;
}
RT cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
#undef cudaStreamGetCaptureInfo
RT cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                            const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* number) {
    Capture* capture = capture_of(stream);
    *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = (cudaGraph_t)capture;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (number) *number = 0;
    return cudaSuccess;
}
RT cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, own_mode);
    return cudaSuccess;
}
RT cudaGraphInstantiate(cudaGraphExec_t* program, cudaGraph_t graph, unsigned long long) {
    *program = (cudaGraphExec_t)graph;
    return cudaSuccess;
}
RT cudaGraphInstantiateWithFlags(cudaGraphExec_t* program, cudaGraph_t graph, unsigned long long) {
    *program = (cudaGraphExec_t)graph;
    return cudaSuccess;
}
RT cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) { return work("graphs", stream); }
RT cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
    *number = ((Capture*)graph)->launches;
    return cudaSuccess;
}
RT cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
RT cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
RT cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
RT cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
    *object = handle<cudaUserObject_t>();
    return cudaSuccess;
}
RT cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }

// --- Memory ------------------------------------------------------------------------------------------------------------

enum Kind { PAGEABLE, PINNED, DEVICE };
struct Block {
    size_t size;
    Kind kind;
    int device;
};
static std::mutex memory;
static std::map<char*, Block>& blocks() {
    static auto* all = new std::map<char*, Block>;
    return *all;
}
static size_t& in_use(int number) {
    static size_t bytes[64];
    return bytes[number];
}
static thread_local int device = 0;
static const char* const MIB = getenv("REHEARSAL_MIB");
static const size_t TOTAL = (MIB ? strtoull(MIB, nullptr, 10) : 16384) << 20;  // each GPU's memory

static Block block_of(const void* place) {
    std::lock_guard<std::mutex> guard(memory);
    auto after = blocks().upper_bound((char*)place);
    if (after == blocks().begin()) return {0, PAGEABLE, -1};
    auto found = std::prev(after);
    return (char*)place < found->first + found->second.size ? found->second : Block{0, PAGEABLE, -1};
}

static cudaError_t allocate(void** place, size_t size, Kind kind) {
    std::lock_guard<std::mutex> guard(memory);
    if (kind == DEVICE && in_use(device) + size > TOTAL) return cudaErrorMemoryAllocation;
    void* made = nullptr;
    if (posix_memalign(&made, 4096, size ? size : 1)) return cudaErrorMemoryAllocation;
    if (size <= 64 << 20) memset(made, 0, size);  // so that what no kernel has written is the same in every run
    blocks()[(char*)made] = {size, kind, device};
    if (kind == DEVICE) in_use(device) += size;
    *place = made;
    return cudaSuccess;
}

static cudaError_t release(void* place) {
    if (!place) return cudaSuccess;
    {
        std::lock_guard<std::mutex> guard(memory);
        auto found = blocks().find((char*)place);
        if (found == blocks().end()) return cudaErrorInvalidValue;
        if (found->second.kind == DEVICE) in_use(found->second.device) -= found->second.size;
        blocks().erase(found);
    }
    free(place);
    return cudaSuccess;
}

cudaError_t allocate_on_device(void** place, size_t size) { return allocate(place, size, DEVICE); }
cudaError_t release_on_device(void* place) { return release(place); }

#define ALLOCATE(name, kind, ...)                                \
    RT name(void** place, size_t size, ##__VA_ARGS__) {          \
        if (cudaError_t error = unsafe("allocations")) return error; \
        return allocate(place, size, kind);                      \
    }
ALLOCATE(cudaMalloc, DEVICE)
ALLOCATE(cudaMallocAsync, DEVICE, cudaStream_t)
ALLOCATE(cudaMallocHost, PINNED)
ALLOCATE(cudaHostAlloc, PINNED, unsigned)
RT cudaFree(void* place) { return release(place); }
RT cudaFreeAsync(void* place, cudaStream_t) { return release(place); }
RT cudaFreeHost(void* place) { return release(place); }
RT cudaHostRegister(void* place, size_t size, unsigned) {
    std::lock_guard<std::mutex> guard(memory);
    blocks()[(char*)place] = {size, PINNED, device};
    return cudaSuccess;
}
RT cudaHostUnregister(void* place) {
    std::lock_guard<std::mutex> guard(memory);
    blocks().erase((char*)place);
    return cudaSuccess;
}
RT cudaMemGetInfo(size_t* left, size_t* total) {
    std::lock_guard<std::mutex> guard(memory);
    *total = TOTAL;
    *left = TOTAL - in_use(device);
    return cudaSuccess;
}
RT cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* place) {
    Block block = block_of(place);
    memset(attributes, 0, sizeof *attributes);
    attributes->device = block.device;
    attributes->type = block.kind == DEVICE   ? cudaMemoryTypeDevice
                       : block.kind == PINNED ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
    attributes->devicePointer = block.kind ? (void*)place : nullptr;
    attributes->hostPointer = block.kind == PINNED ? (void*)place : nullptr;
    return cudaSuccess;
}

// A copy from or to pageable memory makes the host wait, as on a GPU; torch synchronises by itself after one to the host.
static cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t stream) {
    Kind target = block_of(to).kind, source = block_of(from).kind;
    const char* what = target == DEVICE && source == DEVICE ? "copies on the device"
                       : target == DEVICE                   ? (source == PINNED ? "copies in" : "copies in from pageable memory")
                       : source == DEVICE                   ? "copies out"
                                                            : "copies on the host";
    if (cudaError_t error = work(what, stream)) return error;
    memmove(to, from, size);
    return cudaSuccess;
}
RT cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    if (forbidden()) return cudaErrorStreamCaptureUnsupported;
    wait("cudaMemcpy");
    return copy(to, from, size, nullptr);
}
RT cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) { return copy(to, from, size, stream); }
RT cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) { return copy(to, from, size, stream); }
RT cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
RT cudaMemset(void* place, int value, size_t size) {
    if (cudaError_t error = work("memsets", nullptr)) return error;
    memset(place, value, size);
    return cudaSuccess;
}
RT cudaMemsetAsync(void* place, int value, size_t size, cudaStream_t stream) {
    if (cudaError_t error = work("memsets", stream)) return error;
    memset(place, value, size);
    return cudaSuccess;
}
RT cudaGetSymbolAddress(void** place, const void*) {
    static char room[1 << 16];
    *place = room;
    return cudaSuccess;
}

// --- Devices -----------------------------------------------------------------------------------------------------------

// REHEARSAL_GPUS of them, fewer where CUDA_VISIBLE_DEVICES names fewer.
static std::vector<int> look_for_devices() {
    const char *text = getenv("REHEARSAL_GPUS"), *names = getenv("CUDA_VISIBLE_DEVICES");
    int number = text ? atoi(text) : 1;
    std::vector<int> shown;
    if (names && !strncmp(names, "MIG-", 4)) return {0};  // of slices the first alone is shown
    if (!names)
        for (int one = 0; one < number; one++) shown.push_back(one);
    std::stringstream all(names ? names : "");
    for (std::string name; std::getline(all, name, ',') && name[0] != '-' && atoi(name.c_str()) < number;)  // as CUDA: up to
        shown.push_back(atoi(name.c_str()));                                                                // an unknown one
    return shown;
}
static const std::vector<int>& shown_devices() {
    static const std::vector<int> shown = look_for_devices();
    return shown;
}
static int devices() { return shown_devices().size(); }
RT cudaGetDeviceCount(int* number) { return (*number = devices()) ? cudaSuccess : cudaErrorNoDevice; }
RT cudaGetDevice(int* number) {
    *number = device;
    return cudaSuccess;
}
RT cudaSetDevice(int number) {
    if (number < 0 || number >= devices()) return cudaErrorInvalidDevice;
    device = number;
    return cudaSuccess;
}
RT cudaGetDeviceProperties(cudaDeviceProp* of, int number) {
    memset(of, 0, sizeof *of);
    strcpy(of->name, "Rehearsal GPU");
    of->major = 9;
    of->multiProcessorCount = 132;
    of->totalGlobalMem = TOTAL;
    of->warpSize = 32;
    of->maxThreadsPerBlock = 1024;
    of->maxThreadsPerMultiProcessor = 2048;
    of->maxBlocksPerMultiProcessor = 32;
    of->sharedMemPerBlock = 49152;
    of->sharedMemPerBlockOptin = 232448;
    of->sharedMemPerMultiprocessor = 233472;
    of->regsPerBlock = of->regsPerMultiprocessor = 65536;
    of->l2CacheSize = 50 << 20;
    of->textureAlignment = 512;
    of->pciBusID = of->uuid.bytes[0] = 1 + shown_devices()[number];
    of->canMapHostMemory = of->concurrentKernels = of->unifiedAddressing = 1;
    of->asyncEngineCount = 3;
    int threads[] = {1024, 1024, 64}, grid[] = {2147483647, 65535, 65535};
    memcpy(of->maxThreadsDim, threads, sizeof threads);
    memcpy(of->maxGridSize, grid, sizeof grid);
    return cudaSuccess;
}
RT cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    static const std::map<cudaDeviceAttr, int> known = {
        {cudaDevAttrComputeCapabilityMajor, 9},          {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMultiProcessorCount, 132},           {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxThreadsPerBlock, 1024},           {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrMaxSharedMemoryPerBlock, 49152},     {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
        {cudaDevAttrMaxGridDimX, 2147483647},            {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535},                 {cudaDevAttrMaxBlockDimX, 1024},
        {cudaDevAttrMaxBlockDimY, 1024},                 {cudaDevAttrMaxRegistersPerBlock, 65536},
    };
    auto found = known.find(attribute);
    *value = found == known.end() ? 1 : found->second;
    return cudaSuccess;
}
RT cudaDeviceGetPCIBusId(char* text, int size, int number) {
    snprintf(text, size, "0000:%02x:00.0", number);
    return cudaSuccess;
}
RT cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
RT cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
RT cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}
RT cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
RT cudaDeviceSynchronize() {
    if (cudaError_t error = unsafe(nullptr)) return error;
    return wait("cudaDeviceSynchronize");
}
RT cudaGetLastError() { return cudaSuccess; }
RT cudaPeekAtLastError() { return cudaSuccess; }
RT cudaProfilerStart() { return cudaSuccess; }
RT cudaProfilerStop() { return cudaSuccess; }

// --- Streams and events ------------------------------------------------------------------------------------------------

RT cudaStreamCreate(cudaStream_t* stream) {
    *stream = handle<cudaStream_t>();
    return cudaSuccess;
}
RT cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
RT cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
RT cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
RT cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
RT cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}
RT cudaDeviceGetStreamPriorityRange(int* low, int* high) {
    *low = 0;
    *high = -5;
    return cudaSuccess;
}
RT cudaStreamSynchronize(cudaStream_t stream) {
    if (capture_of(stream)) return cudaErrorStreamCaptureUnsupported;
    if (!stream)
        if (cudaError_t error = unsafe(nullptr)) return error;
    return wait("cudaStreamSynchronize");
}
RT cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    std::lock_guard<std::mutex> guard(capturing);
    auto found = captured_events.find(event);
    if (found != captured_events.end()) captured_streams[stream] = found->second;  // it joins the capture
    return cudaSuccess;
}
RT cudaEventCreate(cudaEvent_t* event) {
    *event = handle<cudaEvent_t>();
    return cudaSuccess;
}
RT cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
RT cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
RT cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Capture* capture = capture_of(stream);
    std::lock_guard<std::mutex> guard(capturing);
    if (capture)
        captured_events[event] = capture;
    else
        captured_events.erase(event);
    return cudaSuccess;
}
RT cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
RT cudaEventQuery(cudaEvent_t) { return unsafe(nullptr); }
RT cudaEventSynchronize(cudaEvent_t) {
    if (cudaError_t error = unsafe(nullptr)) return error;
    return wait("cudaEventSynchronize");
}
RT cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 0.5f;
    return cudaSuccess;
}

// --- Kernels -----------------------------------------------------------------------------------------------------------

API cudaError_t rehearsal_launch(cudaStream_t stream) { return work("launches", stream); }  // by the driver, for Triton
RT cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) { return work("launches", stream); }
RT cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void*, void**) { return work("launches", how->stream); }
RT __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) { return work("launches", stream); }
RT __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
RT cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
    function(data);
    return cudaSuccess;
}
RT cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}
RT cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
    memset(of, 0, sizeof *of);
    of->maxThreadsPerBlock = 1024;
    of->numRegs = 32;
    of->binaryVersion = of->ptxVersion = 90;
    return cudaSuccess;
}
RT cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
RT cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* number, const void*, int, size_t) {
    *number = 2;
    return cudaSuccess;
}
RT cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* number, const void*, int, size_t, unsigned) {
    *number = 2;
    return cudaSuccess;
}

// --- Matrix products ---------------------------------------------------------------------------------------------------

// Each counts as a launch. The stream belongs to the handle: the one that cublasSetStream gave this thread last.
static thread_local cudaStream_t product_stream = nullptr;
typedef int Status;
#define PRODUCT(name) \
    API Status name() { return work("launches", product_stream) != cudaSuccess; }
#define NOTHING(name) \
    API Status name() { return 0; }
API Status cublasCreate_v2(void** made) { return *made = (void*)64, 0; }
API Status cublasSetStream_v2(void*, cudaStream_t stream) { return product_stream = stream, 0; }
API Status cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
API Status cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
NOTHING(cublasDestroy_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetSmCountTarget)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)

API size_t cublasLtGetVersion() { return 130000; }
API Status cublasLtCreate(void** made) { return *made = (void*)64, 0; }
API Status cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*,
                          const void*, void*, size_t, cudaStream_t stream) {
    return work("launches", stream) != cudaSuccess;
}
API Status cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* number) { return *number = 1, 0; }
API Status cublasLtMatmulDescCreate(void** made) { return *made = (void*)64, 0; }
API Status cublasLtMatrixLayoutCreate(void** made) { return *made = (void*)64, 0; }
API Status cublasLtMatmulPreferenceCreate(void** made) { return *made = (void*)64, 0; }
NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute)

// --- The driver ----------------------------------------------------------------------------------------------------------

static int nothing() { return 0; }

// torch looks at the driver when memory runs out.
RT cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    *found = driver ? dlsym(driver, symbol) : nullptr;
    if (!*found) *found = (void*)nothing;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
