// The C ABI of the kernels, declared once: library.py reads this file, makes a ctypes structure of
// every task and binds every function.
//
// Pointers are device addresses, strides count elements, `stream` is a cudaStream_t. Every function
// returns 0, or a status whose text tridecode_error() gives (per thread). None of them allocates or
// synchronises, so that each may be captured in a CUDA graph. Shapes and meanings are those of
// kernels/ops.py; cuda.py has checked them.
#pragma once
#include <stdint.h>

#include "sampling_state.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// Raised whenever a prototype or the meaning of an argument changes.
#define TRIDECODE_ABI_VERSION 15

int tridecode_abi_version(void);
const char* tridecode_build_info(void);
const char* tridecode_error(void);

// Make `device` current for the calling thread. Programmatic dependent launch is used where
// `dependent_launch` is set and the device has it (compute capability 9.0). `properties` receives
// multiprocessors, compute capability * 10, the shared memory of a block in bytes, and whether MPS
// shares the device among processes: int32[4], host memory.
int tridecode_initialize(int device, int dependent_launch, int* properties);

// dtype: 0 float32, 1 float16, 2 bfloat16, everywhere.

int tridecode_resolve_tokens(int* token_ids, const int* slots, const int* last_tokens, int count,
                             void* stream);

// scales: null: table is of dtype; else it is int8, and a scale for each row of it. first_id,
// num_ids: of the rows of the table; a token that is none of these ids gets a row of zeros.
int tridecode_embed(void* out, const int* token_ids, const void* table, const float* scales,
                    const int* positions, const void* position_table, int num_tokens, int columns,
                    int first_id, int num_ids, int dtype, void* stream);

int tridecode_norm(void* out, const void* x, const void* weight, const void* bias, float eps,
                   int num_tokens, int columns, int64_t x_stride, int64_t out_stride, int dtype,
                   void* stream);

// out[t, c] = x[t, order[c]], of rows of `columns` 16-bit numbers; rows of out are contiguous.
int tridecode_gather_columns(void* out, const void* x, const int* order, int num_tokens,
                             int columns, int64_t x_stride, void* stream);

int tridecode_gather_rows(void* out, const void* x, const int* rows, int num_rows,
                          int64_t row_bytes, int64_t x_stride_bytes, int64_t out_stride_bytes,
                          void* stream);

// The epilogue of a cuBLAS product: out = activation(product + bias) + residual. activation: 0
// none, 1 tanh GELU, 2 erf GELU, 3 ReLU, 4 SwiGLU (product and bias have 2 * columns columns).
// product_format: 0: dtype; 1: float32; 2: int32. scales, row_scales: of its columns and tokens,
// which it is multiplied by first; null: neither.
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
  // 0: x and weight are of dtype; 2: E4M3, with the scales below; 5: E4M3 in blocks, with scales
  // (inputs / 128, tokens) and (ceil(outputs / 128), inputs / 128), inputs a multiple of 512
  int operand;
  const float* x_scales;       // (tokens)
  const float* weight_scales;  // (outputs)
  void* workspace;
  int64_t workspace_bytes;
  // host memory. algorithms: receives `count` of at most `most` descriptions of 96 bytes, the best
  // by cuBLASLt's estimate first; none: there is no algorithm. gemm: the first 64 bytes of one.
  void* found;
  int* count;
  int most;
  int alignment;  // bytes: of out, x, weight, bias and residual
} tridecode_library_task;

// addresses: of cuBLASLt's functions, in the order of csrc/cublas_lt.h; host memory. Makes the
// handle, which belongs to the process's current device.
int tridecode_library_bind(const void* addresses);
int tridecode_library_algorithms(const tridecode_library_task* task, void* stream);
int tridecode_gemm_library(const tridecode_library_task* task, void* stream);

