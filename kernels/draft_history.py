"""The tokens in which `look_up` finds drafts: those of each slot, and a ring of finished answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: a longer match is counted as one of this many tokens; a shorter one than LEAST_MATCH as none
MOST_MATCH, LEAST_MATCH = 32, 2
#: between two entries of the ring; equal to no token
SEPARATOR = -1
#: columns of `found`: matched tokens; where they are; whether the draft before was right
MATCHED, SOURCE, AGREED = range(3)
#: values of SOURCE: none, the sequence itself, the ring under the slot's first and second scope
NOWHERE, OWN, ANSWER, CLIENT = range(4)


@dataclass(frozen=True)
class DraftHistory:
    """Tokens by batch slot, and the ring. S slots, W tokens of a sequence at most, R tokens in the ring.

    tokens: (S, W) int32, prompt and output. lengths: (S,) int32, their number. scopes: (S, 2) int32, the
    scopes in which a slot may find answers, and the client's drafts; -1: none. ring: (R,) int32, finished
    answers, each between two SEPARATORs. ring_scopes: (R,) int32, the scope of each of its tokens. used: (1,)
    int32, how many of the ring's first tokens are searched. best: (S, 2) int64, scratch of one launch, 0.
    """

    tokens: Tensor
    lengths: Tensor
    scopes: Tensor
    ring: Tensor
    ring_scopes: Tensor
    used: Tensor
    best: Tensor

    @classmethod
    def allocate(cls, slots: int, max_tokens: int, ring: int, device: torch.device) -> DraftHistory:
        def filled(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return cls(
            tokens=filled(slots, max_tokens),
            lengths=filled(slots),
            scopes=filled(slots, 2, value=-1),
            ring=filled(ring, value=SEPARATOR),
            ring_scopes=filled(ring, value=-1),
            used=filled(1),
            best=torch.zeros((slots, 2), dtype=torch.int64, device=device),
        )
