// Shared by every GEMM kernel: the task and its epilogue.
#pragma once
#include "api/gemm.h"
#include "common/epilogue.cuh"

namespace tridecode {

using GemmTask = tridecode_gemm_task;

// The epilogue, a template parameter of the kernels. Kernels that read rotary_size at run time use
// kQkv for both of the last two.
enum Mode { kPlain, kGated, kQkv, kQkvRotary };

inline Mode mode_of(const GemmTask& task) {
  if (task.cache) return task.rotary_size ? kQkvRotary : kQkv;
  return is_gated(task.activation) ? kGated : kPlain;
}

// Check the task of a kernel whose epilogue cannot quantise keys and values: refuse an 8-bit cache.
inline int check_exact_cache(const char* what, const GemmTask& task) {
  if (task.cache && task.cache_format)
    return fail("%s: writes a cache of dtype alone; cache format %d", what, task.cache_format);
  return 0;
}

}  // namespace tridecode
