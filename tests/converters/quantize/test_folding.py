"""Scales that are folded into a layer's tensors leave the network as it is, in every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import FAMILIES, save, variants
from tests.converters.quantize.float64 import InFloat64
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion
from tridecode.converters.quantize.quantized_layer import fold
from tridecode.converters.quantize.source_tensors import source_tensors
from tridecode.converters.quantize.structure import SharedInput, shared_inputs

IDS = torch.tensor([[5, 17, 200, 33, 8, 90, 41]])
#: every family, and the variants that change what makes an input
CASES = [
    *FAMILIES,
    "bloom-3x16-residual",
    "gpt_neox-sequential",
    "llama-biases-tied",
    "opt-350m",
    "opt-plain",
    "falcon-40b",
    "falcon-sequential-alibi",
    "mpt-clipped",
    "phi-norms-tied",
    "baichuan-13b",
    "stablelm-12b",
]


def planned_of(case: str, directory: Path) -> PlannedConversion:
    return plan_conversion(open_checkpoint(save(variants()[case](), directory, tokenizer=False)), "fp32")


def inputs_of(planned: PlannedConversion, layer: int = 0) -> list[SharedInput]:
    return shared_inputs(planned.config, [item.spec for item in planned.conversions], layer)


@pytest.mark.parametrize("case", CASES)
def test_folding_leaves_the_logits_unchanged(case: str, tmp_path: Path) -> None:
    planned = planned_of(case, tmp_path / "m")
    model = planned.checkpoint.reference_model(torch.float32).double()
    tensors = source_tensors(model, planned)
    generator = torch.Generator().manual_seed(1)
    with InFloat64(), torch.no_grad():
        before = model(IDS, use_cache=False).logits
        folded = 0
        for layer in range(planned.config.num_layers):
            for shared in inputs_of(planned, layer):
                if not shared.makers:
                    continue
                old = tensors.read(shared.matrices[0])
                scales = 0.25 + 2 * torch.rand(old.shape[0], generator=generator, dtype=torch.float64)
                fold(tensors, shared, scales)
                assert not torch.allclose(tensors.read(shared.matrices[0]), old, rtol=0.01)
                folded += 1
        after = model(IDS, use_cache=False).logits
    assert folded
    assert (after - before).abs().max() < 1e-9 * before.abs().max()
    assert before.dtype == torch.float64


@pytest.mark.parametrize(
    "case, wanted",
    [
        # qkv, MLP, dense, down: whether something can take back their inputs' scales
        ("gpt2", [("input_layernorm", 1), ("post_attention_layernorm", 1), ("query_key_value", 1), ("", 1)]),
        ("bloom-3x16-residual", [("", 1), ("", 1), ("query_key_value", 1), ("", 1)]),
        (
            "gpt_neox",
            [("input_layernorm", 1), ("post_attention_layernorm", 1), ("query_key_value", 1), ("", 1)],
        ),
        ("gptj", [("input_layernorm", 2), ("query_key_value", 1), ("", 1)]),
        ("llama", [("input_layernorm", 1), ("post_attention_layernorm", 2), ("", 1), ("up_proj", 1)]),
        ("gemma2", [("input_layernorm", 1), ("pre_feedforward_layernorm", 2), ("", 1), ("up_proj", 1)]),
        ("opt-350m", [("", 1), ("", 1), ("query_key_value", 1), ("", 1)]),
        ("opt-plain", [("", 1), ("", 1), ("query_key_value", 1), ("", 1)]),
        ("mpt-clipped", [("input_layernorm", 1), ("post_attention_layernorm", 1), ("", 1), ("", 1)]),
        ("falcon-40b", [("ln_attn", 1), ("ln_mlp", 1), ("", 1), ("", 1)]),
        ("stablelm-12b", [("input_layernorm", 3), ("", 1), ("up_proj", 1)]),
    ],
)
def test_what_takes_back_a_scale(case: str, wanted: list[tuple[str, int]], tmp_path: Path) -> None:
    inputs = inputs_of(planned_of(case, tmp_path / "m"))
    found = [
        (shared.makers[0].split(".")[-2] if shared.makers else "", len(shared.matrices)) for shared in inputs
    ]
    assert found == wanted
