// GEMMs of 1 to 4 tokens in one launch that read each other's results, with weights in 16, 8 or 4
// bit: in a decoder layer, attention's output projection, the MLP, and the next layer's projection
// to queries, keys and values.
//
// One persistent block per multiprocessor: a producer warp, two teams of eight consumer warps, and
// finisher warps. The producer copies the weights of all GEMMs through one ring of shared memory,
// so that memory stays busy while the consumers wait for other blocks between two GEMMs. A tile is
// two groups of 8 weight rows; with SwiGLU, 8 gate rows and their 8 up rows. Tiles are assigned
// round-robin, continuing from GEMM to GEMM. A stage is a tile times some inputs. The teams
// alternate in consuming stages; the warps of a team share a stage's inputs and multiply by
// mma.sync, with weights as the 16 rows of the instruction and tokens as its 8 columns. The
// finishers add up the warps' sums and apply the epilogue.
//
// Results that a later GEMM reads pass through the exchange in global memory: words of two numbers
// and the launch's number. A fence would wait microseconds for all copies in flight; a word with
// this launch's number is complete without one. A block begins a GEMM when it has all words of x,
// so the GEMM that computes x is then finished everywhere. A counter of finished tiles tells when
// polling the words is worthwhile. Every block normalises the rows of x itself and, for weights in
// 8 and 4 bit, quantises them to int8 or E4M3 as defined by kernels/formats/quantized.py.
//
// In a layer with norms around attention and MLP, every block also adds the normalised result to
// the residual stream. It keeps the first sum in shared memory for the second, which one block
// stores: by then all blocks have read the stream.
//
// Attention and MLP of one of two tensor ranks each give a part of a sum. A finisher stores the
// words of its part in the other rank's memory as well, and every block adds both ranks' words to
// the residual stream when it reads them. Each of the two sums has one buffer. A rank that sends
// the first sum has finished the launch before; so the other rank had sent its second sum, and had
// read the first. A rank that sends the second sum has received the first sum of this launch; so
// the other rank has finished the launch before. A wait for the other rank has a time limit; a
// debug build ends waits for blocks of this launch earlier.
//
// In a layer whose attention and MLP read the same rows, the first GEMM of the MLP and the output
// projection wait for no other GEMM of the launch.
//
// A token takes columns 2 t and 2 t + 1, one for each int8 part of x, or only the first: so a lane
// holds the sums of one token.
//
// Weights in 16 and 8 bit are stored in rows; a box is 128 bytes of 8 rows, with the 128-byte
// swizzle. Weights in 4 bit are granules (packed_weight.cuh) with their words of scale and zero.
//
// Bytes moved: all weights, once.
// Bench: python -m tridecode.kernels.bench product_chain
#include "api/chain.h"
#include "api/operands.h"
#include "gemm/chain/product_chain.cuh"
#include "gemm/chain/product_chain_consumer.cuh"
#include "gemm/chain/product_chain_finish.cuh"
#include "gemm/chain/product_chain_rows.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The producer's warp.
template <Values VALUES>
struct Producer {
  using F = Format<VALUES>;
  const Chain& chain;
  const Maps& maps;
  char* ring;
  uint64_t *full, *empty;
  int slot = 0, parity = 1, issued = 0;
  int oldest = 0, oldest_parity = 0;  // the slot of the oldest copy in flight

  // Loads four granules side by side: values of both groups of eight rows, then their scales and
  // zeros.
  __device__ __forceinline__ void copy_granules_of(const Step& step, int first, int unit, int units,
                                                   char* to, uint64_t policy) const {
    const int lane = threadIdx.x % 32;
    const int bytes = lane < 2 ? units * kGranuleBytes : units * kGranuleRows * 4;
    if (lane == 0) barrier_expect(full + slot, 2 * units * (kGranuleBytes + kGranuleRows * 4));
    __syncwarp();
    if (lane >= 4) return;
    const int chunks = step.given.inputs / 128;
    const int eight = first + lane % 2 * step.second;
    const int64_t at = int64_t(eight) * chunks + unit;
    const char* const from =
        lane < 2 ? static_cast<const char*>(step.given.weight) + at * kGranuleBytes
                 : reinterpret_cast<const char*>(step.given.weight_groups) + at * kGranuleRows * 4;
    const int place =
        lane < 2 ? lane * F::kEightBytes : 2 * F::kEightBytes + (lane - 2) * F::kGroupBytes;
    copy_bulk(to + place, from, bytes, full + slot, policy);
  }