// out = epilogue(norm(x) * weight^T). Rows are contiguous; a stride is the distance of two rows.
//
// activation 0 to 3: out = activation(product + bias) + residual. 4, SwiGLU: weight and bias hold
// the gate rows, then the up rows, and out has outputs / 2 columns. With a cache: the outputs are
// the heads of query, key and value; query and key are rotated unless rotary_size is 0, and key and
// value are also written to the cache.
//
// kernels/gemm_table.py chooses the function, the tile and the split. A function refuses a task for
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
  // a weight in 8 or 4 bit, arranged by kernels/packed_weight.py; weight_stride is not read
  int weight_format;           // 1 int8, 2 fp8 (E4M3), 3 int4; 0: of dtype, in rows
  const float* weight_scales;  // (outputs), int8 and fp8; also of 8-bit operands, below
  const uint32_t*
      weight_groups;   // (rows / 8, chunks, 8, groups of a granule), int4: scale and zero
  int granule_groups;  // 1, 2 or 4
  // query, key and value
  const float* cos;  // (positions, rotary_size / 2)
  const float* sin;
  const int* positions;
  const int* kv_slots;  // -1: this token is not written
  void* cache;          // null: no heads
  // 0: a cache of dtype; 1: int8, 2: e4m3, with scales (blocks, 2, kv_heads, block_tokens): for
  // rotate_and_cache and, with heads of 64 or 128 and tile_tokens up to 64, gemm_sm90_split_k,
  // gemm_sm90_stream_k, both with 8-bit operands, too, and gemm_packed_sm90. Key and value of out
  // then become what a reader of the cache gets
  int cache_format;
  float* cache_scales;
  int heads, kv_heads, head_size, rotary_size, interleaved;
  int block_tokens;  // of a cache block
  // tile
  int tile_outputs, tile_tokens;
  int split;     // parts that the inputs are split into
  int clusters;  // that are launched
  int stream_k;  // the clusters share tiles
  // scratch memory: partial sums, and counters that are zero before and after each launch
  void* partials;
  int64_t partial_bytes;
  unsigned int* counters;
  int num_counters;
  // 8-bit operands: x and weight hold int8 or E4M3 values, and strides count these
  int operand;  // 0: x and weight are of dtype; 1: int8; 2: E4M3; 3: int8, x in two parts
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

// Up to tile_tokens 16, 32 or 64, by mma.sync and cp.async, no norm; inputs a multiple of 8, x,
// weight and their strides at multiples of 16 bytes. split: at most the 64s of inputs.
int tridecode_gemm_mma_tiles(const tridecode_gemm_task* task, void* stream);
// The same of operands in 8 bit, int8 from compute capability 8.0 on and E4M3 from 8.9 on, without
// cache; inputs a multiple of 16, split at most the 128s of inputs.
int tridecode_gemm_mma_tiles_8bit(const tridecode_gemm_task* task, void* stream);

// Compute capability 9.0, no norm. 1 to 16 tokens (tile_tokens 8 or 16), tile_outputs 32 or 64,
// without rotation.
int tridecode_gemm_sm90_data_parallel(const tridecode_gemm_task* task, void* stream);

// Compute capability 9.0, no norm; x, weight, residual and a 16-bit out at multiples of 16 bytes,
// and their strides. Rotation: by halves of a whole head of 64, 128 or 256; else head_size is a
// multiple of 8. A residual needs a 16-bit out and no heads.
//
// split_k: up to tile_tokens 16, 32 or 64; the inputs are split among a cluster of 1 to 3 blocks.
// No SwiGLU. clusters(split): how many of its clusters the device holds at once.
int tridecode_gemm_sm90_split_k(const tridecode_gemm_task* task, void* stream);
int64_t tridecode_gemm_sm90_clusters(int split);

// stream_k: any number of tokens; tile_tokens 16, 32 or 64, or for SwiGLU, of a multiple of 16
// rows and without a residual, 32 to 256.
int tridecode_gemm_sm90_stream_k(const tridecode_gemm_task* task, void* stream);

