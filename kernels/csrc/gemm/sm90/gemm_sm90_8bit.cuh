// Shared by the kernels with 8-bit operands, gemm_sm90_*_8bit.cu and gemm_sm90_*_two_parts.cu: the
// task of a GEMM whose operands are both 8 bit.
//
// For TMA, swizzle, descriptors and pipeline stages, 8-bit rows of K inputs are 16-bit rows of K /
// 2 inputs. Only the instruction differs, which takes the same 32 bytes of a row, and the epilogue,
// which multiplies the sums by the scales of weight row and token. int8 is summed in int32,
// exactly; E4M3 by the tensor cores, whose sums keep about 14 bits of mantissa.
#pragma once
#include "api/operands.h"
#include "gemm/sm90/gemm_sm90_mainloop.cuh"

namespace tridecode {
namespace {

// Maximum inputs whose sum of products, up to 127 * 127 each, fits in int32.
constexpr int kMostInputs = 1 << 17;

// Changes the task to the 16-bit rows that are loaded.
int as_16_bit(const char* what, GemmTask& task) {
  const bool blocks = task.operand == kOperandFp8Blocks;
  if (!blocks && task.operand != kOperandFp8 && task.inputs > kMostInputs)
    return fail("%s: %d inputs; sums of integers hold %d", what, task.inputs, kMostInputs);
  if (!(blocks ? task.block_scales : task.weight_scales) || !task.x_scales)
    return fail("%s: scales are null", what);
  if (blocks ? task.weight_scales != nullptr : task.block_scales != nullptr)
    return fail("%s: scales of rows and of blocks with operand code %d", what, task.operand);
  if (task.inputs % 16 || task.x_stride % 16 || task.weight_stride % 16)
    return fail("%s: %d inputs, strides %lld and %lld; wanted multiples of 16", what, task.inputs,
                (long long)task.x_stride, (long long)task.weight_stride);
  task.inputs /= 2, task.x_stride /= 2, task.weight_stride /= 2;
  return 0;
}

// Calls body with a value of the operand's type.
template <typename Body>
int for_operand(int operand, const char* what, Body body) {
  if (operand == kOperandInt8) return body(int8_t());
  if (operand == kOperandFp8 || operand == kOperandFp8Blocks) return body(E4m3());
  return fail("%s: operand code %d; wanted int8 or E4M3", what, operand);
}

}  // namespace
}  // namespace tridecode
