// What runtime.cpp offers to nccl.cpp.
#include <cuda_runtime_api.h>

void count(const char* what, long number = 1);
cudaError_t allocate_on_device(void** place, size_t size);
cudaError_t release_on_device(void* place);