// even_split: the same, where split, 4, times the number of tiles is that of clusters, all of which
// the device holds at once. tile_tokens 128 or 256. No SwiGLU, no heads.
int tridecode_gemm_sm90_even_split(const tridecode_gemm_task* task, void* stream);

// The same product with a weight in 8 or 4 bit. packed_mma: 1 to 8 tokens, tile_outputs 16; norm,
// split and alignment as gemm_mma, rotation by halves. packed_sm90: as gemm_sm90_stream_k,
// tile_tokens 16 (no SwiGLU), 32, 64 or 128.
int tridecode_gemm_packed_mma(const tridecode_gemm_task* task, void* stream);
int tridecode_gemm_packed_sm90(const tridecode_gemm_task* task, void* stream);

// The same for int4 with one group of a granule and zeros that are whole numbers, with x in two
// int8 parts as quantize_rows writes it with operand 4: x_scales is read. Multiples of 32
// inputs, of 8 outputs; residual and out as gemm_sm90_split_k's. tile_tokens 8, 16 or 32, any
// number of tokens; split: 1, 2, 4 or 8 blocks of a cluster.
int tridecode_gemm_int4_sm90(const tridecode_gemm_task* task, void* stream);

// The same as stream-K, for more tokens: tile_tokens 32 or 64.
int tridecode_gemm_int4_stream_k_sm90(const tridecode_gemm_task* task, void* stream);

// out (outputs, inputs), in rows of out_stride numbers of dtype, = the weight. Of the task: out,
// out_stride, inputs, outputs, dtype and what describes the weight.
int tridecode_expand_weight(const tridecode_gemm_task* task, void* stream);

// out (outputs, inputs), of a 16-bit dtype, = values * scales of the rows. inputs: a multiple
// of 16.
int tridecode_expand_rows(void* out, const void* values, const float* scales, int outputs,
                          int inputs, int dtype, void* stream);

// tridecode_gemm_library with a weight in 8 or 4 bit. `piece` outputs of it at a time are expanded
// to 16 bit in scratch memory and multiplied, by one call in all.
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
  void* last_found;  // and for the last piece, where that has fewer
  // host memory: outputs whose products are launched. A call goes on from there: a product whose
  // residual is out must not be launched twice
  int* done;
} tridecode_expanded_task;
int tridecode_gemm_expanded(const tridecode_expanded_task* task, void* stream);

// The same with 8-bit operands: out = epilogue(weight_scales * x_scales * (x * weight^T)). inputs,
// x_stride and weight_stride are multiples of 16. tile_tokens of stream_k: 16 to 256, of SwiGLU 32
// to 256.
int tridecode_gemm_sm90_split_k_8bit(const tridecode_gemm_task* task, void* stream);
int tridecode_gemm_sm90_stream_k_8bit(const tridecode_gemm_task* task, void* stream);
int tridecode_gemm_sm90_even_split_8bit(const tridecode_gemm_task* task, void* stream);

// The same with operand 3: a weight in int8 and x in two parts. tile_tokens of stream_k: 16, 32, 64
// or 128, of SwiGLU 32, 64, 96 or 128.
int tridecode_gemm_sm90_split_k_two_parts(const tridecode_gemm_task* task, void* stream);
int tridecode_gemm_sm90_stream_k_two_parts(const tridecode_gemm_task* task, void* stream);

