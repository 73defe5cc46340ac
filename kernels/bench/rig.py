"""The device, the operations and the random operands that all benchmarks use."""

from __future__ import annotations

import torch
from torch import Tensor

from tridecode.kernels.cuda import Cuda
from tridecode.kernels.formats.kv_rounding import CACHE_DTYPES, rounded
from tridecode.kernels.operands import Batch, CacheLayer
from tridecode.kernels.sampling_state import SamplingState

HALF = torch.float16


class Rig:
    """A GPU and its operations, with enough scratch memory for every case."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.ops = Cuda(self.device)
        self.ops.reserve(8192, 32768, 256, 8192, 262144, context_bytes=8192 * 2 * 32 * 128 * 2)
        torch.manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(HALF)

    def ints(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self.device)

    def batch(self, contexts: list[int], queries: list[int], tables: Tensor, decodes: int) -> Batch:
        starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
        tokens = starts[-1]
        return Batch(
            token_ids=self.ints([0] * tokens),
            positions=self.ints([0] * tokens),
            kv_slots=self.ints([-1] * tokens),
            block_tables=tables,
            context_lens=self.ints(contexts),
            query_starts=self.ints(starts),
            sample_tokens=self.ints([0]),
            sample_slots=self.ints([0]),
            num_decodes=decodes,
            max_query=max(queries) if decodes == 0 else 0,
            max_context=max(contexts),
            fresh_prompts=decodes == 0,
        )

    def cache(self, shape: tuple[int, ...], name: str = "") -> CacheLayer:
        """Return random keys and values, in 16 bits or in the 8-bit format `name`."""
        blocks = self.normal(*shape)
        return CacheLayer(*rounded(blocks, CACHE_DTYPES[name])) if name else CacheLayer(blocks)

    def state(self, slots: int, vocab: int, **columns: float) -> SamplingState:
        state = SamplingState.allocate(slots, 8, vocab, 8, self.device)
        for name, value in columns.items():
            state.column(name).fill_(value)
        return state
