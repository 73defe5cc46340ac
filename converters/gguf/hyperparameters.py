"""Hyperparameters of a GGUF file, `<architecture>.<key>`, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tridecode.backend.base.errors import CheckpointError, UnsupportedError

_REQUIRED = object()
#: keys that change the network -> value without an effect
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.dimension_sections": (),
    "rope.freq_base_swa": (10000.0,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
#: keys that repeat information of the tensors, or describe the file
_HARMLESS = {
    *("attention.value_length", "expert_used_count", "pooling_type", "rope.scaling.finetuned"),
    *("tensor_data_layout", "use_parallel_residual", "vocab_size"),
}


class GgufHeader:
    """Fields of a GGUF file that a family's rules read. shapes: of its tensors, in torch's order; load: reads
    a tensor by name.

    Records every key that is read, so that `check` finds the unread ones.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        load: Callable[[str], np.ndarray],
        path: Path,
    ):
        self.fields, self.shapes, self.path = fields, shapes, path
        self.architecture = str(fields["general.architecture"])
        self._load, self._read = load, set[str]()

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.fields

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A number; `default` where the file has none. CheckpointError for anything else."""
        found = self._value(key, default)
        if isinstance(found, list) and found and all(item == found[0] for item in found):
            found = found[0]  # a value for each layer
        if isinstance(found, list):
            raise UnsupportedError(
                f"{self.path} has {self.architecture}.{key} = {str(found)[:60]}, which differs by layer; "
                "this version reads one value for all"
            )
        if found is not default and (isinstance(found, bool) or not isinstance(found, (int, float))):
            self._fail(key, found, "a number")
        return found

    def size(self, key: str, default: Any = _REQUIRED) -> int:
        """A whole number of 1 or more."""
        found = self.number(key, default)
        if not isinstance(found, int) or not 0 < found < 1 << 31:
            self._fail(key, found, "1 or more")
        return found

    def text(self, key: str, default: str) -> str:
        found = self._value(key, default)
        if not isinstance(found, str):
            self._fail(key, found, "a text")
        return found

    def value(self, key: str, default: Any) -> Any:
        """A value of any type."""
        return self._value(key, default)

    def tensor(self, name: str) -> list[float] | None:
        """The numbers of a vector; None if the file lacks it."""
        if name not in self.shapes:
            return None
        shape = self.shapes[name]
        if len(shape) != 1 or not 0 < shape[0] <= 1 << 16:
            raise CheckpointError(f"{self.path}: {name} is {shape}; wanted a vector")
        found = self._load(name).astype(np.float64)
        if not (np.isfinite(found) & (found > 0)).all():
            raise CheckpointError(f"{self.path}: {name} holds a number that is not above 0 and finite")
        return found.tolist()

    def in_layers(self, name: str) -> bool:
        """Return whether the first layer has a tensor of this name."""
        return f"blk.0.{name}" in self.shapes

    def check(self) -> list[str]:
        """Return sentences about unread keys. Raises UnsupportedError for one that changes the network."""
        prefix, unread = f"{self.architecture}.", []
        for key in (name.removeprefix(prefix) for name in self.fields if name.startswith(prefix)):
            if key in self._read or key in _HARMLESS:
                continue
            if key not in _NEUTRAL:
                unread.append(key[:80])
            elif (found := self.fields[prefix + key]) not in _NEUTRAL[key]:
                raise UnsupportedError(
                    f"{self.path} has {prefix}{key} = {str(found)[:60]}; this version does not run it"
                )
        names = ", ".join(unread[:10])
        return [f"keys of {self.path.name} that are not read: {names}"] if unread else []

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        name = f"{self.architecture}.{key}"
        if name not in self.fields:
            if default is _REQUIRED:
                raise CheckpointError(f"{self.path} has no {name}")
            return default
        return self.fields[name]

    def _fail(self, key: str, found: Any, wanted: str) -> None:
        raise CheckpointError(
            f"{self.path} has {self.architecture}.{key} = {str(found)[:60]}; wanted {wanted}"
        )