  __device__ __forceinline__ void copy_boxes(const Step& step, const CUtensorMap* map, int first,
                                             int unit, char* to, uint64_t policy) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) barrier_expect(full + slot, F::kStageBytes);
    __syncwarp();
    if (lane >= 2) return;
    const int eight = first + lane * step.second;
    copy_blocks(to + lane * F::kEightBytes, map, eight * 8, unit, full + slot, policy);
  }

  __device__ __forceinline__ void run() {
    const uint64_t policy = evict_first();
    int turn = 0;
    for (int i = 0; i < chain.count; ++i) {
      const Step& step = chain.steps[i];
      const int units = step.given.inputs / F::kUnitInputs, stages = ceil_div(units, F::kUnits);
      const int from = blockIdx.x % stages;
      for (int tile = first_tile(turn); tile < step.tiles; tile += gridDim.x) {
        const int eight = eight_of(step, tile);
        for (int stage = 0; stage < stages; ++stage) {
          barrier_wait(empty + slot, parity);
          if (issued++ >= chain.in_flight) {
            barrier_wait(full + oldest, oldest_parity);
            if (++oldest == chain.stages) oldest = 0, oldest_parity ^= 1;
          }
          const int unit = rotated(stage, from, stages) * F::kUnits;
          char* const to = ring + slot * F::kStageBytes;
          if constexpr (F::k4Bit) {
            copy_granules_of(step, eight, unit, min(F::kUnits, units - unit), to, policy);
          } else {
            copy_boxes(step, maps.of + i, eight, unit, to, policy);
          }
          if (++slot == chain.stages) slot = 0, parity ^= 1;
        }
      }
      turn = (turn + step.tiles) % int(gridDim.x);
    }
  }
};

#endif

