// The product of linear.cu with Hopper's own instructions: a warp keeps a ring of bulk copies of the weights in flight,
// and two warp groups multiply them with wgmma, 64 rows each, the tokens being the 8 to 64 columns.
//
// The blocks of 64 inputs of all tiles of 128 rows are dealt out in contiguous runs of equal length, one run a block of
// threads. A tile that a run does not cover whole is added up by the last of its blocks to arrive, from scratch memory.
// The ring holds weights before the wait for the kernel that computes x; the next kernel may start, and fill its own
// ring, once this one has asked for its last weights. With a norm, x is normalised into shared memory once, else its
// blocks travel with the weights.
//
// Bytes moved: outputs * inputs * sizeof(X), once.   Bench: python -m tridecode.kernels.bench linear
#include <cuda.h>

#include "linear.cuh"

namespace tridecode {
namespace {

using Task = LinearTask;

constexpr int kGroups = 2;                       // warp groups that multiply
constexpr int kConsumers = 128 * kGroups;
constexpr int kThreads = kConsumers + 32;        // and a warp that copies
constexpr int kTileRows = 64 * kGroups;
constexpr int kBlockInputs = 64;                 // 128 bytes: the width of the swizzle
constexpr int kWeightBytes = kTileRows * kBlockInputs * 2;
constexpr int kMaxStages = 16;

struct Division {
  int blocks;        // of 64 inputs
  int tiles;         // of 128 rows
  int total;         // blocks * tiles
  int stages;        // of the ring
  bool resident;     // x is normalised and stays
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// A box of the matrix, at (input, row), to shared memory; `policy` says how long the L2 cache keeps it.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int input, int row, uint64_t* barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(input), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A matrix of rows of 128 bytes in the 128-byte swizzle: 16 bytes a unit, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(const void* pointer) {
  return uint64_t((shared_address(pointer) & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// c += a (64 rows x 16 inputs) * b (16 inputs x 8 * NT tokens), both in shared memory; c = where not `add`.
template <typename X, int NT>
__device__ __forceinline__ void group_multiply_add(float (&c)[NT][4], uint64_t a, uint64_t b, int add) {
#define TRIDECODE_C(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define TRIDECODE_WGMMA(columns, type, registers, first, second, third, ...)                                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " third ", 0;\n"                                             \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" registers "}, " first    \
               ", " second ", add, 1, 1, 0, 0;\n}\n"                                                              \
               : __VA_ARGS__                                                                                      \
               : "l"(a), "l"(b), "r"(add))
#define TRIDECODE_BOTH(columns, registers, first, second, third, ...)                             \
  if constexpr (std::is_same<X, half>::value) {                                                   \
    TRIDECODE_WGMMA(columns, "f16", registers, first, second, third, __VA_ARGS__);                \
  } else {                                                                                        \
    TRIDECODE_WGMMA(columns, "bf16", registers, first, second, third, __VA_ARGS__);               \
  }
  if constexpr (NT == 1) {
    TRIDECODE_BOTH("8", "%0, %1, %2, %3", "%4", "%5", "%6", TRIDECODE_C(0))
  } else if constexpr (NT == 2) {
    TRIDECODE_BOTH("16", "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", TRIDECODE_C(0), TRIDECODE_C(1))
  } else if constexpr (NT == 4) {
    TRIDECODE_BOTH("32", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "%16", "%17", "%18",
                   TRIDECODE_C(0), TRIDECODE_C(1), TRIDECODE_C(2), TRIDECODE_C(3))
  } else {
    static_assert(NT == 8, "");
    TRIDECODE_BOTH("64",
                   "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
                   "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                   "%32", "%33", "%34", TRIDECODE_C(0), TRIDECODE_C(1), TRIDECODE_C(2), TRIDECODE_C(3), TRIDECODE_C(4),
                   TRIDECODE_C(5), TRIDECODE_C(6), TRIDECODE_C(7))
  }
#undef TRIDECODE_BOTH
#undef TRIDECODE_WGMMA
#undef TRIDECODE_C
}

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }
__device__ __forceinline__ void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
}

// x, normalised, as 64 inputs after 64 inputs of all tokens, each in the swizzle that wgmma reads.
template <typename X, int NT>
__device__ __forceinline__ void normalize(const Task& task, char* xs, float (*partial)[kConsumers / 32],
                                          float (*totals)[16]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tokens = task.tokens;
  const int pieces = (task.inputs + kBlockInputs - 1) / kBlockInputs * 8;
  auto piece_of = [&](int p, int token) {
    return reinterpret_cast<X*>(xs + p / 8 * (NT * 8 * 128) + token * 128 + ((p ^ token) % 8) * 16);
  };
  auto add_up = [&](int which) {
    consumers_sync();
    for (int token = warp; token < tokens; token += kConsumers / 32) {
      const float total = warp_sum(lane < kConsumers / 32 ? partial[token][lane] : 0.0f);
      if (lane == 0) totals[which][token] = total;
    }
    consumers_sync();
  };
  const bool centred = task.norm_bias != nullptr;
  const float each = 1.0f / task.inputs;
#pragma unroll 4
  for (int token = 0; token < tokens; ++token) {
    const X* row = static_cast<const X*>(task.x) + token * task.x_stride;
    float sum = 0.0f;
    for (int p = threadIdx.x; p < pieces; p += kConsumers) {
      float values[8] = {};
      if (p * 8 < task.inputs) load8(row + p * 8, values);
      store8(piece_of(p, token), values);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += centred ? values[i] : values[i] * values[i];
    }
    sum = warp_sum(sum);
    if (lane == 0) partial[token][warp] = sum;
  }
  add_up(centred ? 0 : 1);
  if (centred) {
#pragma unroll 4
    for (int token = 0; token < tokens; ++token) {
      const float mean = totals[0][token] * each;
      float sum = 0.0f;
      for (int p = threadIdx.x; p * 8 < task.inputs; p += kConsumers) {
        float values[8];
        load8(piece_of(p, token), values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += (values[i] - mean) * (values[i] - mean);
      }
      sum = warp_sum(sum);
      if (lane == 0) partial[token][warp] = sum;
    }
    add_up(1);
  }
  for (int p = threadIdx.x; p * 8 < task.inputs; p += kConsumers) {
    float w[8], b[8] = {};
    load8(static_cast<const X*>(task.norm_weight) + p * 8, w);
    if (centred) load8(static_cast<const X*>(task.norm_bias) + p * 8, b);
#pragma unroll 2
    for (int token = 0; token < tokens; ++token) {
      const float mean = centred ? totals[0][token] * each : 0.0f;
      const float scale = rsqrtf(totals[1][token] * each + task.eps);
      float values[8];
      load8(piece_of(p, token), values);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = (values[i] - mean) * scale * w[i] + b[i];
      store8(piece_of(p, token), values);
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  consumers_sync();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename X, int MODE, int NT>
__global__ void __launch_bounds__(kThreads, 1)
    linear_sm90a(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ Task task, const __grid_constant__ Division division) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kXBytes = NT * 8 * kBlockInputs * 2;
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ float partial[NT <= 2 ? 16 : 1][kConsumers / 32], totals[2][16];
  __shared__ bool is_last[kGroups];
  const int stages = division.stages, stage_bytes = kWeightBytes + (division.resident ? 0 : kXBytes);
  char* const xs = base + stages * stage_bytes;  // where x is resident

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int quota = division.total / gridDim.x, extra = division.total % gridDim.x;
  auto start_of = [&](int block) { return block * quota + min(block, extra); };
  auto owner_of = [&](int at) {
    return at < extra * (quota + 1) ? at / (quota + 1) : extra + (at - extra * (quota + 1)) / quota;
  };
  const int begin = start_of(blockIdx.x), end = start_of(blockIdx.x + 1);

  if (threadIdx.x == kConsumers) {
    for (int i = 0; i < stages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == kConsumers / 32) {
    // ---- the warp that copies
    if (lane != 0) return;
    const uint64_t once = evict_first(), often = evict_last();
    auto copy_weights = [&](int at, int stage) {
      const int tile = at / division.blocks, input = at % division.blocks * kBlockInputs;
      char* const to = base + stage * stage_bytes;
      barrier_expect(full + stage, stage_bytes);
      if (MODE == kPlain || (MODE == kQkv && task.rotary_size == 0)) {
        copy_box(to, &weight_map, input, tile * kTileRows, full + stage, once);
      } else {
#pragma unroll 4
        for (int i = 0; i < kTileRows / 8; ++i) {  // 8 first rows of pairs, 8 second rows, and so on
          const int row = row_of<MODE>(task, tile * (kTileRows / 2) + i / 2 * 8, i % 2);
          copy_box(to + i * 1024, &weight_map, input, row, full + stage, once);
        }
      }
    };
    auto copy_x = [&](int at, int stage) {
      if (division.resident) return;
      const int input = at % division.blocks * kBlockInputs;
      copy_box(base + stage * stage_bytes + kWeightBytes, &x_map, input, 0, full + stage, often);
    };
    const int ahead = min(stages, end - begin);
    for (int i = 0; i < ahead; ++i) copy_weights(begin + i, i);
#if defined(__CUDA_ARCH__)
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (int i = 0; i < ahead; ++i) copy_x(begin + i, i);
    int stage = 0, parity = 0;
    for (int at = begin + ahead; at < end; ++at) {
      barrier_wait(empty + stage, parity);
      copy_weights(at, stage);
      copy_x(at, stage);
      if (++stage == stages) stage = 0, parity ^= 1;
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    return;
  }

  // ---- the warp groups that multiply
  const int group = warp / 4, g = lane / 4, t = lane % 4, thread = threadIdx.x % 128;
  if (NT <= 2 && division.resident) {
    for (int k = threadIdx.x * 64; k < task.inputs; k += kConsumers * 64) {
      prefetch_l2(static_cast<const X*>(task.norm_weight) + k);
      if (task.norm_bias) prefetch_l2(static_cast<const X*>(task.norm_bias) + k);
    }
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if constexpr (NT <= 2) {
    if (division.resident) normalize<X, NT>(task, xs, partial, totals);
  }

  int stage = 0, parity = 0;
  for (int at = begin; at < end;) {
    const int tile = at / division.blocks, first = at % division.blocks;
    const int last = min(division.blocks, first + (end - at));  // this block's part of the tile: first .. last
    float c[NT][4];
    int held = -1;  // the stage that the running products still read
    for (int block = first; block < last; ++block) {
      barrier_wait(full + stage, parity);
      char* const a = base + stage * stage_bytes + group * (64 * 128);
      char* const b = division.resident ? xs + block * kXBytes : base + stage * stage_bytes + kWeightBytes;
      const uint64_t a_descriptor = descriptor(a), b_descriptor = descriptor(b);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kBlockInputs / 16; ++k)  // 32 bytes on: 2 units of 16
        group_multiply_add<X, NT>(c, a_descriptor + 2 * k, b_descriptor + 2 * k, block > first || k > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (held >= 0 && lane == 0) barrier_arrive(empty + held);
      held = stage;
      if (++stage == stages) stage = 0, parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int n = 0; n < NT; ++n)
      asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
    if (lane == 0) barrier_arrive(empty + held);

    const bool whole = first == 0 && last == division.blocks;
    const int tile_begin = at - first;
    at += last - first;
    if (!whole) {
      // a block leaves at most two parts: of the tile it began with, and of the one it ended with
      auto slot_of = [&](int block) {
        const int slot = 2 * block + (start_of(block) >= tile_begin ? 0 : 1);
        return task.partials + int64_t(slot * kGroups + group) * (NT * 128) + thread;
      };
      float4* const mine = slot_of(blockIdx.x);
#pragma unroll
      for (int n = 0; n < NT; ++n) __stcg(mine + n * 128, make_float4(c[n][0], c[n][1], c[n][2], c[n][3]));
      __threadfence();
      group_sync(group);
      if (thread == 0) {
        unsigned int* const counter = task.counters + tile * kGroups + group;
        is_last[group] = atomicAdd(counter, unsigned(last - first)) + (last - first) == unsigned(division.blocks);
        if (is_last[group]) *counter = 0;  // for the next launch
      }
      group_sync(group);
      if (!is_last[group]) continue;
      __threadfence();
      const int from = owner_of(tile_begin), to = owner_of(tile_begin + division.blocks - 1);
#pragma unroll
      for (int n = 0; n < NT; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
#pragma unroll 2
      for (int block = from; block <= to; ++block) {
        const float4* const part = slot_of(block);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const float4 sums = __ldcg(part + n * 128);
          c[n][0] += sums.x, c[n][1] += sums.y, c[n][2] += sums.z, c[n][3] += sums.w;
        }
      }
    }
    const int pair = tile * (kTileRows / 2) + (group * 4 + warp % 4) * 8 + g;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int token = n * 8 + 2 * t;
      if (token >= task.tokens) continue;
      const Extra rest = load_extra<X, MODE>(task, pair, token);
      float values[2][2] = {{c[n][0], c[n][2]}, {c[n][1], c[n][3]}};
      finish<X, MODE>(task, pair, token, values, rest);
    }
  }
#endif
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess)
    return nullptr;
  return reinterpret_cast<Encode>(found);
}

// Boxes of `box_rows` rows of 64 numbers, in the 128-byte swizzle; zeros beyond the matrix.
int encode(CUtensorMap* map, const void* matrix, int64_t rows, int64_t columns, int64_t stride, int box_rows,
           int dtype) {
  static const Encode call = find_encode();
  if (!call) return fail("linear: the driver has no cuTensorMapEncodeTiled");
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[] = {cuuint64_t(stride * 2)};
  const cuuint32_t box[] = {kBlockInputs, cuuint32_t(box_rows)}, steps[] = {1, 1};
  const CUresult status =
      call(map, dtype == kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
           const_cast<void*>(matrix), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? 0 : fail("linear: cuTensorMapEncodeTiled gave %d", int(status));
}

template <typename X, int NT>
int run(const Task& task, int mode, const Division& division, const CUtensorMap& weight_map, const CUtensorMap& x_map,
        void* stream) {
  const int stage_bytes = kWeightBytes + (division.resident ? 0 : NT * 8 * 128);
  const size_t shared = 1024 + size_t(division.stages) * stage_bytes +
                        (division.resident ? size_t(division.blocks) * NT * 8 * 128 : 0);
  const auto kernel = mode == kGated ? linear_sm90a<X, kGated, NT>
                      : mode == kQkv ? linear_sm90a<X, kQkv, NT>
                                     : linear_sm90a<X, kPlain, NT>;
  const int blocks = division.total < device().multiprocessors ? division.total : device().multiprocessors;
  return launch("linear", kernel, blocks, kThreads, shared, stream, weight_map, x_map, task, division);
}

int columns_of(int tokens) { return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64; }

}  // namespace

bool hopper_linear_takes(const LinearTask& task, int mode, int64_t scratch_bytes, int num_counters) {
  if (device().capability != 90 || task.tokens > 64) return false;
  const bool rotated = mode == kQkv && task.rotary_size > 0;
  if (rotated && (task.interleaved || task.rotary_size % 16 || task.head_size % 16)) return false;
  if (mode == kGated && task.outputs / 2 % 8) return false;
  const int64_t blocks = ceil_div(task.inputs, kBlockInputs);
  if (task.norm_weight && (task.tokens > 16 || blocks * columns_of(task.tokens) * 128 > 128 * 1024)) return false;
  const int64_t parts = int64_t(device().multiprocessors) * 2 * kGroups * columns_of(task.tokens) / 8 * 128 * 16;
  return parts <= scratch_bytes && ceil_div(task.outputs, kTileRows) * kGroups <= num_counters;
}

int hopper_linear(const LinearTask& task, int mode, int variant, int dtype, void* stream) {
  const int columns = columns_of(task.tokens);
  Division division;
  division.blocks = ceil_div(task.inputs, kBlockInputs);
  division.tiles = ceil_div(task.outputs, kTileRows);
  division.total = division.blocks * division.tiles;
  division.resident = task.norm_weight != nullptr;
  const int resident_bytes = division.resident ? division.blocks * columns * 128 : 0;
  const int stage_bytes = kWeightBytes + (division.resident ? 0 : columns * 128);
  // half of the shared memory, so that the next kernel's block finds room beside this one; at least 3 stages
  int budget = device().shared_bytes / 2 - 4096 - resident_bytes;
  if (variant == 1 || budget < 3 * stage_bytes) budget = device().shared_bytes - 4096 - resident_bytes;
  division.stages = budget / stage_bytes;
  if (division.stages > kMaxStages) division.stages = kMaxStages;
  if (variant >= 2 && division.stages > variant) division.stages = variant;

  const bool paired = mode == kGated || (mode == kQkv && task.rotary_size > 0);
  CUtensorMap weight_map, x_map;
  int status = encode(&weight_map, task.weight, task.outputs, task.inputs, task.weight_stride, paired ? 8 : kTileRows, dtype);
  if (!status) status = encode(&x_map, task.x, task.tokens, task.inputs, task.x_stride, columns, dtype);
  if (status) return status;
  return for_16_bit_dtype(dtype, "linear", [&](auto zero) {
    using X = decltype(zero);
    if (columns == 8) return run<X, 1>(task, mode, division, weight_map, x_map, stream);
    if (columns == 16) return run<X, 2>(task, mode, division, weight_map, x_map, stream);
    if (columns == 32) return run<X, 4>(task, mode, division, weight_map, x_map, stream);
    return run<X, 8>(task, mode, division, weight_map, x_map, stream);
  });
}

}  // namespace tridecode
