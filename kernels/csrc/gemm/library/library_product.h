// A product by cuBLASLt: its descriptors, made once for products that differ in their addresses
// alone. gemm_library.cu defines it and holds the library's functions.
#pragma once
#include "api.h"
#include "gemm/library/cublas_lt.h"

namespace tridecode {

using LibraryTask = tridecode_library_task;

class LibraryProduct {
 public:
  LibraryProduct() = default;
  LibraryProduct(const LibraryProduct&) = delete;
  LibraryProduct& operator=(const LibraryProduct&) = delete;
  ~LibraryProduct();

  // First of all. The functions return a status whose text tridecode_error() gives.
  int describe(const LibraryTask& task);
  int find(const LibraryTask& task);
  // The task that was described, or one with other addresses.
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
