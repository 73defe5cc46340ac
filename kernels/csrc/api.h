// The C ABI of the kernels, declared once in api/*.h: library.py reads these files, makes a ctypes
// structure of every task and binds every function.
//
// Pointers are device addresses, strides count elements, `stream` is a cudaStream_t. Every function
// returns 0, or a status whose text tridecode_error() gives (per thread). None of them allocates or
// synchronises, so that each may be captured in a CUDA graph. kernels/ops.py defines shapes and
// meanings; the Python side has checked them.
#pragma once
#include "api/adapted_gemm.h"
#include "api/adapters.h"
#include "api/attention.h"
#include "api/base.h"
#include "api/blocks.h"
#include "api/chain.h"
#include "api/drafts.h"
#include "api/even_split.h"
#include "api/gemm.h"
#include "api/kept_gemm.h"
#include "api/library.h"
#include "api/operands.h"
#include "api/packed.h"
#include "api/ranks.h"
#include "api/rows.h"
#include "api/sampling.h"
#include "api/sent_gemm.h"
#include "api/version.h"
