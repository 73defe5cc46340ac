// out = activation(x * weight^T + bias) + residual by cuBLASLt for a weight in 8 or 4 bit: pieces
// of its outputs are dequantised to 16 bit in scratch memory and multiplied.
//
// Up to about 1,500 tokens the GPU waits for the host, so descriptors are created once for all
// pieces of a size, and nothing is looked up between two launches.
//
// Bytes moved: those of expand_weight.cu, the expanded weight, and for each piece x and its out.
// Bench: python -m tridecode.kernels.bench two_parts
#include "api/library.h"
#include "api/packed.h"
#include "gemm/library/library_product.h"
#include "gemm/packed/packed_weight.cuh"

namespace tridecode {
namespace {

using Task = tridecode_expanded_task;

template <typename T>
T* advanced(T* from, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const<T>::value, const char, char>;
  return from ? static_cast<Byte*>(from) + bytes : nullptr;
}

// Dequantises outputs first to first + count - 1 of the weight to scratch memory.
int expand(const Task& task, int first, int count, void* stream) {
  if (!task.weight_format)
    return tridecode_expand_rows(task.weight, advanced(task.packed, int64_t(first) * task.inputs),
                                 task.weight_scales + first, count, task.inputs, task.dtype,
                                 stream);
  const int chunks = ceil_div(task.inputs, granule_inputs(WeightFormat(task.weight_format)));
  const int64_t granules = int64_t(first / kGranuleRows) * chunks;  // bytes of the outputs before
  GemmTask part = {};
  part.out = task.weight, part.out_stride = task.inputs;
  part.inputs = task.inputs, part.outputs = count, part.dtype = task.dtype;
  part.weight_format = task.weight_format, part.granule_groups = task.granule_groups;
  part.weight = advanced(task.packed, granules * kGranuleBytes);
  if (task.weight_scales) part.weight_scales = task.weight_scales + first;
  if (task.weight_groups)
    part.weight_groups = task.weight_groups + granules * kGranuleRows * task.granule_groups;
  return tridecode_expand_weight(&part, stream);
}

// Multiplies them.
LibraryTask product_of(const Task& task, int first, int count, void* found) {
  const int64_t columns = int64_t(first) * (task.out_float32 ? 4 : 2);
  LibraryTask part = {};
  part.x = task.x, part.x_stride = task.x_stride;
  part.weight = task.weight, part.weight_stride = task.inputs;
  part.out = advanced(task.out, columns), part.out_stride = task.out_stride;
  part.residual = advanced(task.residual, columns), part.residual_stride = task.residual_stride;
  part.bias = advanced(task.bias, int64_t(first) * 2);
  part.tokens = task.tokens, part.inputs = task.inputs, part.outputs = count;
  part.activation = task.activation, part.out_float32 = task.out_float32, part.dtype = task.dtype;
  part.workspace = task.workspace, part.workspace_bytes = task.workspace_bytes;
  part.found = found;
  return part;
}

// Runs pieces of `size` outputs from task.done to stop.
int run(const Task& task, int size, int stop, void* found, void* stream) {
  if (*task.done >= stop) return 0;
  LibraryProduct product;
  int status = product.describe(product_of(task, *task.done, size, found));
  while (!status && *task.done < stop) {
    const LibraryTask part = product_of(task, *task.done, size, found);
    status = expand(task, *task.done, size, stream);
    if (!status) status = product.run(part, static_cast<cudaStream_t>(stream));
    if (!status) *task.done += size;
  }
  return status;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_expanded(const tridecode_expanded_task* given, void* stream) {
  const Task& task = *given;
  if (task.piece < 1 || (task.piece < task.outputs && task.piece % kGranuleRows))
    return fail("gemm_expanded: pieces of %d of %d outputs; wanted multiples of %d", task.piece,
                task.outputs, kGranuleRows);
  const int last = task.outputs % task.piece;
  const int status = run(task, task.piece, task.outputs - last, task.found, stream);
  return status || !last ? status : run(task, last, task.outputs, task.last_found, stream);
}