template <typename X, Values VALUES>
__global__ void __launch_bounds__(kThreads, 1)
    product_chain_sm90a(const __grid_constant__ Chain chain, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using F = Format<VALUES>;
  extern __shared__ char raw[];
  char* const ring = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ Declared declared;
  if (threadIdx.x == 0) initialize(declared, chain.stages);
  __syncthreads();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  keep(lane);
  if (warp >= kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    if (warp == kWarps + kFinishers)
      Producer<VALUES>{chain, maps, ring, declared.full, declared.empty}.run();
    if (warp < kWarps + kFinishers) {
      const Places places = Places::of<VALUES>(chain, declared, ring);
      wait_for_predecessor();
      const unsigned int launch = load_relaxed(chain.counters + 1) + 1;
      Finisher<X, VALUES>{chain, places, launch, lane, warp - kWarps}.run();
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
  const Places places = Places::of<VALUES>(chain, declared, ring);
  wait_for_predecessor();
  const unsigned int launch = load_relaxed(chain.counters + 1) + 1;
  Consumer<X, VALUES> consumer(chain, places, launch, lane, warp);
  for (int i = 0; i < chain.count; ++i) consumer.multiply(i);
#endif
}

constexpr int kHeaderWords = 32;  // of the exchange
constexpr int kAlignment = 1024,
              kDeclared = 2048;  // bytes of the ring, and of the kernel's static shared memory

// Bytes of shared memory for rows of x and the sums of their groups.
template <Values VALUES>
constexpr int group_bytes(int inputs, int tokens) {
  return Format<VALUES>::k4Bit ? ceil_div(inputs / 128 * tokens, 4) * 16 : 0;
}
// And for the rows of a stream of `columns`.
template <Values VALUES>
constexpr int64_t row_bytes(int inputs, int columns, int tokens) {
  using F = Format<VALUES>;
  return int64_t(inputs) * F::kXBytes * (F::kTwo ? 2 * tokens : tokens) +
         group_bytes<VALUES>(inputs, tokens) + int64_t(columns) * 2 * tokens;
}

template <Values VALUES>
int stages_of(int inputs, int columns, int tokens) {
  using F = Format<VALUES>;
  if (tokens > kMaxTokens) return 0;
  const int64_t rest = device().shared_bytes - kSharedLeft - kAlignment - kDeclared - F::kSumBytes -
                       row_bytes<VALUES>(inputs, columns, tokens);
  const int64_t stages = rest / F::kStageBytes;
  return rest < 0 ? 0 : stages < kMaxStages ? int(stages) : kMaxStages;
}

template <typename Body>
int for_values(int operand, Body body) {
  if (operand == kOperandInt8) return body(std::integral_constant<Values, kOperandInt8>());
  if (operand == kOperandFp8) return body(std::integral_constant<Values, kOperandFp8>());
  if (operand == kOperandTwoParts) return body(std::integral_constant<Values, kOperandTwoParts>());
  if (operand == kOperandTwoPartsInt4)
    return body(std::integral_constant<Values, kOperandTwoPartsInt4>());
  if (operand == kOperandDense) return body(std::integral_constant<Values, kOperandDense>());
  return fail("product_chain_sm90a: operand code %d; wanted 0 to 4", operand);
}

int check_step(const Step& step, int number) {
  const auto& given = step.given;
  if (given.inputs % 128 || given.outputs % (step.gated ? 32 : 16) || given.inputs <= 0)
    return fail(
        "product_chain_sm90a: product %d has %d inputs, %d outputs; wanted multiples of "
        "128 and %d",
        number, given.inputs, given.outputs, step.gated ? 32 : 16);
  const void* const read[] = {given.out,          given.x,           given.weight,
                              given.residual,     given.norm_weight, given.norm_bias,
                              given.outer_weight, given.stream};
  for (const void* each : read)
    if (!aligned16(each))
      return fail("product_chain_sm90a: product %d has an address that is no multiple of 16",
                  number);
  return 0;
}

// Finds the first GEMM with a stream, and checks that the second can store to it: all blocks have
// then read it. columns: of the stream, 0 without one.
int find_stream(Chain& chain, int& columns) {
  int found = 0, at = 0;
  for (int i = 0; i < chain.count; ++i) {
    Step& step = chain.steps[i];
    const auto &given = step.given, &earlier = chain.steps[at].given;
    if (!given.stream) continue;
    const bool centred = given.norm_bias && given.outer_weight;  // not implemented
    if (!given.outer_weight && !step.their_words)
      return fail("product_chain_sm90a: the stream of product %d has no norm and no sum", i);
    if (++found == 1) {
      at = i, columns = given.inputs, step.keeps = true;
      if (centred || step.tiles < device().multiprocessors)
        return fail("product_chain_sm90a: product %d has a stream and %d tiles; wanted %d", i,
                    step.tiles, device().multiprocessors);
    } else if (found > 2 || i < at + 2 || centred || given.stream != earlier.stream ||
               given.inputs != earlier.inputs || !step.x_words) {
      return fail("product_chain_sm90a: product %d cannot add to the stream of product %d", i, at);
    }
  }
  return found == 1 ? fail("product_chain_sm90a: only product %d has a stream", at) : 0;
}

// Gives the parts of sums over two ranks their addresses at `words`, where those of the other rank
// arrive, and in its memory; `words` goes beyond them.
int place_sums(Chain& chain, const tridecode_chain_task& task, uint64_t*& words) {
  const auto given = static_cast<const tridecode_chain_step*>(task.steps);
  int found = 0;
  for (int i = 0; i < chain.count; ++i) {
    if (!given[i].over_ranks) continue;
    const int64_t at = words - static_cast<uint64_t*>(task.exchange);
    int reader = i + 1;
    while (reader < chain.count && (given[reader].x != given[i].out || !given[reader].stream))
      ++reader;
    if (reader == chain.count || given[reader].inputs != given[i].outputs || given[i].residual ||
        given[i].activation || !task.peer_exchange)
      return fail("product_chain_sm90a: product %d cannot be summed over the ranks", i);
    chain.steps[i].sent_words = static_cast<uint64_t*>(task.peer_exchange) + at;
    chain.steps[reader].their_words = words;
    words += int64_t(task.tokens) * (given[i].outputs / 2);
    ++found;
  }
  return found == 0 || found == 2
             ? 0
             : fail("product_chain_sm90a: %d sums over the ranks; wanted 2", found);
}

// bytes: length of a row, which is mapped as 16-bit numbers.
int encode_rows(CUtensorMap* map, const tridecode_chain_step& step, int bytes, int boxes) {
  const cuuint64_t sizes[] = {64, cuuint64_t(step.outputs), cuuint64_t(bytes / 128)};
  const cuuint64_t strides[] = {cuuint64_t(bytes), 128};
  const cuuint32_t box[] = {64, 8, cuuint32_t(boxes)};
  return encode_map(map, step.weight, 3, sizes, strides, box, kFloat16);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int64_t tridecode_product_chain_stages(int inputs, int stream_columns, int tokens, int operand) {
  return for_values(operand, [&](auto values) {
    return stages_of<decltype(values)::value>(inputs, stream_columns, tokens);
  });
}

int tridecode_product_chain_sm90a(const tridecode_chain_task* task, void* stream) {
  const char* const name = "product_chain_sm90a";
  const auto given = static_cast<const tridecode_chain_step*>(task->steps);
  if (task->num_steps < 1 || task->num_steps > kMaxSteps || device().capability != 90)
    return fail("%s: %d products on sm_%d; wanted 1 to %d on sm_90", name, task->num_steps,
                device().capability, kMaxSteps);
  Chain chain = {};
  chain.count = task->num_steps, chain.tokens = task->tokens;
  chain.counters = static_cast<unsigned int*>(task->exchange);
  uint64_t* words = static_cast<uint64_t*>(task->exchange) + kHeaderWords;
  chain.state = static_cast<PeerState*>(task->memory), chain.limit_ns = task->limit_ns;
  chain.lost = task->lost, chain.peer = task->peer;
  if (int status = place_sums(chain, *task, words)) return status;
  int most_inputs = 0, turn = 0;
  for (int i = 0; i < chain.count; ++i) {
    Step& step = chain.steps[i];
    step.given = given[i];
    step.gated = is_gated(given[i].activation);
    step.first_block = turn % device().multiprocessors, turn += given[i].outputs / 16;
    step.tiles = given[i].outputs / 16, step.second = step.gated ? given[i].outputs / 16 : 1;
    if (int status = check_step(step, i)) return status;
    step.stores = !given[i].over_ranks;
    for (int j = i - 1; j >= 0; --j) {  // the last earlier GEMM that writes its input
      Step& earlier = chain.steps[j];
      if (given[i].x == given[j].out && !step.x_words) step.x_words = earlier.out_words;
      if (given[i].residual && given[i].residual == given[j].out && !step.residual_words)
        step.residual_words = earlier.out_words;
      // stores of different GEMMs are not ordered
      if (given[i].out == given[j].out) earlier.stores = false;
    }
    step.out_words = words;
    words += int64_t(task->tokens) * (given[i].outputs / (step.gated ? 4 : 2));
    if (given[i].inputs > most_inputs) most_inputs = given[i].inputs;
    const int tokens = task->tokens;
    const int held = kHeld * 256 * warps_of_token(tokens);
    if ((given[i].norm_weight || given[i].stream) && given[i].inputs > held)
      return fail("%s: a norm of %d inputs, %d tokens; wanted at most %d", name, given[i].inputs,
                  tokens, held);
  }
  const int64_t needed = reinterpret_cast<char*>(words) - static_cast<char*>(task->exchange);
  if (needed > task->exchange_bytes)
    return fail("%s: %lld bytes of the exchange; wanted at least %lld", name,
                (long long)task->exchange_bytes, (long long)needed);
  chain.steps[chain.count - 1].out_words = nullptr;
  int columns = 0;
  if (int status = find_stream(chain, columns)) return status;
  return for_16_bit_dtype(task->dtype, name, [&](auto x) {
    using X = decltype(x);
    return for_values(task->operand, [&](auto values) {
      constexpr Values kValues = decltype(values)::value;
      using F = Format<kValues>;
      chain.columns = F::kTwo ? 2 * chain.tokens : chain.tokens;
      const int most =
          chain.tokens < 1 ? 0 : stages_of<kValues>(most_inputs, columns, chain.tokens);
      if (most < kLeastStages)
        return fail("%s: %d tokens of %d inputs leave no room for weights", name, chain.tokens,
                    most_inputs);
      chain.stages = most;
      // a barrier tells only the parity of a slot's round: no team may be a round ahead of a copy
      const int room = chain.stages - kTeams;
      chain.in_flight = room < kInFlight ? room : kInFlight;
      chain.x_bytes = most_inputs * F::kXBytes * chain.columns;
      chain.group_bytes = group_bytes<kValues>(most_inputs, chain.tokens);
      Maps maps = {};
      for (int i = 0; i < chain.count && !F::k4Bit; ++i)
        if (int status =
                encode_rows(maps.of + i, given[i], given[i].inputs * F::kXBytes, F::kUnits))
          return status;
      const size_t shared = kAlignment + size_t(chain.stages) * F::kStageBytes + F::kSumBytes +
                            row_bytes<kValues>(most_inputs, columns, chain.tokens);
      return launch_resident(name, product_chain_sm90a<X, kValues>, device().multiprocessors,
                             kThreads, shared, stream, chain, maps);
    });
  });
}
