// gemm_sm90_stream_k_8bit.cu, of int8, for a part of a sum over two tensor ranks (sent_task.cuh).
// Bench: python -m tridecode.tools.bench.studies.ranks --gpus 2
#include "gemm/sent/sent_task.cuh"
#include "gemm/sm90/gemm_sm90_8bit.cuh"
#include "gemm/sm90/gemm_sm90_stream_k.cuh"

namespace tridecode {
namespace {

// (tokens of a tile, epilogue). table_sm90.py chooses among them.
#define TRIDECODE_INSTANCES(_) _(64, kPlain)

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_stream_k_8bit_sent(const tridecode_sent_gemm_task* given, void* stream) {
  const char* const name = "gemm_sm90_stream_k_8bit";
  SentTask task;
  if (int status = make_sent(task, name, *given)) return status;
  if (task.operand != kOperandInt8) return fail("%s: sends sums of int8 alone", name);
  if (int status = as_16_bit(name, task)) return status;
  return divided(name, task, [&](Mode mode, const Division& division) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
#define TRIDECODE_SEND(tokens_, mode_)                                                \
  if (task.tile_tokens == tokens_ && mode == mode_) {                                 \
    if (int status = encode_sent(task, *given, Shape<tokens_>::kPart)) return status; \
    return run<X, int8_t, tokens_, mode_>(task, division, stream);                    \
  }
      TRIDECODE_INSTANCES(TRIDECODE_SEND)
      return fail("%s: sends no tile of %d tokens", name, task.tile_tokens);
    });
  });
}