// values[t, :] = x[t, :] / scales[t], rounded to the nearest int8 (operand 1) or E4M3 (2), halves
// to even; scales[t] = max|x[t, :]| / 127 or / 448, 1 for a row of zeros. A row with NaN or
// infinity has values 0 and a scale that is not finite. With norm_weight, x is norm(x), rounded to
// dtype, first. Rows of values are contiguous. 16-bit dtypes, compute capability 9.0.
//
// operand 3, int8 in two parts: x[t, :] = scales[t] * (high + low / 254), scales as int8's, high
// the nearest integers, low those of what they leave. Row 16 b + i of values is the high part of
// token 8 b + i, row 16 b + 8 + i its low part; of tokens beyond the last, up to a multiple of 8,
// both are zeros. operand 4: the same with the inputs in the order of a granule of 4-bit weights
// (packed_weight.cuh): of each 32, input 16 i + 8 h + 2 t + j is at 16 h + 4 t + 2 j + i. Columns
// are a multiple of 32.
// With order (columns), x[t, c] above is x[t, order[c]], and a norm's weight and bias likewise.
//
// operand 5, E4M3 in groups: each 128 columns of a row have a scale of their own; scales is
// (ceil(columns / 128), num_tokens).
int tridecode_quantize_rows(void* values, float* scales, const void* x, const int* order,
                            const void* norm_weight, const void* norm_bias, float eps,
                            int num_tokens, int columns, int64_t x_stride, int operand, int dtype,
                            void* stream);

// Rotates the query and key heads of out in place and writes key and value to the cache, after a
// product that did neither: of the task all fields from `cos` to `block_tokens`, out, out_stride,
// tokens and dtype. With an 8-bit cache key and value of out become what a reader of the cache
// gets, and head_size is at most 256.
int tridecode_rotate_and_cache(const tridecode_gemm_task* task, void* stream);

typedef struct {
  void* out;                // (tokens, heads * head_size)
  const void* qkv;          // (tokens, (heads + 2 * kv_heads) * head_size)
  void* cache;              // (blocks, 2, kv_heads, block_tokens, head_size)
  const int* block_tables;  // (num_rows, columns)
  const int* context_lens;  // (num_rows), in tokens of the cache
  const float* slopes;      // (heads), or null: no ALiBi
  int64_t qkv_stride, out_stride, table_stride;
  float scale;
  int num_rows, heads, kv_heads, head_size, block_tokens, dtype;
  // decode: 0: a cache of dtype; 1: int8, 2: e4m3, with scales (blocks, 2, kv_heads, block_tokens)
  int cache_format;
  float* cache_scales;
  // prefill: rows first_row .. num_rows - 1; qkv and out begin with the first token of origin_row
  const int* query_starts;  // (num_rows + 1)
  int first_row, origin_row;
  int max_query;  // the largest number of queries of a row
  int tokens;
  int shared_bytes;  // of a block, at most; 0: what the device has, and its own kernel on sm_90
  // decode: scratch memory of tridecode_decode_attention_scratch(head_size) bytes, for any batch;
  // counters that are zero before and after each launch, one per row and group of 8 query heads
  void* scratch;
  unsigned int* counters;
  int num_counters;
  // decode: whether qkv is what a product left that neither rotated nor wrote to the cache. Then
  // keys and values are written first, as tridecode_rotate_and_cache does; qkv may stay as it is,
  // or not. The other fields are those of tridecode_gemm_task
  int unfinished;
  int rotary_size, interleaved;
  const float* cos;
  const float* sin;
  const int* positions;
  const int* kv_slots;
} tridecode_attention_task;

int64_t tridecode_decode_attention_scratch(int head_size);
int tridecode_decode_attention(const tridecode_attention_task* task, void* stream);
int tridecode_prefill_attention(const tridecode_attention_task* task, void* stream);
// Queries of a block where it may have shared_bytes of shared memory and there is no kernel for the
// device alone; 1: those of the kernel for any head size, which is not tuned.
int64_t tridecode_prefill_attention_queries(int head_size, int shared_bytes);

