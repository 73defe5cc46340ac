// GEMM kernels for packed 8- and 4-bit weights, and their dequantisation. Part of api.h.
#pragma once
#include <stdint.h>

#include "api/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// The same product with a weight in 8 or 4 bit. packed_mma: 1 to 8 tokens, tile_outputs 16; norm,
// split and alignment as gemm_mma, rotation by halves. packed_sm90: as gemm_sm90_stream_k,
// tile_tokens 16 (no SwiGLU) to 128.
int tridecode_gemm_packed_mma(const tridecode_gemm_task* task, void* stream);
int tridecode_gemm_packed_sm90(const tridecode_gemm_task* task, void* stream);

// The same for int4 with one group of a granule and zeros that are whole numbers, with x in two
// int8 parts as quantize_rows writes it with kOperandTwoPartsInt4: x_scales is read. inputs are a
// multiple of 32, outputs of 8; residual and out as for gemm_sm90_split_k. tile_tokens 8, 16 or 32,
// any number of tokens; split: 1, 2, 4 or 8 blocks of a cluster.
int tridecode_gemm_int4_sm90(const tridecode_gemm_task* task, void* stream);

// The same as stream-K, for more tokens: tile_tokens 32 or 64.
int tridecode_gemm_int4_stream_k_sm90(const tridecode_gemm_task* task, void* stream);

// out (outputs, inputs) = the weight, in rows of out_stride numbers of dtype. Reads the task's out,
// out_stride, inputs, outputs, dtype and the fields that describe the weight.
int tridecode_expand_weight(const tridecode_gemm_task* task, void* stream);

// out (outputs, inputs) = values * scales of the rows, in a 16-bit dtype. inputs: a multiple of 16.
int tridecode_expand_rows(void* out, const void* values, const float* scales, int outputs,
                          int inputs, int dtype, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
