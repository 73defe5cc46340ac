"""The sampling state, by batch slot. sampling_state.h declares its columns for C++ and Python."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from tridecode.kernels.build import source
from tridecode.kernels.library import structures

#: one slot, a structured numpy dtype whose fields are those of the C struct
SLOT = np.dtype(structures(source("sampling_state.h").read_text())["tridecode_sampling_slot"])
_TORCH = {"int32": torch.int32, "float32": torch.float32, "uint64": torch.int64}
#: values instead of a token: the row's logits are not finite; every id is impossible
BROKEN_LOGITS, NO_TOKEN = -1, -2
MOST_COUNTED = 32_767  # maximum count of a token for penalties
#: maximum number of draft tokens after a sequence's newest token
MOST_DRAFTS = 15
#: maximum number of token ids of a sequence whose logits have a bias
MOST_BIASES = 1024


@dataclass(frozen=True)
class SamplingState:
    """Device-side sampling state, one entry per batch slot. Only `sample` and the engine's slot starts and
    copies write it.

    slots: (S, W) int32, the words of one SLOT per row. last_tokens: (S,) int32. lengths: (S,) int32, tokens
    of the sequence in the cache, maintained only by `verify`: otherwise plans have them. drafts: (S,
    MOST_DRAFTS) int32, draft tokens after last_tokens, proposed by a drafter on the device. history: (S, L)
    int32, prompt and output, kept only for slots with bad words or n-grams that must not repeat. counts: (S,
    V) int16, occurrences of each id in prompt and output, kept only for slots with penalties. bad_ids,
    bad_ends: (S, W) int32: ids of all bad words, concatenated, and their cumulative ends. biases: (S,
    MOST_BIASES, 2) int32, pairs of an id and the bits of a float32; ids of a slot differ. masks: (2 * S, W)
    int32, bit id % 32 of word id // 32 is set for each possible id of the whole vocabulary, read only for
    slots that are `masked`; the address never changes, so a step may be a CUDA graph. masks[slot] is that
    of the slot's next token: a slot start writes one that holds for all tokens, and before each step of a
    sequence that obeys a grammar the step's masks replace it (engine/parts/masks.py); where a request has
    several such limits, the host ANDs them. masks[S:] are those of the tokens of one `verify`: a slot whose
    column `masked` is above 1 has masks[masked + i] behind token i of its row; `verify` leaves 1.
    started: (S,) SLOT records on the host, copies of the slots when their sequences started. Parameters equal
    those on the device; columns that sampling changes are stale.
    """

    slots: Tensor
    last_tokens: Tensor
    lengths: Tensor
    drafts: Tensor
    history: Tensor
    counts: Tensor
    bad_ids: Tensor
    bad_ends: Tensor
    masks: Tensor
    biases: Tensor
    started: np.ndarray = None  # type: ignore[assignment]  # the default: read from slots

    def __post_init__(self) -> None:
        if self.started is None:
            object.__setattr__(self, "started", records(self.slots).copy())

    @classmethod
    def allocate(
        cls,
        slots: int,
        max_tokens: int,
        vocab_size: int,
        max_bad_word_tokens: int,
        device: torch.device,
        whole_vocab_size: int | None = None,
    ) -> SamplingState:
        """Allocate for `slots` sequences of up to max_tokens tokens; every slot draws from the whole
        vocabulary.

        vocab_size: columns of this rank's logits. whole_vocab_size: ids of all ranks; None: the same.
        """
        neutral = np.zeros(slots, SLOT)
        for name in ("temperature", "top_p", "top_p_now", "top_p_decay", "typical_p", "repetition_penalty"):
            neutral[name] = 1
        neutral["end_ids"] = neutral["top_p_reset_id"] = neutral["top_log_probs"] = -1

        def zeros(columns: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(slots, columns, dtype=dtype, device=device)

        return cls(
            slots=words(neutral).to(device),
            last_tokens=zeros(1)[:, 0],
            lengths=zeros(1)[:, 0],
            drafts=zeros(MOST_DRAFTS),
            history=zeros(max_tokens),
            counts=zeros(vocab_size, torch.int16),
            bad_ids=zeros(max_bad_word_tokens),
            bad_ends=zeros(max_bad_word_tokens),
            masks=torch.zeros(
                2 * slots, mask_words(whole_vocab_size or vocab_size), dtype=torch.int32, device=device
            ),
            biases=zeros(2 * MOST_BIASES).view(slots, MOST_BIASES, 2),
            started=neutral.copy(),
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors; the first axis of each begins with the slots."""
        values = (getattr(self, field.name) for field in fields(self))
        return [value for value in values if isinstance(value, Tensor)]

    def column(self, name: str) -> Tensor:
        """Return a field of every slot, (S,) or, for an array, (S, n): a view in the field's dtype."""
        kind, offset = SLOT.fields[name][:2]  # type: ignore[index]
        values, first = self.slots.view(_TORCH[kind.base.name]), offset // kind.base.itemsize
        return values[:, first : first + kind.shape[0]] if kind.shape else values[:, first]


@dataclass(frozen=True)
class SlotRows:
    """The slots of n rows of logits whose columns are the ids first_id and up.

    slots: (n,) int64. records: (n,) SLOT records on the host, whose parameters are valid. first_id: applies
    to the columns of state.counts, too.
    """

    state: SamplingState
    slots: Tensor
    records: np.ndarray
    first_id: int = 0

    def column(self, name: str) -> Tensor:
        """Return a field of the rows' slots, (n, 1) or, for an array, (n, k): a copy in the field's dtype."""
        values = self.state.column(name)[self.slots]
        return values if values.dim() > 1 else values[:, None]

    def part(self, rows: slice | np.ndarray) -> SlotRows:
        """Return some of the rows, given as a slice or indices."""
        index = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self.slots.device)
        return SlotRows(self.state, self.slots[index], self.records[rows], self.first_id)


def mask_words(vocab_size: int) -> int:
    """Return the words of 32 bits in a mask of this vocabulary."""
    return -(-vocab_size // 32)


def words(records: np.ndarray) -> Tensor:
    """Return (R, W) int32, the words of (R,) SLOT records, in their memory."""
    return torch.from_numpy(records.view(np.int32).reshape(len(records), -1))


def records(words: Tensor) -> np.ndarray:
    """Return (R,) SLOT records of (R, W) int32 words; a copy if these are on a device."""
    return words.cpu().numpy().view(SLOT)[:, 0]
