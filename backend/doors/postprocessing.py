"""Model `postprocessing` of FasterTransformer's ensemble: token ids in, texts out.

Source: the FasterTransformer backend's postprocessing models. As in the original, a row is decoded with its
prompt, and all texts form one flat array of bytes, the beams of a row next to each other. Unlike the
original, padding after the end is not decoded, special tokens are shown only if skip_special_tokens is false,
and ids unknown to the tokenizer are ignored instead of failing the request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.contracts.ensemble import POSTPROCESSING
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.door import UnaryDoor
from tridecode.backend.doors.door_settings import door_view


class TritonPythonModel(UnaryDoor):
    contract = POSTPROCESSING
    length_name = "sequence_length"  # input with the lengths of rows

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self.view = door_view(self.settings, self.tokenizer, self.settings.skip_special_tokens)

    def answer(self, inputs: Inputs) -> dict[str, Any]:
        """Return OUTPUT, (B * K,) UTF-8 bytes, for TOKENS_BATCH (B, K, L)."""
        tokens = inputs.arrays["TOKENS_BATCH"]
        if tokens.ndim not in (2, 3):
            raise RequestError(f"TOKENS_BATCH has shape {list(tokens.shape)}; wanted [B, K, L]")
        rows = tokens.reshape(math.prod(tokens.shape[:-1]), -1 if tokens.size else 0).tolist()
        ends = inputs.rows(self.length_name, len(rows))
        for row, end in enumerate(ends):
            if end is not None and end < 0:
                raise RequestError(f"{self.length_name} of row {row} is {end}; wanted 0 or more")
        texts = [self._decode(row[:end]) for row, end in zip(rows, ends)]
        return {"OUTPUT": np.array(texts, dtype=object)}

    def _decode(self, ids: list[int]) -> bytes:
        end = len(ids)
        while self.settings.skip_special_tokens and end and ids[end - 1] == self.end_id:
            end -= 1
        return self.view.text(self.view.shown(ids[:end])).encode("utf-8")
