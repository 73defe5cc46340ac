// Loads of operands of multiply_add from shared memory.
#pragma once
#include "common/common.cuh"

namespace tridecode {

// Four 8 x 8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&words)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

}  // namespace tridecode
