// Waits of blocks for other blocks of their launch. They end only if those blocks are resident at
// once or have run, so such a kernel is launched with launch_resident.
//
// In a debug build (kernels/build.py --debug) every such wait has a limit: a block that has waited
// for kSpinLimit writes a SpinRecord to pinned memory, which a thread of the host prints, and
// traps. Neither needs a function call: with one (assert, printf) ptxas serialises the wgmma
// instructions of all these kernels, without only those of gemm_int4_stream_k_sm90 for 64 tokens.
// In other builds Spin is empty, and loops compile to the same code as without it. TRIDECODE_DEBUG
// is the name of the compiled file, which is that of its waiting kernel.
#pragma once
#include "common/common.cuh"

namespace tridecode {

// The reasons for waits; debug.cu has their texts.
enum Wait : unsigned int {
  kNothing = 0,
  kSumsBehind,      // partial sums of the clusters after this one
  kSumsOfTile,      // sums of the tile's other clusters
  kTilesBefore,     // tiles of the products before
  kWordsOfX,        // words of x from the product before
  kWordsOfResidual  // words of the residual from an earlier product
};

#ifdef TRIDECODE_DEBUG

// A wait of one kernel that exceeded the limit. wait: kNothing until the rest is written.
struct SpinRecord {
  unsigned int wait, block, blocks, thread;
};
constexpr unsigned int kSpinLimit = 2000;  // in 2^20 ns

// Registers the waiting kernel of a file, and a function that stores the address of its record in
// device memory. tridecode_initialize calls it.
void at_initialize(const char* kernel, int (*set)(SpinRecord* record));
// The number of blocks that can be resident at once, in clusters of the kernel's own size.
int resident_blocks(const char* what, const void* kernel, int threads, size_t shared, int* blocks);

namespace {

__device__ SpinRecord* spin_record;
__device__ unsigned int spin_recorded;
[[maybe_unused]] const bool spin_is_registered =
    (at_initialize(TRIDECODE_DEBUG,
                   [](SpinRecord* record) {
                     return check(cudaMemcpyToSymbol(spin_record, &record, sizeof(record)),
                                  "spin record");
                   }),
     true);

// The time limit of a wait: Spin spin(kSumsOfTile); while (...) spin.again();
class Spin {
 public:
  __device__ __forceinline__ explicit Spin(Wait wait) : wait_(wait) {}

  // Called after each failed attempt.
  __device__ __forceinline__ void again() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    const auto now = static_cast<unsigned int>(nanoseconds >> 20);
    if (!started_) started_ = now;  // one register: the kernels have few left
    if (now - started_ > kSpinLimit) give_up();
  }

 private:
  __device__ __forceinline__ void give_up() const {
    int milliseconds = 1000;  // a trap would stop the block that records its own wait
    if (atomicExch(&spin_recorded, 1u) == 0) {
      volatile SpinRecord* const to = spin_record;
      to->block = blockIdx.x, to->blocks = gridDim.x, to->thread = threadIdx.x;
      __threadfence_system();
      to->wait = wait_;
      milliseconds = 100;  // until the host has printed it
    }
#pragma unroll 1
    for (; milliseconds > 0; --milliseconds) __nanosleep(1'000'000);
    __trap();
  }

  Wait wait_;
  unsigned int started_ = 0;
};

}  // namespace

#else

class Spin {
 public:
  __device__ __forceinline__ explicit Spin(Wait) {}
  __device__ __forceinline__ void again() const {}
};

#endif

// launch() for a kernel whose blocks wait for each other. A debug build checks that all blocks can
// be resident at once. Only the stream of steps may launch one, because two of them at once could
// each keep blocks of the other waiting; kernels of other streams may run at the same time if they
// end by themselves (docs/design/adding_an_operation.md).
template <typename... Parameters, typename... Arguments>
int launch_resident(const char* what, void (*kernel)(Parameters...), int blocks, int threads,
                    size_t shared, void* stream, Arguments... arguments) {
#ifdef TRIDECODE_DEBUG
  int most = 0;
  if (int status =
          resident_blocks(what, reinterpret_cast<const void*>(kernel), threads, shared, &most))
    return status;
  if (blocks > most)
    return fail("%s: %d blocks wait for each other; %d can be resident at once", what, blocks,
                most);
#endif
  return launch(what, kernel, blocks, threads, shared, stream, arguments...);
}

}  // namespace tridecode
