// Memory of the ranks of one host, mapped by each of them (tridecode_peer_allocate): its header,
// accesses at system scope, and waits with a time limit. Kernels that wait for a peer rely on
// blocks being dispatched in order: then the blocks of the lowest unfinished row run on every rank.
#pragma once
#include "common/common.cuh"

namespace tridecode {

constexpr int kMostRanks = 8;

// The header of a rank's own memory; data written by peers follows at kPeerHeader.
struct PeerState {
  unsigned int tickets;
  // 1 + a rank that did not arrive in time, 0: none. Once set, no launch waits any more.
  unsigned int broken;
  unsigned int named;  // the host knows
};
constexpr int kPeerHeader = 256;

__device__ __forceinline__ uint4 load_system(const char* from) {
  uint4 words;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}

__device__ __forceinline__ void store_system(char* to, const uint4& words) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

__device__ __forceinline__ unsigned int load_system(const unsigned int* from) {
  unsigned int word;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The time limit of a wait: limit_ns, or none left if another wait has already timed out. lost:
// pinned host memory, set to 1 + the missing rank.
struct Patience {
  PeerState* state;
  int64_t limit_ns;
  int* lost;
  uint64_t started = 0;
  int tries = 0;

  __device__ __forceinline__ bool is_over(int missing) {
    if (++tries % 1024 != 0) return false;
    const uint64_t now = nanoseconds();
    if (!started) started = now;
    if (now - started < uint64_t(limit_ns) && !load_system(&state->broken)) return false;
    if (atomicCAS(&state->broken, 0u, 1u + missing) == 0) {
      state->named = 1;
      *reinterpret_cast<volatile int*>(lost) = 1 + missing;
      __threadfence_system();
    }
    return true;
  }
};

}  // namespace tridecode
