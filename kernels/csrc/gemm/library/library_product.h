// A GEMM by cuBLASLt: its descriptors, created once for GEMMs that differ only in addresses.
// gemm_library.cu defines it and holds the library's functions.
#pragma once
#include "api/library.h"
#include "gemm/library/cublas_lt.h"

namespace tridecode {

using LibraryTask = tridecode_library_task;

class LibraryProduct {
 public:
  LibraryProduct() = default;
  LibraryProduct(const LibraryProduct&) = delete;
  LibraryProduct& operator=(const LibraryProduct&) = delete;
  ~LibraryProduct();

  // Must be called first. The functions return a status whose text tridecode_error() returns.
  int describe(const LibraryTask& task);
  int find(const LibraryTask& task);
  // Runs the task that was described, or one with other addresses.
  int run(const LibraryTask& task, cudaStream_t stream);

 private:
  lt::Desc desc_ = nullptr;
  lt::Layout weight_ = nullptr, x_ = nullptr, residual_ = nullptr, out_ = nullptr;

  int layout(lt::Layout* made, cudaDataType type, int rows, int columns, int64_t stride);
  int set_bias(const void* bias);
  template <typename T>
  int set(int attribute, T value);
};

}  // namespace tridecode
