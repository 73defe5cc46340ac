// wgmma: 64 rows of a times N rows of b, both in shared memory, 32 bytes of inputs per instruction.
#pragma once
#include "common/hopper.cuh"

namespace tridecode {

// Tag of 8-bit floating-point operands. Integer operands are int8_t, and their sums int.
struct E4m3 {};
// int8_t, x in two parts (quantize_rows.cu): 16 rows of b are 8 tokens' high and low parts.
struct TwoParts {};
template <typename Operand>
constexpr int kPartsOf = std::is_same<Operand, TwoParts>::value ? 2 : 1;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Shared memory descriptor of 128-byte rows in the 128-byte swizzle; groups of 8 rows are
// `group_bytes` apart.
__device__ __forceinline__ uint64_t descriptor(const void* pointer, int group_bytes) {
  return uint64_t((shared_address(pointer) & 0x3ffff) >> 4) | uint64_t(1) << 16 |
         uint64_t(group_bytes >> 4) << 32 | uint64_t(1) << 62;
}

// Returns the descriptor of a matrix `bytes` after another. Adds only to the low word, because a
// 64-bit addition takes three more instructions.
__device__ __forceinline__ uint64_t later(uint64_t descriptor, int bytes) {
  return (descriptor & ~uint64_t(0xffffffff)) | (uint32_t(descriptor) + uint32_t(bytes >> 4));
}

// clang-format off
// register operands, in groups of eight
#define TRIDECODE_S0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TRIDECODE_S1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define TRIDECODE_S2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define TRIDECODE_S3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define TRIDECODE_S4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define TRIDECODE_S5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define TRIDECODE_S6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define TRIDECODE_S7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define TRIDECODE_S8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define TRIDECODE_S9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define TRIDECODE_S10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define TRIDECODE_S11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define TRIDECODE_S12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define TRIDECODE_S13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define TRIDECODE_S14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define TRIDECODE_S15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define TRIDECODE_C(i)                                                                          \
  "+f"(c[8 * (i)]), "+f"(c[8 * (i) + 1]), "+f"(c[8 * (i) + 2]), "+f"(c[8 * (i) + 3]),           \
      "+f"(c[8 * (i) + 4]), "+f"(c[8 * (i) + 5]), "+f"(c[8 * (i) + 6]), "+f"(c[8 * (i) + 7])
#define TRIDECODE_C2(i) TRIDECODE_C(i), TRIDECODE_C(i + 1)
#define TRIDECODE_C4(i) TRIDECODE_C2(i), TRIDECODE_C2(i + 2)
#define TRIDECODE_C8(i) TRIDECODE_C4(i), TRIDECODE_C4(i + 4)
// integer sums
#define TRIDECODE_I(i)                                                                          \
  "+r"(c[8 * (i)]), "+r"(c[8 * (i) + 1]), "+r"(c[8 * (i) + 2]), "+r"(c[8 * (i) + 3]),           \
      "+r"(c[8 * (i) + 4]), "+r"(c[8 * (i) + 5]), "+r"(c[8 * (i) + 6]), "+r"(c[8 * (i) + 7])
#define TRIDECODE_I2(i) TRIDECODE_I(i), TRIDECODE_I(i + 1)
#define TRIDECODE_I4(i) TRIDECODE_I2(i), TRIDECODE_I2(i + 2)
#define TRIDECODE_I8(i) TRIDECODE_I4(i), TRIDECODE_I4(i + 4)
#define TRIDECODE_N16 TRIDECODE_S0
#define TRIDECODE_N32 TRIDECODE_N16 ", " TRIDECODE_S1
#define TRIDECODE_N64 TRIDECODE_N32 ", " TRIDECODE_S2 ", " TRIDECODE_S3
#define TRIDECODE_N96 TRIDECODE_N64 ", " TRIDECODE_S4 ", " TRIDECODE_S5
#define TRIDECODE_N128 TRIDECODE_N96 ", " TRIDECODE_S6 ", " TRIDECODE_S7
#define TRIDECODE_N160 TRIDECODE_N128 ", " TRIDECODE_S8 ", " TRIDECODE_S9
#define TRIDECODE_N192 TRIDECODE_N160 ", " TRIDECODE_S10 ", " TRIDECODE_S11
#define TRIDECODE_N224 TRIDECODE_N192 ", " TRIDECODE_S12 ", " TRIDECODE_S13
#define TRIDECODE_N256 TRIDECODE_N224 ", " TRIDECODE_S14 ", " TRIDECODE_S15
// kind: "k16.f32.f16.f16"; rest: the operands after scale-d
#define TRIDECODE_WGMMA(kind, rest, n, registers, at_a, at_b, at_add, ...)                        \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " at_add ", 0;\n"                            \
               "wgmma.mma_async.sync.aligned.m64n" n kind " {" registers "}, " at_a ", " at_b      \
               ", add" rest ";\n}\n"                                                             \
               : __VA_ARGS__                                                                      \
               : "l"(a), "l"(b), "r"(add))
