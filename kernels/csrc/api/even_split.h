// GEMMs of 65 to 256 tokens: weights in 8 and 4 bit and x in 16 bit, and tiles that api/gemm.h does
// not list. Part of api.h.
#pragma once
#include "api/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// gemm_sm90_even_split and gemm_sm90_even_split_8bit also have tile_tokens 192, the latter 128 with
// split 2, and gemm_sm90_stream_k_two_parts has 96 with any epilogue.

// gemm_sm90_even_split_8bit with kOperandTwoParts: tile_tokens 128, split 2 or 4, or 96 and 2.
int tridecode_gemm_sm90_even_split_two_parts(const tridecode_gemm_task* task, void* stream);

// gemm_sm90_even_split for packed int4 with one group of a granule: tile_tokens 192 or 256,
// split 4.
int tridecode_gemm_packed_even_split_sm90(const tridecode_gemm_task* task, void* stream);

// gemm_packed_sm90 (api/packed.h) for the same weights: tile_tokens 192, without heads 160 to 256.
int tridecode_gemm_packed_wide_sm90(const tridecode_gemm_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
