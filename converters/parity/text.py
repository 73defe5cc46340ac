"""Compares a converted model with its source on given texts, token by token: both read the same tokens.

The source's logits wait in a file of at most MAX_LOGITS_BYTES, because the two models are in memory one
after the other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.offline import read_prompts
from tridecode.converters.parity.quantized import divergence
from tridecode.converters.quantize.texts import GivenText, token_sequences

#: tokens of a sequence, and of all together; more are ignored
SEQUENCE_TOKENS = 256
MAX_TOKENS = 4096
#: bytes of the source's logits; with a large vocabulary fewer tokens are read
MAX_LOGITS_BYTES = 2 << 30
_ITEM = 4  # bytes of a logit


@dataclass(frozen=True)
class TextParity:
    """The model against its source after each token of given texts (teacher forcing).

    tokens: predictions that were compared. mean_kl, largest_kl: of the source's distribution from ours, in
    nats. agreement: share of predictions with the same arg max. source_loss, loss: mean negative log
    probability of the text's next token, in nats. largest_logit_error: absolute.
    """

    file: str
    sha256: str
    sequences: int
    tokens: int
    mean_kl: float
    largest_kl: float
    agreement: float
    source_loss: float
    loss: float
    largest_logit_error: float
    largest_logit: float

    def summary(self) -> str:
        """Describe the result."""
        return (
            f"on {self.tokens:,} tokens of {self.file}: mean KL {self.mean_kl:.3g} nats, largest "
            f"{self.largest_kl:.3g}, the same next token on {self.agreement:.1%}, loss {self.loss:.4g} nats "
            f"(source {self.source_loss:.4g})"
        )


class TextComparison:
    """First `read_source`, then `compare`.

    config.vocab_size: ids that are compared. folder: for the file of logits. columns: of our model's logits.
    Raises ConfigError if the texts have no token of the model.
    """

    def __init__(
        self,
        given: GivenText,
        tokenizer: PreTrainedTokenizerBase,
        config: ModelConfig,
        folder: Path,
        columns: int,
    ):
        self._columns = columns
        longest = min(SEQUENCE_TOKENS, config.max_positions - 1)
        total = max(min(MAX_TOKENS, MAX_LOGITS_BYTES // (_ITEM * config.vocab_size)), 1)
        self._given, self._vocab_size = given, config.vocab_size
        self.sequences = token_sequences(given.texts, tokenizer, config.vocab_size, longest, total)
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by compare

    def read_source(self, model: Module, device: torch.device) -> None:
        """Keep the logits of transformers' model, which is on `device`."""
        with torch.inference_mode():
            for ids in self.sequences:
                logits = model(torch.tensor([ids], device=device), use_cache=False).logits[0]
                self._file.write(logits[:, : self._vocab_size].float().cpu().contiguous().numpy().data)

    def compare(self, weights: Path, engine: EngineConfig) -> TextParity:
        """Let the engine of `weights` read the texts, compare, and close the file."""
        self._file.seek(0)
        divergences, equal, losses, errors, largest = [], 0, [0.0, 0.0], [], 0.0
        with self._file:
            for ids, whole in zip(self.sequences, self._ours(weights, engine)):
                ours = whole[:, : self._vocab_size]
                read = self._file.read(len(ids) * self._vocab_size * _ITEM)
                theirs = np.frombuffer(bytearray(read), np.float32).reshape(ours.shape)
                divergences.append(divergence(theirs, ours))
                equal += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
                losses = [loss + _loss(rows, ids) for loss, rows in zip(losses, (theirs, ours))]
                errors.append(float(np.abs(theirs - ours).max()))
                largest = max(largest, float(np.abs(theirs).max()))
        every = np.concatenate(divergences)
        followed = max(sum(len(ids) - 1 for ids in self.sequences), 1)
        return TextParity(
            self._given.name,
            self._given.sha256,
            len(self.sequences),
            len(every),
            float(every.mean()),
            float(every.max()),
            equal / len(every),
            losses[0] / followed,
            losses[1] / followed,
            max(errors),
            largest,
        )

    def _ours(self, weights: Path, engine: EngineConfig) -> Iterator[np.ndarray]:
        """(T, V) float32 of each sequence."""
        longest = max(map(len, self.sequences))
        settings = replace(
            engine,
            max_sequences=1,
            max_sequence_tokens=longest + 1,
            max_logits_bytes=longest * self._columns * _ITEM,
        )
        return read_prompts(weights, self.sequences, settings)


def _loss(logits: np.ndarray, ids: list[int]) -> float:
    """The sum over the tokens but the first."""
    rows: Tensor = torch.from_numpy(logits[:-1]).double().log_softmax(-1)
    return -float(rows.gather(1, torch.tensor(ids[1:])[:, None]).sum()) if len(ids) > 1 else 0.0