// C: TRIDECODE_C or TRIDECODE_I, the registers of the sums
#define TRIDECODE_PRODUCT(C, kind, rest)                                                         \
  if constexpr (N == 16) TRIDECODE_WGMMA(kind, rest, "16", TRIDECODE_N16, "%8", "%9", "%10", C(0)); \
  if constexpr (N == 32) TRIDECODE_WGMMA(kind, rest, "32", TRIDECODE_N32, "%16", "%17", "%18", C##2(0)); \
  if constexpr (N == 64) TRIDECODE_WGMMA(kind, rest, "64", TRIDECODE_N64, "%32", "%33", "%34", C##4(0)); \
  if constexpr (N == 96) TRIDECODE_WGMMA(kind, rest, "96", TRIDECODE_N96, "%48", "%49", "%50", C##4(0), C##2(4)); \
  if constexpr (N == 128) TRIDECODE_WGMMA(kind, rest, "128", TRIDECODE_N128, "%64", "%65", "%66", C##8(0)); \
  if constexpr (N == 160) TRIDECODE_WGMMA(kind, rest, "160", TRIDECODE_N160, "%80", "%81", "%82", C##8(0), C##2(8)); \
  if constexpr (N == 192) TRIDECODE_WGMMA(kind, rest, "192", TRIDECODE_N192, "%96", "%97", "%98", C##8(0), C##4(8)); \
  if constexpr (N == 224) TRIDECODE_WGMMA(kind, rest, "224", TRIDECODE_N224, "%112", "%113", "%114", C##8(0), C##4(8), C##2(12)); \
  if constexpr (N == 256) TRIDECODE_WGMMA(kind, rest, "256", TRIDECODE_N256, "%128", "%129", "%130", C##8(0), C##8(8))
// clang-format on

// c (64 x N) += a (64 x K) * b (N x K) transposed, given by descriptors; c = if not `add`. K: 32
// bytes. Warp w of the group holds rows 16 w to 16 w + 15: lane (g, t) = (lane / 4, lane % 4) has
// at c[4 j] and c[4 j + 1] row g, columns 8 j + 2 t and the next, at c[4 j + 2] and c[4 j + 3]
// those of row g + 8. Call group_fence() first; c may be read after wait_groups<0>().
template <typename Operand, int N, typename Sum>
__device__ __forceinline__ void group_multiply_add(Sum (&c)[N / 2], uint64_t a, uint64_t b,
                                                   int add) {
  if constexpr (std::is_same<Operand, half>::value) {
    TRIDECODE_PRODUCT(TRIDECODE_C, "k16.f32.f16.f16", ", 1, 1, 0, 0");
  } else if constexpr (std::is_same<Operand, bfloat16>::value) {
    TRIDECODE_PRODUCT(TRIDECODE_C, "k16.f32.bf16.bf16", ", 1, 1, 0, 0");
  } else if constexpr (std::is_same<Operand, E4m3>::value) {
    TRIDECODE_PRODUCT(TRIDECODE_C, "k32.f32.e4m3.e4m3", ", 1, 1");
  } else {
    TRIDECODE_PRODUCT(TRIDECODE_I, "k32.s32.s8.s8", "");
  }
}

// Descriptor of a column-major matrix: its rows are inputs, 64 numbers in 128 bytes, in the
// 128-byte swizzle; groups of 8 rows are `group_bytes` apart, groups of 64 columns `part_bytes`.
__device__ __forceinline__ uint64_t columns_descriptor(const void* pointer, int part_bytes,
                                                       int group_bytes) {
  return uint64_t((shared_address(pointer) & 0x3ffff) >> 4) | uint64_t(part_bytes >> 4) << 16 |
         uint64_t(group_bytes >> 4) << 32 | uint64_t(1) << 62;
}

// clang-format off
#define TRIDECODE_WGMMA_ROWS(type, n, registers, a0, a1, a2, a3, at_b, columns, ...)             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers      \
               "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " at_b ", 1, 1, 1, " columns ";\n"          \
               : __VA_ARGS__                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define TRIDECODE_ROWS_PRODUCT(type, columns)                                                     \
  if constexpr (N == 16) TRIDECODE_WGMMA_ROWS(type, "16", TRIDECODE_N16, "%8", "%9", "%10", "%11", "%12", columns, TRIDECODE_C(0)); \
  if constexpr (N == 32) TRIDECODE_WGMMA_ROWS(type, "32", TRIDECODE_N32, "%16", "%17", "%18", "%19", "%20", columns, TRIDECODE_C2(0)); \
  if constexpr (N == 64) TRIDECODE_WGMMA_ROWS(type, "64", TRIDECODE_N64, "%32", "%33", "%34", "%35", "%36", columns, TRIDECODE_C4(0)); \
  if constexpr (N == 96) TRIDECODE_WGMMA_ROWS(type, "96", TRIDECODE_N96, "%48", "%49", "%50", "%51", "%52", columns, TRIDECODE_C4(0), TRIDECODE_C2(4)); \
  if constexpr (N == 128) TRIDECODE_WGMMA_ROWS(type, "128", TRIDECODE_N128, "%64", "%65", "%66", "%67", "%68", columns, TRIDECODE_C8(0)); \
  if constexpr (N == 160) TRIDECODE_WGMMA_ROWS(type, "160", TRIDECODE_N160, "%80", "%81", "%82", "%83", "%84", columns, TRIDECODE_C8(0), TRIDECODE_C2(8)); \
  if constexpr (N == 192) TRIDECODE_WGMMA_ROWS(type, "192", TRIDECODE_N192, "%96", "%97", "%98", "%99", "%100", columns, TRIDECODE_C8(0), TRIDECODE_C4(8)); \
  if constexpr (N == 224) TRIDECODE_WGMMA_ROWS(type, "224", TRIDECODE_N224, "%112", "%113", "%114", "%115", "%116", columns, TRIDECODE_C8(0), TRIDECODE_C4(8), TRIDECODE_C2(12)); \
  if constexpr (N == 256) TRIDECODE_WGMMA_ROWS(type, "256", TRIDECODE_N256, "%128", "%129", "%130", "%131", "%132", columns, TRIDECODE_C8(0), TRIDECODE_C8(8))
// clang-format on

// c (64 x N) += a (64 x 16) * b (16 x N): a in registers, the warp's 16 rows as for multiply_add; b
// by columns_descriptor().
template <typename X, int N>
__device__ __forceinline__ void group_multiply_add_rows(float (&c)[N / 2], const uint32_t (&a)[4],
                                                        uint64_t b) {
  if constexpr (std::is_same<X, half>::value) {
    TRIDECODE_ROWS_PRODUCT("f16", "1");
  } else {
    TRIDECODE_ROWS_PRODUCT("bf16", "1");
  }
}

// c (64 x N) += a (64 x 16) * b (N x 16) transposed: a in registers, b by descriptor().
template <typename X, int N>
__device__ __forceinline__ void group_multiply_add_registers(float (&c)[N / 2],
                                                             const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same<X, half>::value) {
    TRIDECODE_ROWS_PRODUCT("f16", "0");
  } else {
    TRIDECODE_ROWS_PRODUCT("bf16", "0");
  }
}

// clang-format off
#define TRIDECODE_WGMMA_BYTES(n, registers, a0, a1, a2, a3, at_b, at_add, ...)                   \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " at_add ", 0;\n"                            \
               "wgmma.mma_async.sync.aligned.m64n" n "k32.s32.s8.s8 {" registers "}, {" a0 ", " a1 \
               ", " a2 ", " a3 "}, " at_b ", add;\n}\n"                                           \
               : __VA_ARGS__                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
// clang-format on

// c (64 x N) += a (64 x 32) * b (N x 32) transposed, int8; c = if not `add`. a in registers: lane
// (g, t) has inputs 4 t to 4 t + 3 of row g and of row g + 8, then the inputs 16 further on of
// both. b by descriptor().
template <int N>
__device__ __forceinline__ void group_multiply_add_bytes(int (&c)[N / 2], const uint32_t (&a)[4],
                                                         uint64_t b, int add) {
  // clang-format off
  if constexpr (N == 16) TRIDECODE_WGMMA_BYTES("16", TRIDECODE_N16, "%8", "%9", "%10", "%11", "%12", "%13", TRIDECODE_I(0));
  if constexpr (N == 32) TRIDECODE_WGMMA_BYTES("32", TRIDECODE_N32, "%16", "%17", "%18", "%19", "%20", "%21", TRIDECODE_I2(0));
  if constexpr (N == 64) TRIDECODE_WGMMA_BYTES("64", TRIDECODE_N64, "%32", "%33", "%34", "%35", "%36", "%37", TRIDECODE_I4(0));
  // clang-format on
}

__device__ __forceinline__ void group_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Waits for all but the last PENDING groups in flight, after which their sums may be read.
template <int PENDING = 0, int COUNT>
__device__ __forceinline__ void wait_for_sums(float (&c)[COUNT]) {
  wait_groups<PENDING>();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
template <int PENDING = 0, int COUNT>
__device__ __forceinline__ void wait_for_sums(int (&c)[COUNT]) {
  wait_groups<PENDING>();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(c[i])::"memory");
}

// The barrier of a warp group.
__device__ __forceinline__ void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// ---------------------------------------------------------------- registers of a warp group

template <int COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---------------------------------------------------------------- transposed 8 x 8 matrices

// Moves four 8 x 8 matrices of 16-bit numbers between registers, packed like multiply_add's c, and
// rows of 16 bytes in shared memory, which are their columns. Lane l gives the address of row l % 8
// of matrix l / 8.
__device__ __forceinline__ void store_transposed(void* row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

__device__ __forceinline__ void load_transposed(const void* row, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}

#endif

}  // namespace tridecode
