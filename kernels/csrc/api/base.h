// Version, errors and the device. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

int tridecode_abi_version(void);
const char* tridecode_build_info(void);
const char* tridecode_error(void);

// Make `device` current for the calling thread. Programmatic dependent launch is used if
// `dependent_launch` is set and the device supports it (compute capability 9.0). `properties`
// receives multiprocessors, compute capability * 10, the shared memory limit of a block in bytes,
// and whether MPS shares the device among processes: int32[4], host memory.
int tridecode_initialize(int device, int dependent_launch, int* properties);

// dtype: 0 float32, 1 float16, 2 bfloat16, everywhere.

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
