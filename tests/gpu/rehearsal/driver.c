// libcuda.so.1 without a driver: enough for torch to load it.
#include <stddef.h>

int cuInit(unsigned flags) { return 100; }  // no device: what runtime.cpp lacks fails in the real runtime, and is seen
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)64, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
#define NOTHING(name) \
    int name(void) { return 0; }
NOTHING(cuCtxSetCurrent)
NOTHING(cuDeviceGet)
NOTHING(cuDeviceGetAttribute)
NOTHING(cuDevicePrimaryCtxRetain)
NOTHING(cuFuncGetAttribute)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuGetErrorString)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuLaunchKernel)
NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete)
NOTHING(cuLinkCreate_v2)
NOTHING(cuModuleGetFunction)
NOTHING(cuModuleLoad)
NOTHING(cuModuleLoadData)
NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload)
NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOTHING(cuPointerGetAttribute)
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
