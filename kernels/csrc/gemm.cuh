// What every GEMM kernel shares: the task and its epilogue.
#pragma once
#include "epilogue.cuh"

namespace tridecode {

using GemmTask = tridecode_gemm_task;

// The epilogue, a template parameter of the kernels. Those that read rotary_size at run time have
// one instance, kQkv, for both of the last two.
enum Mode { kPlain, kGated, kQkv, kQkvRotary };

inline Mode mode_of(const GemmTask& task) {
  if (task.cache) return task.rotary_size ? kQkvRotary : kQkv;
  return task.activation == kSwiglu ? kGated : kPlain;
}

}  // namespace tridecode
