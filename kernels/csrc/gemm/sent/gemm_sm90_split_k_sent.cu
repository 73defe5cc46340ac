// gemm_sm90_split_k.cu for a part of a sum over two tensor ranks (sent_task.cuh).
// Bench: python -m tridecode.tools.bench.studies.ranks --gpus 2
#include "gemm/sent/gemm_sm90_split_k_sent.cuh"

using namespace tridecode;

int tridecode_gemm_sm90_split_k_sent(const tridecode_sent_gemm_task* given, void* stream) {
  const char* const name = "gemm_sm90_split_k";
  SentTask task;
  if (int status = make_sent(task, name, *given)) return status;
  return checked(name, task, [&](Mode mode) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
      return send_instance<X, X>(name, task, *given, mode, stream);
    });
  });
}
