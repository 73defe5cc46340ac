// out = activation(x * weight^T + bias) + residual by cuBLASLt, summed in float32.
//
// Rounded once, unless out is the residual: cuBLAS' kernels for Hopper then round the product with
// its bias before adding it. torch's GEMMs may add the partial sums of a split in 16 bit.
// kernels/gemm/cublas.py binds the functions of the library that torch has loaded, and caches the
// algorithms.
//
// cuBLAS is column-major: out^T (outputs, tokens) = weight (inputs, outputs)^T * x^T (inputs,
// tokens), and a bias is added to each column of out^T.
// Bench: python -m tridecode.kernels.bench linear
#include "api/library.h"
#include "api/operands.h"
#include "common/epilogue.cuh"
#include "gemm/library/library_product.h"

namespace tridecode {
namespace {

lt::Functions functions;
lt::Handle handle = nullptr;

cudaDataType type_of(int dtype) {
  return dtype == kFloat32 ? CUDA_R_32F : dtype == kFloat16 ? CUDA_R_16F : CUDA_R_16BF;
}

int check_library(lt::Status status, const char* what) {
  return status == 0 ? 0 : fail("cuBLASLt: %s returned status %d", what, status);
}

}  // namespace

LibraryProduct::~LibraryProduct() {
  for (lt::Layout layout : {weight_, x_, residual_, out_})
    if (layout) functions.layout_destroy(layout);
  if (desc_) functions.desc_destroy(desc_);
}

int LibraryProduct::describe(const LibraryTask& task) {
  const cudaDataType operand = task.operand ? CUDA_R_8F_E4M3 : type_of(task.dtype);
  const cudaDataType out = task.out_float32 ? CUDA_R_32F : type_of(task.dtype);
  const int outputs = task.outputs, inputs = task.inputs, tokens = task.tokens;
  int status = check_library(functions.desc_create(&desc_, lt::kCompute32F, CUDA_R_32F), "desc");
  status |= layout(&weight_, operand, inputs, outputs, task.weight_stride);
  status |= layout(&x_, operand, inputs, tokens, task.x_stride);
  status |= layout(&out_, out, outputs, tokens, task.out_stride);
  status |= layout(&residual_, out, outputs, tokens,
                   task.residual ? task.residual_stride : task.out_stride);
  if (status) return status;
  uint32_t epilogue = task.activation == kRelu       ? lt::kRelu
                      : task.activation == kGeluTanh ? lt::kGelu
                                                     : lt::kPlain;
  if (task.bias) epilogue = (epilogue == lt::kPlain ? 0 : epilogue) | lt::kBias;
  status |= set(lt::kTransA, lt::kTransposed);
  status |= set(lt::kEpilogue, epilogue);
  if (task.bias) {
    status |= set_bias(task.bias);
    status |= set(lt::kBiasType, int32_t(type_of(task.dtype)));
  }
  if (task.operand) {
    const bool in_blocks = task.operand == kOperandFp8Blocks;
    status |= set(lt::kScaleModeA, in_blocks ? lt::kScaleBlock128 : lt::kScaleOuterVector);
    status |= set(lt::kScaleModeB, in_blocks ? lt::kScaleVector128 : lt::kScaleOuterVector);
    status |= set(lt::kScalePointerA, task.weight_scales);
    status |= set(lt::kScalePointerB, task.x_scales);
  }
  return status;
}

int LibraryProduct::find(const LibraryTask& task) {
  lt::Preference preference = nullptr;
  int status = check_library(functions.preference_create(&preference), "preference");
  if (status) return status;
  const uint64_t bytes = task.workspace_bytes;
  const uint32_t mask = lt::kReduceInFloat32;
  status |= functions.preference_set(preference, lt::kWorkspaceBytes, &bytes, sizeof(bytes));
  status |= functions.preference_set(preference, lt::kReductionMask, &mask, sizeof(mask));
  const uint32_t alignment = task.alignment;
  for (int tensor = 0; tensor < 4; ++tensor)
    status |= functions.preference_set(preference, lt::kAlignmentA + tensor, &alignment,
                                       sizeof(alignment));
  *task.count = 0;
  const lt::Status found =
      status ? status
             : functions.heuristic(handle, desc_, weight_, x_, residual_, out_, preference,
                                   task.most, static_cast<lt::Found*>(task.found), task.count);
  functions.preference_destroy(preference);
  return found == lt::kUnsupported ? 0 : check_library(found, "the choice of an algorithm");
}

int LibraryProduct::run(const LibraryTask& task, cudaStream_t stream) {
#ifdef TRIDECODE_DEBUG
  if (int status = check_order("gemm_library", stream)) return status;
#endif
  const int status = task.bias ? set_bias(task.bias) : 0;
  if (status) return status;
  const float one = 1.0f, beta = task.residual ? 1.0f : 0.0f;
  return check_library(
      functions.matmul(handle, desc_, &one, task.weight, weight_, task.x, x_, &beta,
                       task.residual ? task.residual : task.out, residual_, task.out, out_,
                       static_cast<const lt::Algorithm*>(task.found), task.workspace,
                       task.workspace_bytes, stream),
      "the product");
}

int LibraryProduct::layout(lt::Layout* made, cudaDataType type, int rows, int columns,
                           int64_t stride) {
  return check_library(functions.layout_create(made, type, rows, columns, stride), "layout");
}

int LibraryProduct::set_bias(const void* bias) { return set(lt::kBiasPointer, bias); }

template <typename T>
int LibraryProduct::set(int attribute, T value) {
  return check_library(functions.desc_set(desc_, attribute, &value, sizeof(value)), "attribute");
}

}  // namespace tridecode

using namespace tridecode;

int tridecode_library_bind(const void* addresses) {
  functions = *static_cast<const lt::Functions*>(addresses);
  return handle ? 0 : check_library(functions.create(&handle), "cublasLtCreate");
}

int tridecode_library_algorithms(const tridecode_library_task* task, void* stream) {
  LibraryProduct product;
  const int status = product.describe(*task);
  return status ? status : product.find(*task);
}

int tridecode_gemm_library(const tridecode_library_task* task, void* stream) {
  LibraryProduct product;
  const int status = product.describe(*task);
  return status ? status : product.run(*task, static_cast<cudaStream_t>(stream));
}
