"""Chooses between the chained-GEMM kernel (chain.py) and single GEMMs. Needs neither torch nor a GPU."""

from __future__ import annotations

#: the most tokens of a launch, for dense products with a hidden size of at most CHAIN_OUTPUTS; one token for
#: all others. ms per step on an H200, chained and as single products, at 2, 3 and 4 rows: GPT-2 (768) 0.283,
#: 0.310, 0.316 and 0.387, 0.338, 0.345; BLOOM-560M (1024) 0.669, 0.740, 0.753 and 0.902, 0.866, 0.871;
#: LLaMA-3-8B (4096) is slower from 2 rows on
CHAIN_TOKENS, CHAIN_OUTPUTS = 4, 1024
#: and the most inputs of dense products, if none adds to a stream, and if one does. ms per step on an H200,
#: single and chained: Qwen2-7B (18944 inputs) 3.966 and 3.757, GPT-NeoX-20B (24576) 10.51 and 11.47
CHAIN_INPUTS = (18944, 28672)


def chain_tokens(operand: str, outputs: int, inputs: int, adds: bool) -> int:
    """Return the most tokens for which the chained-GEMM kernel is faster than single GEMMs; 0: it never is.

    operand: a name of tridecode_operand. outputs: the fewest of a GEMM. inputs: the most. adds: to a stream.
    """
    few = CHAIN_TOKENS if outputs <= CHAIN_OUTPUTS else int(inputs <= CHAIN_INPUTS[adds])
    return few if operand == "dense" else 1
