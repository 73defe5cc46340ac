// Sums over the tensor ranks of one host. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// The sum over the tensor ranks of one host, through memory that each has mapped of the others
// (all_reduce.cu): out = residual + bias + second_bias + the sum of every rank's partial, and
// normed = norm(out), of rows of `columns` numbers. Rows are aligned to 16 bytes, and a multiple of
// 16 bytes long, up to 32 KiB. Every rank launches the same sequence of sums.
typedef struct {
  void* out;                // (tokens, columns), may be residual or partial; null: not stored
  void* normed;             // (tokens, columns), may be any of these; used if norm_weight is set
  const void* partial;      // (tokens, columns), this rank's
  const void* residual;     // (tokens, columns), or null
  const void* bias;         // (columns), or null
  const void* second_bias;  // (columns), or null
  const void* norm_weight;  // (columns), or null: no norm
  const void* norm_bias;    // (columns); null: RMSNorm
  int64_t out_stride, normed_stride, partial_stride, residual_stride;
  float norm_eps;
  int tokens, columns, dtype;
  // whether the previous kernel calls wait_for_predecessor() and writes only `partial`: all other
  // operands are then loaded before that kernel has ended
  int early;
  int rank, ranks;
  // two shots: row r is reduced by rank r % ranks alone, which sends it to the others; for more
  // than two ranks, if ceil(tokens / ranks) * 2 rows fit into a slot
  int two_shots;
  int64_t slot_bytes;  // bytes for the rows of one rank, a multiple of 16
  void* memory;        // this rank's memory, of tridecode_peer_bytes
  void* memory0;       // memory of each rank, as mapped in this process
  void* memory1;
  void* memory2;
  void* memory3;
  void* memory4;
  void* memory5;
  void* memory6;
  void* memory7;
  int64_t limit_ns;  // limit of the wait for the others
  // pinned host memory, initially 0: set to 1 + the rank that did not arrive in time
  int* lost;
  // of tridecode_add_copied: the other rank's rows, contiguous, and two words that become `arrival`
  // once the first first_part rows, and the others, are complete; all in this rank's memory
  const void* copied;
  const void* arrived;
  int arrival, first_part;
  int sent;  // of two ranks: the GEMM that computed partial has sent it (sent_gemm.h)
} tridecode_all_reduce_task;
int tridecode_all_reduce(const tridecode_all_reduce_task* task, void* stream);

// The same sum of two ranks whose rows copy engines exchange (add_copied.cu): each rank copies its
// rows into the memory of the other with tridecode_copy_rows, then a word. to, word_to: in the
// other's memory. word: in device memory.
int tridecode_copy_rows(void* to, const void* rows, int64_t bytes, void* word_to, const void* word,
                        void* stream);
int tridecode_add_copied(const tridecode_all_reduce_task* task, void* stream);

// Memory of a rank that others write to. These four functions allocate and synchronise. address:
// receives the pointer; handle: 64 bytes, for tridecode_peer_open in another process of this host;
// both in host memory. sum_bytes: tridecode_peer_bytes; the bytes after these are zeroed.
int64_t tridecode_peer_bytes(int ranks, int64_t slot_bytes);
int tridecode_peer_allocate(int64_t sum_bytes, int64_t bytes, int dtype, void* address,
                            void* handle);
int tridecode_peer_open(const void* handle, void* address);
int tridecode_peer_close(void* opened);
int tridecode_peer_free(void* allocated);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