// Expands blocks of an 8-bit cache for prefill_attention: out = stored * scale, for every row that
// has tokens from before this step. Column c of such a row goes to block row * columns + c of out.
typedef struct {
  void* out;                  // (num_rows * columns, 2, kv_heads, block_tokens, head_size)
  const void* cache;          // (blocks, 2, kv_heads, block_tokens, head_size)
  const float* cache_scales;  // (blocks, 2, kv_heads, block_tokens)
  const int* block_tables;    // (num_rows, at least columns); of the first row
  const int* context_lens;    // (num_rows), at most columns * block_tokens
  const int* query_starts;    // (num_rows + 1)
  int64_t table_stride;
  int num_rows, columns, kv_heads, head_size, block_tokens, dtype, cache_format;
} tridecode_expand_task;
int tridecode_expand_cache(const tridecode_expand_task* task, void* stream);

// Products of 1 to 4 tokens in one launch on compute capability 9.0, each of the result of the one
// before it (x is its out), the first of what the kernel before this one has written: see
// product_chain_sm90a.cu. Rows of x, out and residual are contiguous; inputs are a multiple of 128,
// outputs of 16, of SwiGLU 32. The fields of a step are those of tridecode_gemm_task.
typedef struct {
  void* out;
  const void* x;
  const void* weight;
  const void* bias;
  const void* residual;
  const void* norm_weight;
  const void* norm_bias;
  const float* weight_scales;
  const uint32_t* weight_groups;
  float norm_eps;
  int inputs, outputs, activation;
} tridecode_chain_step;
typedef struct {
  const void* steps;  // host memory: num_steps of tridecode_chain_step, 1 to 4
  int num_steps, tokens, dtype;
  // 1, 2, 3: as tridecode_gemm_task's; 4: int4 in groups of 128, x in two parts; 6: weights in
  // `dtype`, x as it is
  int operand;
  // for results that later products read: 256 bytes and 4 for each result but those of the last
  // product; zeros before the first launch, of this function alone
  void* exchange;
  int64_t exchange_bytes;
} tridecode_chain_task;
int tridecode_product_chain_sm90a(const tridecode_chain_task* task, void* stream);
// Whether so many inputs and tokens leave room for weights in a block's shared memory.
int64_t tridecode_product_chain_stages(int inputs, int tokens, int operand);

// All pre-LayerNorm layers of a decoder for 1 to 4 tokens, each of a row of its own, on compute
// capability 9.0: see decoder_layers_sm90a.cu. 16-bit dtypes, head_size 64 or 128, hidden, heads *
// head_size and inner multiples of 64; the tokens' inputs of a product take at most 64 KiB.
typedef struct {
  const void* layers;  // what tridecode_decoder_table has written, in device memory
  void* x;             // (tokens, hidden), the residual stream, changed in place
  void* queries;       // scratch of (tokens, heads * head_size)
  void* context;       // scratch of (tokens, heads * head_size)
  void* mlp;           // scratch of (tokens, inner)
  const int* kv_slots;
  const int* block_tables;
  const int* context_lens;
  const float* slopes;  // (heads), or null
  int64_t table_stride;
  float scale, norm_eps;
  int num_layers, tokens, hidden, heads, head_size, inner;
  int activation, block_tokens, dtype;
  // scratch memory: parts of contexts, and counters that are zero before and after each launch
  void* partials;
  int64_t partial_bytes;
  unsigned int* counters;
  int num_counters;
} tridecode_decoder_task;
int tridecode_decoder_layers(const tridecode_decoder_task* task, void* stream);

// Writes the table of layers to host memory. tensors: per layer 13 pointers, see Tensors in
// decoder_layers_sm90a.cu. queries: heads * head_size.
int64_t tridecode_decoder_table_bytes(int num_layers);
int tridecode_decoder_table(void* table, const void* tensors, int num_layers, int hidden,
                            int queries, int inner, int dtype);

