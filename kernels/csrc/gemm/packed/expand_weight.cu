// Dequantise an 8- or 4-bit weight to a 16-bit matrix, for GEMMs with enough tokens that cuBLAS is
// faster. One warp per granule.
//
// Bytes moved: those of the packed weight and outputs * inputs * sizeof(X).
// Bench: python -m tridecode.kernels.bench packed_linear
#include "api/gemm.h"
#include "api/packed.h"
#include "gemm/packed/packed_weight.cuh"

namespace tridecode {
namespace {

constexpr int kWarps = 8;

// Transposes among 4 lanes: words[i] of lane t becomes words[t] of lane i.
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
  wait_for_predecessor();  // which may still read the memory that is overwritten
  X* const out = static_cast<X*>(task.out) + row * task.out_stride + first;
  // Of 32 inputs, lane t holds words of inputs 2 t, 2 t + 8, 2 t + 16 and 2 t + 24, and stores
  // inputs 8 t to 8 t + 7: the words of four lanes are transposed.
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

// Dequantise int8 values whose rows have one scale each: 16 values per thread.
template <typename X>
__global__ void __launch_bounds__(256) expand_rows(X* out, const uint4* values, const float* scales,
                                                   int row_vectors, int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= vectors) {
    wait_for_predecessor();
    return;
  }
  const uint4 words = load_stream(values + i);
  const float scale = __ldg(scales + i / row_vectors);
  wait_for_predecessor();  // which may still read the memory that is overwritten
  uint32_t pairs[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t two = get(words, j / 2) >> (j % 2 * 16);
    pairs[j] = tridecode::pack<X>(float(int8_t(two)) * scale, float(int8_t(two >> 8)) * scale);
  }
  uint4* const to = reinterpret_cast<uint4*>(out) + 2 * i;
  to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
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

int tridecode_expand_rows(void* out, const void* values, const float* scales, int outputs,
                          int inputs, int dtype, void* stream) {
  if (inputs % 16 || !aligned16(out) || !aligned16(values))
    return fail("expand_rows: %d inputs; wanted a multiple of 16, at multiples of 16 bytes",
                inputs);
  return for_16_bit_dtype(dtype, "expand_rows", [&](auto zero) {
    using X = decltype(zero);
    const int64_t vectors = int64_t(outputs) * (inputs / 16);
    return launch("expand_rows", expand_rows<X>, ceil_div(vectors, 256), 256, 0, stream, (X*)out,
                  (const uint4*)values, scales, inputs / 16, vectors);
  });
}
