// The kernels of gemm_sm90_split_k.cuh that send their part of a sum over two tensor ranks.
#pragma once
#include "gemm/sent/sent_task.cuh"
#include "gemm/sm90/gemm_sm90_split_k.cuh"

namespace tridecode {
namespace {

// (tokens of a tile, epilogue, split). table_sm90.py chooses among them.
#undef TRIDECODE_INSTANCES
// clang-format off
#define TRIDECODE_INSTANCES(_)      \
  _(16, kPlain, 2) _(16, kPlain, 3) \
  _(32, kPlain, 2) _(32, kPlain, 3) \
  _(64, kPlain, 2) _(64, kPlain, 3)
// clang-format on

// Runs the instance that the task names, with operands of a type.
template <typename X, typename Operand>
int send_instance(const char* what, SentTask& task, const tridecode_sent_gemm_task& given,
                  Mode mode, void* stream) {
#define TRIDECODE_SEND(tokens_, mode_, split_)                                              \
  if (task.tile_tokens == tokens_ && mode == mode_ && task.split == split_) {               \
    if (int status = encode_sent(task, given, SplitShape<tokens_, split_>::Results::kPart)) \
      return status;                                                                        \
    return run<X, Operand, tokens_, mode_, split_>(task, stream);                           \
  }
  TRIDECODE_INSTANCES(TRIDECODE_SEND)
  return fail("%s: sends no tile of %d tokens, split %d", what, task.tile_tokens, task.split);
}

}  // namespace
}  // namespace tridecode
