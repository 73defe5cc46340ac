// The chained GEMMs of a layer in one launch. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// GEMMs of 1 to 4 tokens in one launch on compute capability 9.0; each reads the result of an
// earlier one (x is its out) or the output of an earlier kernel: see product_chain_sm90a.cu. Rows
// of x, out and residual are contiguous; inputs are a multiple of 128, outputs a multiple of 16,
// with SwiGLU of 32. The fields of a step are those of tridecode_gemm_task, except:
//
// outer_weight, stream: if not null, stream += RMSNorm(x) * outer_weight, and the GEMM reads the
// stream instead of x. Two GEMMs of a launch have it, with the same stream and at least one GEMM
// between them, and the first has 16 outputs or more for each multiprocessor. Neither has a bias of
// its norms.
//
// over_ranks: out is this rank's part of a sum over two tensor ranks; it has no activation and no
// residual, and is not stored to memory. A later GEMM, whose x it is, has a stream: without
// outer_weight, stream += the sum, and its norm may have a bias. Two GEMMs of a launch have it,
// before the two with a stream. Both ranks launch the same sequence of such launches.
typedef struct {
  void* out;
  const void* x;
  const void* weight;
  const void* bias;
  const void* residual;
  const void* norm_weight;
  const void* norm_bias;
  const void* outer_weight;
  void* stream;
  const float* weight_scales;
  const uint32_t* weight_groups;
  float norm_eps, outer_eps;
  int inputs, outputs, activation, over_ranks;
} tridecode_chain_step;
typedef struct {
  const void* steps;  // host memory: num_steps of tridecode_chain_step, 1 to 4
  int num_steps, tokens, dtype;
  int operand;  // a tridecode_operand, except kOperandFp8Blocks; int4 in groups of 128 inputs
  // for results that later GEMMs read: 256 bytes, plus 4 for each result except those of the last
  // GEMM; zeros before the first launch; used by this function only
  void* exchange;
  int64_t exchange_bytes;
  // for sums over two ranks, else null: the other rank's exchange as mapped here, which also needs
  // room for 4 bytes for each result that is summed; this rank's memory of tridecode_peer_allocate,
  // in which its exchange is, after the sums' bytes; the limit of the wait for the other rank, and
  // pinned host memory as for tridecode_all_reduce
  void* peer_exchange;
  void* memory;
  int64_t limit_ns;
  int* lost;
  int peer;  // the other rank
} tridecode_chain_task;
int tridecode_product_chain_sm90a(const tridecode_chain_task* task, void* stream);
// Number of pipeline stages for weights that fit into a block's shared memory in addition to this
// many inputs and tokens, and rows of a stream of `stream_columns`; 0 if none.
int64_t tridecode_product_chain_stages(int inputs, int stream_columns, int tokens, int operand);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
