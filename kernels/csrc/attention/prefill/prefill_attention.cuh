// The files of prefill attention: prefill_attention.cu chooses.
#pragma once
#include "api/attention.h"
#include "common/common.cuh"

namespace tridecode {

using PrefillTask = tridecode_attention_task;

// Return whether prefill_attention_sm90a.cu has a kernel for the device and the shapes.
bool takes_prefill_sm90a(const PrefillTask& task);
int run_prefill_sm90a(const PrefillTask& task, void* stream);
int run_limited_prefill(const PrefillTask& task, void* stream);
// Few queries after a long prefix: prefill_split.cuh.
int run_split(const PrefillTask& task, void* stream);
int run_split_8bit(const PrefillTask& task, void* stream);
int run_split_limited(const PrefillTask& task, void* stream);
int run_split_limited_8bit(const PrefillTask& task, void* stream);

}  // namespace tridecode
