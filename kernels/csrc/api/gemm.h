// GEMM kernels. Functions for packed 8- and 4-bit weights are in packed.h. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// out = epilogue(norm(x) * weight^T). Rows are contiguous; a stride is the distance between two
// rows.
//
// activation 0 to 3: out = activation(product + bias) + residual. 4, SwiGLU, and 5, a gated GELU
// (tanh): weight and bias hold the gate rows, then the up rows, and out has outputs / 2 columns.
// A task with a cache has the heads of query, key and value as outputs; query and key are rotated
// unless rotary_size is 0, and key and value are also written to the cache.
//
// kernels/gemm/table.py chooses the function, the tile and the split. A function refuses a task for
// which it has no instance.
typedef struct {
  void* out;                // (tokens, outputs), of dtype or float32
  const void* x;            // (tokens, inputs)
  const void* weight;       // (outputs, inputs)
  const void* bias;         // (outputs), or null
  const void* residual;     // like out, or null
  const void* norm_weight;  // (inputs), or null: x is not normalised
  const void* norm_bias;    // (inputs); null: RMSNorm
  int64_t x_stride, weight_stride, residual_stride, out_stride;
  float norm_eps;
  int tokens, inputs, outputs;
  int activation, out_float32, dtype;
  // a weight in 8 or 4 bit, arranged by kernels/formats/packed_weight.py; weight_stride is not read
  int weight_format;           // 1 int8, 2 fp8 (E4M3), 3 int4; 0: of dtype, in rows
  const float* weight_scales;  // (outputs), int8 and fp8; also of 8-bit operands, below
  const uint32_t*
      weight_groups;   // (rows / 8, chunks, 8, groups of a granule), int4: scale and zero
  int granule_groups;  // 1, 2 or 4
  // projection to query, key and value
  const float* cos;  // (positions, rotary_size / 2)
  const float* sin;
  const int* positions;
  const int* kv_slots;  // -1: this token is not written
  void* cache;          // null: no heads
  // 0: a cache of dtype; 1: int8, 2: e4m3, with scales (blocks, 2, kv_heads, block_tokens): for
  // rotate_and_cache and, with heads of 64 or 128 and tile_tokens up to 64, gemm_sm90_split_k,
  // gemm_sm90_stream_k, both with 8-bit operands, too, and gemm_packed_sm90. Key and value in out
  // are then replaced by their dequantised values
  int cache_format;
  float* cache_scales;
  int heads, kv_heads, head_size, rotary_size, interleaved;
  int block_tokens;  // of a cache block
  // tile
  int tile_outputs, tile_tokens;
  int split;     // number of parts that the inputs are split into
  int clusters;  // clusters launched
  int stream_k;  // the clusters share tiles
  // scratch memory: partial sums, and counters that are zero before and after each launch
  void* partials;
  int64_t partial_bytes;
  unsigned int* counters;
  int num_counters;
  // 8-bit operands: x and weight hold int8 or E4M3 values, and strides count these values
  int operand;  // a tridecode_operand; 0 for packed weights
  // (tokens); weight_scales is read, too. In blocks (stages, tokens), and up to tile_tokens numbers
  // behind them are read
  const float* x_scales;
  int symmetric;  // int4 with x in two parts: every zero is 8
  // of E4M3 in blocks of 128 x 128, in place of weight_scales: (ceil(outputs / 128), ceil(inputs /
  // 128)), each matrix of SwiGLU's pair a multiple of 128 outputs
  const float* block_scales;
} tridecode_gemm_task;

// 1 or 2 tokens; x fits in the shared memory of a block. No tile.
int tridecode_gemv(const tridecode_gemm_task* task, void* stream);

// 1 to 8 tokens, by mma.sync. split: split-K through partials; 1 with a norm.
int tridecode_gemm_mma(const tridecode_gemm_task* task, void* stream);

// Up to tile_tokens (16, 32 or 64) tokens, by mma.sync and cp.async, no norm; inputs a multiple of
// 8; x, weight and their strides aligned to 16 bytes. split: at most inputs / 64.
int tridecode_gemm_mma_tiles(const tridecode_gemm_task* task, void* stream);
// The same for 8-bit operands, int8 from compute capability 8.0 on and E4M3 from 8.9 on, without
// cache; inputs a multiple of 16, split at most inputs / 128.
int tridecode_gemm_mma_tiles_8bit(const tridecode_gemm_task* task, void* stream);

// Compute capability 9.0, no norm. 1 to 16 tokens (tile_tokens 8 or 16), tile_outputs 32 or 64,
// without rotation.
int tridecode_gemm_sm90_data_parallel(const tridecode_gemm_task* task, void* stream);

// Compute capability 9.0, no norm; x, weight, residual, a 16-bit out and their strides are aligned
// to 16 bytes. Rotation: by halves of a whole head of 64, 128 or 256; without it head_size is a
// multiple of 8. A residual needs a 16-bit out and no heads.
//
// split_k: up to tile_tokens (16, 32 or 64) tokens; the inputs are split among a cluster of 1 to 3
// blocks. No SwiGLU. clusters(split): number of its clusters that are resident at once.
int tridecode_gemm_sm90_split_k(const tridecode_gemm_task* task, void* stream);
int64_t tridecode_gemm_sm90_clusters(int split);

// stream_k: any number of tokens; tile_tokens 16, 32 or 64; for SwiGLU, with a multiple of 16 rows
// and without a residual, 32 to 256.
int tridecode_gemm_sm90_stream_k(const tridecode_gemm_task* task, void* stream);

// even_split: the same with clusters = split (4) * tiles, all resident at once. tile_tokens 128 or
// 256. No SwiGLU, no heads.
int tridecode_gemm_sm90_even_split(const tridecode_gemm_task* task, void* stream);

// The same with 8-bit operands: out = epilogue(weight_scales * x_scales * (x * weight^T)). inputs,
// x_stride and weight_stride are multiples of 16. tile_tokens of stream_k: 16 to 256, with SwiGLU
// 32 to 256.
int tridecode_gemm_sm90_split_k_8bit(const tridecode_gemm_task* task, void* stream);
int tridecode_gemm_sm90_stream_k_8bit(const tridecode_gemm_task* task, void* stream);
int tridecode_gemm_sm90_even_split_8bit(const tridecode_gemm_task* task, void* stream);

// The same with kOperandTwoParts. tile_tokens of stream_k: 16, 32, 64 or 128, with SwiGLU 32, 64,
// 96 or 128.
int tridecode_gemm_sm90_split_k_two_parts(const tridecode_gemm_task* task, void* stream);
int tridecode_gemm_sm90_stream_k_two_parts(const tridecode_gemm_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
