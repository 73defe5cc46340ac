// GEMMs by cuBLASLt, with dense weights and with weights that are dequantised first. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// The epilogue of a cuBLAS product: out = activation(product + bias) + residual. activation: 0
// none, 1 tanh GELU, 2 erf GELU, 3 ReLU, 4 SwiGLU (product and bias have 2 * columns columns).
// product_format: 0: dtype; 1: float32; 2: int32. scales, row_scales: factors of its columns and of
// its tokens, applied first; null: neither.
int tridecode_gemm_library_epilogue(void* out, const void* product, const void* bias,
                                    const void* residual, const float* scales,
                                    const float* row_scales, int num_tokens, int columns,
                                    int64_t out_stride, int64_t product_stride,
                                    int64_t residual_stride, int activation, int product_format,
                                    int out_float32, int dtype, void* stream);

// out = activation(x * weight^T + bias) + residual by cuBLASLt, summed in float32. An activation
// with a residual is refused by cuBLASLt.
typedef struct {
  void* out;             // (tokens, outputs), of dtype or float32; may be the residual
  const void* x;         // (tokens, inputs)
  const void* weight;    // (outputs, inputs)
  const void* bias;      // (outputs) of dtype, or null
  const void* residual;  // like out, or null
  int64_t x_stride, weight_stride, residual_stride, out_stride;
  int tokens, inputs, outputs;
  int activation;  // 0 none, 1 tanh GELU, 3 ReLU
  int out_float32, dtype;
  // kOperandDense, kOperandFp8 with the scales below, or kOperandFp8Blocks with scales (inputs /
  // 128, tokens) and (ceil(outputs / 128), inputs / 128), inputs a multiple of 512
  int operand;
  const float* x_scales;       // (tokens)
  const float* weight_scales;  // (outputs)
  void* workspace;
  int64_t workspace_bytes;
  // host memory. algorithms: receives up to `most` descriptions of 96 bytes, the best by cuBLASLt's
  // estimate first, and their number in `count`; 0: no algorithm. gemm: the first 64 bytes of one.
  void* found;
  int* count;
  int most;
  int alignment;  // in bytes, for out, x, weight, bias and residual
} tridecode_library_task;

// addresses: of cuBLASLt's functions, in the order of csrc/cublas_lt.h; host memory. Creates the
// handle, which belongs to the process's current device.
int tridecode_library_bind(const void* addresses);
int tridecode_library_algorithms(const tridecode_library_task* task, void* stream);
int tridecode_gemm_library(const tridecode_library_task* task, void* stream);

// tridecode_gemm_library with a weight in 8 or 4 bit. One call dequantises `piece` outputs at a
// time to 16 bit in scratch memory and multiplies them.
typedef struct {
  // as tridecode_library_task's, of all outputs
  void* out;
  const void* x;
  const void* bias;
  const void* residual;
  int64_t x_stride, residual_stride, out_stride;
  int tokens, inputs, outputs;
  int activation, out_float32, dtype;
  void* workspace;
  int64_t workspace_bytes;
  // the weight, as tridecode_gemm_task's; weight_format 0: int8 in rows with a scale for each
  const void* packed;
  int weight_format;
  const float* weight_scales;
  const uint32_t* weight_groups;
  int granule_groups;
  void* weight;      // scratch memory of (piece, inputs)
  int piece;         // a multiple of 8, or all outputs
  void* found;       // host memory: the algorithm for `piece` outputs,
  void* last_found;  // and for the last piece, if that has fewer
  // host memory: outputs whose GEMMs are launched. A call continues from there: a GEMM whose
  // residual is out must not be launched twice
  int* done;
} tridecode_expanded_task;
int tridecode_gemm_expanded(const tridecode_expanded_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
