// GEMMs that send their part of a sum over two tensor ranks: the epilogue stores each tile a second
// time, with TMA, to the other rank's memory over NVLink. The sum's kernel (all_reduce.cu) then
// only waits: empty memory holds the bits of -0.0, and the epilogue stores 0.0 instead.
//
// Each sum leaves the number of the next one's buffer in State::next. The GEMM reads it after the
// wait for its predecessor, when all earlier sums have ended. Two buffers suffice, as in
// all_reduce.cu: this rank has received the other rank's part of the sum in between, and that rank
// sent it after its own reads of this buffer.
//
// In a file that includes this header every GEMM is a SentTask without a residual: a residual could
// make a -0.0 of a sum of two numbers.
#pragma once
#include "api/sent_gemm.h"
#include "gemm/adapted/adapted_task.cuh"
#include "gemm/sm90/gemm_sm90_mainloop.cuh"
#include "ranks/peer_rows.cuh"

namespace tridecode {
namespace {

struct SentTask : GemmTask {
  CUtensorMap sent;          // (buffers, tokens, outputs) in the other rank's memory
  const peers::State* sums;  // of this rank
};

template <>
constexpr bool kAdapted<SentTask> = false;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Replaces the epilogue of plain GEMMs, which is that of ROUNDS = false: only heads are rounded.
template <typename X, int N, bool SCALED>
struct Finish<X, N, kPlain, SCALED, true> : Finish<X, N, kPlain, SCALED, false> {
  using Plain = Finish<X, N, kPlain, SCALED, false>;
  unsigned int sent_buffer;

  // Called after the wait for the predecessor, before the mainloop.
  __device__ __forceinline__ void load_slots(int, int) {
    sent_buffer = static_cast<const volatile unsigned int&>(sent_task().sums->next);
  }

  __device__ __forceinline__ void store_all(float (&c)[N / 2], int column, int token) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) c[i] = to_float(from_float<X>(c[i])) == 0.0f ? 0.0f : c[i];
#pragma unroll
    for (int i = 0; i < Plain::kParts; ++i) {
      const char* const from = this->buffer(this->used);
      this->store_part(c, column, token, i);
      if (threadIdx.x % 128 == 0) {
        send_box(from, column, token + i * Plain::S::kPart);
        commit_stores();
      }
    }
  }

  __device__ __forceinline__ const SentTask& sent_task() const {
    return static_cast<const SentTask&>(this->task);
  }
  __device__ __forceinline__ void send_box(const char* from, int column, int token) const {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
            reinterpret_cast<uint64_t>(&sent_task().sent)),
        "r"(column), "r"(token), "r"(sent_buffer), "r"(shared_address(from))
        : "memory");
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Makes the task, all but its map.
int make_sent(SentTask& task, const char* what, const tridecode_sent_gemm_task& given) {
  static_cast<GemmTask&>(task) = *static_cast<const GemmTask*>(given.gemm);
  task.sums = static_cast<const peers::State*>(given.memory);
  if (task.residual || task.out_float32 || task.activation != kNone || task.cache)
    return fail("%s: sends the plain sums of a GEMM alone", what);
  if (task.outputs % 8 || given.slot_bytes % 16 ||
      int64_t(task.tokens) * task.outputs * 2 > given.slot_bytes)
    return fail("%s: %d rows of %d columns in buffers of %lld bytes", what, task.tokens,
                task.outputs, (long long)given.slot_bytes);
  return 0;
}

// Encodes the map, for stores of `part` tokens: Shape::kPart of the tokens that a block finishes.
int encode_sent(SentTask& task, const tridecode_sent_gemm_task& given, int part) {
  const cuuint64_t sizes[] = {cuuint64_t(task.outputs), cuuint64_t(task.tokens), 2},
                   strides[] = {cuuint64_t(task.outputs) * 2, cuuint64_t(given.slot_bytes)};
  const cuuint32_t box[] = {64, cuuint32_t(part), 1};
  const char* const rows = static_cast<const char*>(given.peer_memory) + kPeerHeader;
  return encode_map(&task.sent, rows, 3, sizes, strides, box, task.dtype);
}

}  // namespace
}  // namespace tridecode