// The sum over the tensor ranks of one host, through memory that each has mapped of the others
// (all_reduce.cu): out = residual + bias + second_bias + the sum of every rank's partial, and
// normed = norm(out), of rows of `columns` numbers. Rows begin at and are multiples of 16
// bytes, up to 32 KiB. Every rank launches the same sequence of sums.
typedef struct {
  void* out;                // (tokens, columns), may be residual or partial; null: not stored
  void* normed;             // (tokens, columns), may be any of these; read where norm_weight is
  const void* partial;      // (tokens, columns), this rank's
  const void* residual;     // (tokens, columns), or null
  const void* bias;         // (columns), or null
  const void* second_bias;  // (columns), or null
  const void* norm_weight;  // (columns), or null: no norm
  const void* norm_bias;    // (columns); null: RMSNorm
  int64_t out_stride, normed_stride, partial_stride, residual_stride;
  float norm_eps;
  int tokens, columns, dtype;
  // whether the kernel before this one calls wait_for_predecessor() and writes but `partial`: what
  // else is read is loaded before that kernel has ended
  int early;
  int rank, ranks;
  // whether row r is added up by rank r % ranks alone, which sends it to the others: for more than
  // two ranks, and rows of which (tokens / ranks, rounded up) * 2 fit into a slot
  int two_shots;
  int64_t slot_bytes;  // of the rows of one rank, a multiple of 16
  void* memory;        // this rank's, of tridecode_peer_bytes
  void* memory0;       // of each rank, as this process sees it
  void* memory1;
  void* memory2;
  void* memory3;
  void* memory4;
  void* memory5;
  void* memory6;
  void* memory7;
  int64_t limit_ns;  // of the wait for the others
  int* lost;         // pinned host memory, 0: set to 1 + the rank that did not come in time
} tridecode_all_reduce_task;
int tridecode_all_reduce(const tridecode_all_reduce_task* task, void* stream);

// Memory of a rank that others write to. These four allocate and synchronise. address: receives the
// pointer; handle: 64 bytes, for tridecode_peer_open in another process of this host; both in host
// memory. sum_bytes: tridecode_peer_bytes; the bytes after these are zeros.
int64_t tridecode_peer_bytes(int ranks, int64_t slot_bytes);
int tridecode_peer_allocate(int64_t sum_bytes, int64_t bytes, int dtype, void* address,
                            void* handle);
int tridecode_peer_open(const void* handle, void* address);
int tridecode_peer_close(void* opened);
int tridecode_peer_free(void* allocated);

typedef struct {
  float* logits;                   // (num_rows, vocab_size), overwritten, at a multiple of 16 bytes
  const int* slots;                // (num_rows), -1: this row is skipped
  tridecode_sampling_slot* state;  // (slots)
  int* last_tokens;                // (slots)
  int* history;                    // (slots, history_size)
  int16_t* counts;                 // (slots, vocab_size)
  const int* bad_ids;              // (slots, bad_size)
  const int* bad_ends;             // (slots, bad_size)
  int* tokens;                     // (num_rows), written
  float* log_probs;                // (num_rows), written
  int num_rows, vocab_size, history_size, bad_size;
  int64_t logits_stride;
  void* scratch;           // tridecode_sample_scratch() bytes
  unsigned int* counters;  // (num_rows), zero before and after each launch
  // where the ranks share the vocabulary, else all 0: vocab_size is the number of this rank's ids,
  // which begin at first_id, a multiple of 4; the rows of logits have columns up to a multiple of 4
  int ranks, rank, first_id, whole_vocab_size, counts_stride;
  int exchange_rows;    // of tridecode_sample_exchange, at least num_rows
  int64_t exchange_at;  // in the memory of each rank
  void* memory;         // as in tridecode_all_reduce_task
  void* memory0;
  void* memory1;
  void* memory2;
  void* memory3;
  void* memory4;
  void* memory5;
  void* memory6;
  void* memory7;
  int64_t limit_ns;
  int* lost;
} tridecode_sample_task;

int64_t tridecode_sample_scratch(int max_rows, int vocab_size);
// Bytes of peer memory, zeros before the first launch, for rows whose vocabulary is shared.
int64_t tridecode_sample_exchange(int max_rows, int ranks);
int tridecode_sample(const tridecode_sample_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
