// Declarations of the part of cuBLASLt that gemm_library.cu uses, so that the build does not need
// its headers; torch has loaded the library. Values are those of cublasLt.h in CUDA 12 and 13.
#pragma once
#include <cuda_runtime_api.h>
#include <library_types.h>
#include <stddef.h>
#include <stdint.h>

namespace tridecode {
namespace lt {

using Status = int;                       // 0: success
constexpr Status kUnsupported = 15;       // CUBLAS_STATUS_NOT_SUPPORTED
constexpr int kCompute32F = 68;           // CUBLAS_COMPUTE_32F
constexpr int32_t kTransposed = 1;        // CUBLAS_OP_T
constexpr int32_t kScaleOuterVector = 3;  // a float32 for each row of A, or column of B
constexpr int32_t kScaleVector128 = 4;    // for each 128 numbers of a row or column
constexpr int32_t kScaleBlock128 = 5;     // for each 128 x 128 numbers

enum DescAttribute {
  kTransA = 3,
  kEpilogue = 7,
  kBiasPointer = 8,
  kScalePointerA = 17,
  kScalePointerB = 18,
  kBiasType = 26,
  kScaleModeA = 31,
  kScaleModeB = 32,
};
// kAlignmentA is followed by those of B, C and D.
enum PreferenceAttribute { kWorkspaceBytes = 1, kReductionMask = 3, kAlignmentA = 5 };
constexpr uint32_t kReduceInFloat32 = 2;  // partial sums of a split are of the compute type
enum Epilogue : uint32_t { kPlain = 1, kRelu = 2, kBias = 4, kGelu = 32 };  // GELU: tanh form

struct Algorithm {
  uint64_t data[8];
};
struct Found {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

using Handle = void*;
using Desc = void*;
using Layout = void*;
using Preference = void*;

// Functions in the order of tridecode_library_bind's arguments.
struct Functions {
  Status (*create)(Handle*);
  Status (*desc_create)(Desc*, int compute_type, cudaDataType scale_type);
  Status (*desc_destroy)(Desc);
  Status (*desc_set)(Desc, int attribute, const void* value, size_t bytes);
  Status (*layout_create)(Layout*, cudaDataType type, uint64_t rows, uint64_t columns, int64_t ld);
  Status (*layout_destroy)(Layout);
  Status (*preference_create)(Preference*);
  Status (*preference_destroy)(Preference);
  Status (*preference_set)(Preference, int attribute, const void* value, size_t bytes);
  Status (*heuristic)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, Preference, int most,
                      Found*, int* count);
  Status (*matmul)(Handle, Desc, const void* alpha, const void* a, Layout, const void* b, Layout,
                   const void* beta, const void* c, Layout, void* d, Layout, const Algorithm*,
                   void* workspace, size_t workspace_bytes, cudaStream_t);
};

}  // namespace lt
}  // namespace tridecode
