"""Baichuan 2: Baichuan with head rows normalised to unit length. BaichuanConfig distinguishes the two."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import normalize

from tridecode.converters.families import baichuan
from tridecode.converters.rules import Rule


def unit_rows(weight: Tensor) -> Tensor:
    """Normalise each row, like NormHead of the published model."""
    return normalize(weight.float(), dim=1).to(weight.dtype)


def rules(num_heads: int) -> list[Rule]:
    return [*baichuan.rules(num_heads)[:-1], Rule("lm_head.weight", "model.lm_head.weight", unit_rows)]


FAMILY = replace(baichuan.FAMILY, model_types=("baichuan2",), rules=rules)
