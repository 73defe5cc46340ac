"""Memory that the engine allocates on one GPU, by format: the table of docs/guides/quantization.md.

    python -m tridecode.tools.bench.studies.memory_table

The figures are those of the plan that `tridecode doctor` makes, for 256 sequences and the steps of a large
GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.memory import LIBRARY_BYTES, RankMemory, plan_rank
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.tools.bench.shapes.presets import QUANTIZATIONS, preset

CARDS = (80 * 10**9, 141 * 10**9)
_TOKENS = 1024
#: title, name in QUANTIZATIONS, int8_head, kv_cache_dtype
FORMATS = (
    ("16 bit", "", False, "auto"),
    ("16 bit, cache in 8 bit", "", False, "fp8"),
    ("int8", "int8", False, "auto"),
    ("int8, head too", "int8", True, "auto"),
    ("int4, int8 head", "int4", True, "auto"),
    ("W8A8, int8 head", "w8a8-int8", True, "auto"),
    ("W8A8, int8 head, cache in 8 bit", "w8a8-int8", True, "fp8"),
    ("fp8 in blocks, int8 head, cache in 8 bit", "w8a8-fp8-blocks", True, "fp8"),
    ("int4, int8 head, cache in 8 bit", "int4", True, "fp8"),
)


def plan(
    name: str, quantization: str, int8_head: bool, cache: str, slots: int = 256, step: int = 0
) -> RankMemory:
    """Plan the memory of a preset on a large GPU. step: max_step_tokens; 0: the engine's choice."""
    chosen = preset(name)
    model = replace(chosen.model, quantization=QUANTIZATIONS[quantization] if quantization else None)
    config = EngineConfig(
        data_type=chosen.dtype,
        max_sequences=slots,
        max_step_tokens=step or None,
        int8_head=int8_head,
        kv_cache_dtype=cache,
    )
    return plan_rank(model, resolve(config, model, torch.device("cuda"), CARDS[0]), 0, 0, "cuda")


def sequences(found: RankMemory, card: int, block_tokens: int = EngineConfig.block_tokens) -> int:
    """Return how many sequences of 1,024 tokens fit into memory_fraction of a card in addition to the
    rest.
    """
    room = int(card * EngineConfig.memory_fraction) - found.fixed - LIBRARY_BYTES
    return max(room, 0) // (_TOKENS // block_tokens * found.block)


def rows(name: str) -> list[str]:
    """Return the table rows of a preset."""
    lines = []
    for title, quantization, int8_head, cache in FORMATS:
        found = plan(name, quantization, int8_head, cache)
        blocks = _TOKENS // EngineConfig.block_tokens
        cells = [
            f"{found.weights / 1e9:.2f}",
            f"{found.fixed / 1e9:.2f}",
            f"{blocks * found.block / 1e6:.0f}",
        ]
        cells += [f"{sequences(found, card):,}" for card in CARDS]
        lines.append(f"| {name}, {title} | {' | '.join(cells)} |")
    return lines


def share(slots: int, step: int) -> str:
    """Return the share of BLOOM-7B1's 16-bit memory that int8 with an int8 head needs."""
    whole, int8 = (plan("bloom-7b1", *chosen[1:], slots, step).fixed for chosen in (FORMATS[0], FORMATS[3]))
    sizes = f"{int8 / 1e9:.2f} of {whole / 1e9:.2f} GB, {int8 / whole:.1%}"
    return f"bloom-7b1, {slots} sequences, steps of {step:,} tokens: int8 takes {sizes}"


def main() -> None:
    print("| | weights, GB | with buffers, GB | sequence, MB | on 80 GB | on 141 GB |")
    print("|---|---|---|---|---|---|")
    for name in ("bloom-7b1", "llama-3-8b"):
        print("\n".join(rows(name)))
    for slots, step in ((64, 2048), (64, 8192), (256, 8192), (256, 16384)):
        print(share(slots, step))


if __name__ == "__main__":
    main()
