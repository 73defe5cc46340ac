// gemm_sm90_split_k.cu for a part of a sum over two tensor ranks (sent_task.cuh).
// Bench: python -m tridecode.tools.bench.studies.ranks --gpus 2
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

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_split_k_sent(const tridecode_sent_gemm_task* given, void* stream) {
  const char* const name = "gemm_sm90_split_k";
  SentTask task;
  if (int status = make_sent(task, name, *given)) return status;
  return checked(name, task, [&](Mode mode) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
#define TRIDECODE_SEND(tokens_, mode_, split_)                                               \
  if (task.tile_tokens == tokens_ && mode == mode_ && task.split == split_) {                \
    if (int status = encode_sent(task, *given, SplitShape<tokens_, split_>::Results::kPart)) \
      return status;                                                                         \
    return run<X, X, tokens_, mode_, split_>(task, stream);                                  \
  }
      TRIDECODE_INSTANCES(TRIDECODE_SEND)
      return fail("%s: sends no tile of %d tokens, split %d", name, task.tile_tokens, task.split);
    });
  });
}
