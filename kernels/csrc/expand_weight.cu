// A weight in 8 or 4 bit as a matrix of 16-bit numbers, for products over so many tokens that
// cuBLAS is faster: a warp expands a granule.
//
// Bytes moved: those of the packed weight and outputs * inputs * sizeof(X).
// Bench: python -m tridecode.kernels.bench packed_linear
#include "packed_weight.cuh"

namespace tridecode {
namespace {

constexpr int kWarps = 8;

// words[i] of lane t becomes words[t] of lane i, among 4 lanes.
__device__ __forceinline__ void transpose4x4(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = t & bit;
      const uint32_t sent = upper ? words[i] : words[i + bit];
      const uint32_t got = __shfl_xor_sync(kAll, sent, bit);
      (upper ? words[i] : words[i + bit]) = got;
    }
  }
}

template <typename X, WeightFormat F>
__global__ void __launch_bounds__(kWarps * 32)
    expand_weight(const __grid_constant__ GemmTask task, int chunks, int64_t granules) {
  constexpr int kInputs = granule_inputs(F), kSteps = kInputs / 16;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t granule = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (granule >= granules) {
    wait_for_predecessor();
    return;
  }
  const int row = int(granule / chunks) * kGranuleRows + g;
  const int first = int(granule % chunks) * kInputs;
  const uint4 words = load_stream(static_cast<const uint4*>(task.weight) + granule * 32 + lane);
  uint32_t groups[4] = {};
  float scale = 1.0f;
  if constexpr (F == kInt4) {
    for (int j = 0; j < 4; ++j)
      if (j < task.granule_groups)
        groups[j] =
            __ldg(task.weight_groups + (granule * kGranuleRows + g) * task.granule_groups + j);
  } else if (row < task.outputs) {
    scale = __ldg(task.weight_scales + row);
  }
  wait_for_predecessor();  // which may still read what is overwritten
  X* const out = static_cast<X*>(task.out) + row * task.out_stride + first;
  // Of 32 inputs, lane t has words of inputs 2 t, 2 t + 8, 2 t + 16 and 2 t + 24, and stores inputs
  // 8 t to 8 t + 7: the words of four lanes are transposed.
#pragma unroll
  for (int step = 0; step < kSteps; step += 2) {
    uint32_t own[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t group = groups[0];
      if constexpr (F == kInt4) {
        const int index = (step + i) * task.granule_groups / kSteps;
#pragma unroll
        for (int j = 1; j < 4; ++j) group = index == j ? groups[j] : group;
      }
      uint32_t pairs[2];
      expand_step<X, F>(words, step + i, group, pairs);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float2 both = unpack<X>(pairs[k]);
        own[2 * i + k] = F == kInt4 ? pairs[k] : tridecode::pack<X>(both.x * scale, both.y * scale);
      }
    }
    transpose4x4(own, t);
    const int input = step * 16 + 8 * t;
    if (row < task.outputs && first + input < task.inputs)
      *reinterpret_cast<uint4*>(out + input) = make_uint4(own[0], own[1], own[2], own[3]);
  }
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_expand_weight(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  if (task.inputs % 8 || task.out_stride % 8 || !aligned16(task.out))
    return fail("expand_weight: %d inputs in rows of %lld; wanted multiples of 8", task.inputs,
                (long long)task.out_stride);
  return for_weight_format(task.weight_format, "expand_weight", [&](auto format) {
    constexpr WeightFormat F = decltype(format)::value;
    const int chunks = ceil_div(task.inputs, granule_inputs(F));
    const int64_t granules = int64_t(ceil_div(task.outputs, kGranuleRows)) * chunks;
    return for_16_bit_dtype(task.dtype, "expand_weight", [&](auto zero) {
      return launch("expand_weight", expand_weight<decltype(zero), F>, ceil_div(granules, kWarps),
                    kWarps * 32, 0, stream, task, chunks, granules);
    });
  });
}
