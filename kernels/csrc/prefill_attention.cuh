// The task of prefill_attention.cu, part of which prefill_attention_sm90a.cu takes.
#pragma once
#include "common.cuh"

namespace tridecode {

using PrefillTask = tridecode_attention_task;

// Whether the device and the shapes suit prefill_attention_sm90a.cu.
bool takes_prefill_sm90a(const PrefillTask& task);
int run_prefill_sm90a(const PrefillTask& task, void* stream);

}  // namespace tridecode
