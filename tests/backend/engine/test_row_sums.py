"""Sums over tensor ranks, fused with the next norm, or of halves of a step: every residual form gives the
tokens of transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.thread_ranks import Meeting, ThreadRanks, on_ranks
from tests.checkpoints import FAMILIES, save
from tridecode.backend.engine.adapters.adapted_ops import AdaptedOps
from tridecode.backend.engine.ranks.parallel import SingleRank
from tridecode.backend.models.context import Context
from tridecode.backend.models.halves import half_sums
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.operands import DecoderLayer, Linear, Norm, Product
from tridecode.kernels.ops import Ops
from tridecode.kernels.reference.operations import Reference

NEW = 6
#: of each form of residual: sequential, parallel with one norm and with two, post-norm, sandwich
FORMS = {name: (name, {}) for name in ("llama", "gpt2", "bloom", "gptj", "gpt_neox", "opt", "gemma2")} | {
    "opt, post-norm": ("opt", {"do_layer_norm_before": False}),
    "bloom, from norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
}


@pytest.mark.parametrize("form", FORMS)
def test_fused_sums_give_the_tokens_of_transformers(form: str, tmp_path: Path) -> None:
    family, changed = FORMS[form]
    model = FAMILIES[family](**{**FAMILIES[family].shared, **changed})
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "w")
    prompts = prompts_of([5, 1, 20], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    params = SamplingParams(max_tokens=NEW)
    done, engines = on_ranks(
        tmp_path / "w", 2, 1, lambda offline: offline.generate(prompts, params), fuses=True
    )
    assert [generation.tokens for generation in done] == wanted
    for engine in engines:
        sums = engine.ranks.sums.launched
        assert sums[True] + sums[False] > 0 and (form == "bloom, from norm" or sums[True] > 0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma2"])
def test_products_of_one_launch_may_sum_over_the_ranks(family: str, tmp_path: Path, monkeypatch) -> None:
    asked: list[int] = []

    def linears(self: Reference, products: list[Product]) -> bool:
        asked.append(len(products))
        for product, following in zip(products, [*products[1:], None]):
            if product.stream is not None and product.stream[1] is None:  # the stream has the sum
                product = replace(product, x=product.stream[0], stream=None)
            replace(product, over_ranks=None).compute(self)
            if product.over_ranks is not None:
                assert following is not None and following.x is product.out and following.stream is not None
                rows, norm = following.stream
                if norm is None:
                    product.over_ranks.add_rows(product.out, residual=rows, out=rows)
                else:
                    product.over_ranks.add_rows(product.out, out=product.out)
        return True

    monkeypatch.setattr(Reference, "linears", linears)
    monkeypatch.setattr(Reference, "most_linears_rows", 64)
    model = FAMILIES[family](**FAMILIES[family].shared)
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "w")
    prompts = prompts_of([5, 1, 20], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    params = SamplingParams(max_tokens=NEW)
    done, _ = on_ranks(tmp_path / "w", 2, 1, lambda offline: offline.generate(prompts, params), fuses=True)
    assert [generation.tokens for generation in done] == wanted
    assert set(asked) == {4}  # the last layer has no next one


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "opt"])
def test_steps_in_halves_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    """Steps of prompts, and prompts with decoding rows; steps of one or two tokens are computed whole."""
    model = FAMILIES[family](**FAMILIES[family].shared)
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "w")
    prompts = prompts_of([5, 2, 20, 13, 30], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    params = SamplingParams(max_tokens=NEW)
    done, engines = on_ranks(
        tmp_path / "w", 2, 1, lambda offline: offline.generate(prompts, params), fuses=True, halves=3
    )
    assert [generation.tokens for generation in done] == wanted
    for engine in engines:
        rows = engine.ranks.halves.rows
        assert 8 in rows and any(count % 2 for count in rows)  # whole steps, and halves that differ
        assert sum(engine.ranks.sums.launched.values()) > 0


def layer_of(weight: torch.Tensor | QuantizedWeight) -> DecoderLayer:
    norm, linear = Norm(torch.ones(8), None, 1e-5), Linear(weight)
    return DecoderLayer(norm, linear, linear, norm, linear, linear)


def test_steps_with_adapters_or_quantised_matrices_are_not_halved() -> None:
    """The operations that add adapters to GEMMs need the rows of the whole step."""
    ranks = ThreadRanks(Meeting(2, 1), 0, fuses=True, halves=4)
    numbers, starts = np.array([0, -1], np.int32), np.array([0, 5, 9], np.int32)
    adapted = AdaptedOps(Reference(), numbers, starts, {0: {}}, torch.device("cpu"))
    x, plain = torch.zeros(9, 8), layer_of(torch.zeros(8, 8))
    int8 = layer_of(QuantizedWeight("int8", 8, torch.zeros(8, 8, dtype=torch.int8), torch.ones(8, 1)))

    def sums(ops: Ops, ranks: ThreadRanks | SingleRank, layers: list[DecoderLayer]) -> object:
        return half_sums(Context(ops, ranks, None, None), x, layers)  # type: ignore[arg-type]

    assert sums(Reference(), ranks, [plain]) is ranks.halves
    assert sums(Reference(), SingleRank(), [plain]) is None
    assert sums(adapted, ranks, [plain]) is None
    assert sums(Reference(), ranks, [int8]) is None
    assert sums(Reference(), ranks, []) is None  # a pipeline stage without layers
