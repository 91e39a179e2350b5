// libcuda.so.1 without a driver: enough for torch and for the kernels that Triton compiles, which do nothing and are counted.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

// What runtime.cpp, which is in front of this, knows already.
#define OF_THE_RUNTIME(name) ((int (*)())dlsym(RTLD_DEFAULT, name))

int cuInit(unsigned flags) { return 100; }  // no device: what runtime.cpp lacks fails in the real runtime, and is seen
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)64, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)64, 0; }
int cuDeviceGet(int *device, int number) { return *device = number, 0; }
int cuCtxGetDevice(int *device) { return OF_THE_RUNTIME("cudaGetDevice")(device); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {  // both count the attributes alike
    return OF_THE_RUNTIME("cudaDeviceGetAttribute")(value, attribute, device);
}
int cuModuleLoadData(void **module, const void *data) { return *module = (void *)64, 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = (void *)64, 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    return *value = attribute == 0 ? 1024 : 0, 0;  // the first: threads of a block
}
int cuPointerGetAttribute(size_t *value, int attribute, size_t place) {  // Triton asks for the place on the device
    return *value = place, 0;
}
int cuStreamIsCapturing(void *stream, int *status) {
    return OF_THE_RUNTIME("cudaStreamIsCapturing")(stream, status);
}
struct how {
    unsigned grid[3], block[3], shared;
    void *stream;
};
int cuLaunchKernelEx(const struct how *how, void *function, void **arguments, void **more) {
    return OF_THE_RUNTIME("rehearsal_launch")(how->stream);
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned of_x, unsigned of_y, unsigned of_z, unsigned shared,
                   void *stream, void **arguments, void **more) {
    return OF_THE_RUNTIME("rehearsal_launch")(stream);
}
#define NOTHING(name) \
    int name(void) { return 0; }
NOTHING(cuCtxGetLimit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxSetLimit)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuGetErrorString)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete)
NOTHING(cuLinkCreate_v2)
NOTHING(cuModuleLoad)
NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload)
NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOTHING(cuOccupancyMaxActiveClusters)
NOTHING(cuTensorMapEncodeIm2col)
NOTHING(cuTensorMapEncodeTiled)

// libnvidia-ml.so.1 is the same file.
#include <stdlib.h>
#include <string.h>

NOTHING(nvmlInit_v2)
int nvmlSystemGetDriverVersion(char *version, unsigned size) { return strncpy(version, "580.0", size), 0; }
int nvmlDeviceGetCount_v2(unsigned *number) {
    const char *text = getenv("REHEARSAL_GPUS");
    return *number = text ? atoi(text) : 1, 0;
}

// What torch asks when memory runs out.
NOTHING(nvmlDeviceGetHandleByPciBusId_v2)
NOTHING(nvmlDeviceGetNvLinkRemoteDeviceType)
NOTHING(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOTHING(nvmlSystemGetCudaDriverVersion_v2)
NOTHING(nvmlDeviceGetMemoryInfo)
NOTHING(nvmlDeviceGetGpuFabricInfoV)
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *number, void *found) { return *number = 0, 0; }
