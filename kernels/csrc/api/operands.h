// Formats of a GEMM's operands: one code for every function with an `operand`. library.py parses
// the names. Part of api.h.
#pragma once

enum tridecode_operand {
  kOperandDense = 0,         // x and weight are of dtype
  kOperandInt8 = 1,          // both int8, with a scale for each row of x and of the weight
  kOperandFp8 = 2,           // both E4M3, with the same scales
  kOperandTwoParts = 3,      // an int8 weight; x in two int8 parts
  kOperandTwoPartsInt4 = 4,  // an int4 weight; x in two int8 parts, inputs in granule order
  kOperandFp8Blocks = 5  // both E4M3, with a scale per 128 inputs and per 128 x 128 of the weight
};
