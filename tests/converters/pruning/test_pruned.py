"""Pruned checkpoints: what the converter makes of their shapes and config.json, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.backend.hf_models import model_config
from tests.checkpoints import FAMILIES, greedy, save
from tests.pruned_checkpoints import Cut, Pruned, prune, pruned_family, unpruned
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.configuration.model_config import LayerSizes
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.models import family, read_model_config
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity.comparison import check_parity

PROMPTS = [[5], [7, 9, 11], list(range(20, 45))]


def assert_answers(source: Path, directory: Path, model) -> None:
    """The converted checkpoint says what `model` says in transformers."""
    plan_conversion(open_checkpoint(source)).write(directory)
    tokens, logits = run_greedy(directory, PROMPTS, 4)
    for prompt, ours, our_logits in zip(PROMPTS, tokens, logits):
        theirs, their_logits = greedy(model, prompt, 4)
        assert ours == theirs
        np.testing.assert_allclose(our_logits, their_logits.numpy(), atol=1e-3, rtol=0)


# ---------------------------------------------------------------- where the sizes come from

CUTS = {0: Cut(heads=(0, 7)), 2: Cut(heads=(1, 2, 3, 4, 5, 6), neurons=(0, 5, 11))}
#: per family: both heads of a LLaMA group go, or one of each
LLAMA = {0: Cut(heads=(2, 3)), 2: Cut(heads=(1, 2, 4, 7, 8, 11), neurons=(0, 5, 11))}


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_shapes_alone_tell_the_sizes(family: str, tmp_path: Path) -> None:
    pruned = prune(unpruned(family), LLAMA if family == "llama" else CUTS)
    source = pruned.save(tmp_path / "hf")
    assert_answers(source, tmp_path / "w", pruned.model)
    config = read_model_config(tmp_path / "w")
    assert [sizes.num_heads for sizes in config.layer_sizes] == list(map(len, pruned.kept_heads))
    assert [sizes.mlp_size for sizes in config.layer_sizes] == pruned.inner
    assert config.num_heads == 12


def test_lists_in_the_config_are_read_and_compared(tmp_path: Path) -> None:
    pruned = prune(unpruned("llama"), LLAMA)
    lists = {
        "num_attention_heads": [10, 12, 6],
        "num_key_value_heads_per_layer": [5, 6, 6],
        "intermediate_size": [72, 72, 69],
    }
    source = pruned.save(tmp_path / "hf", **lists)
    assert_answers(source, tmp_path / "w", pruned.model)
    layers = read_model_config(tmp_path / "w").layer_sizes
    assert layers == (LayerSizes(10, 5, 72), LayerSizes(12, 6, 72), LayerSizes(6, 6, 69))
    for key, wrong, complaint in [
        (
            "num_attention_heads",
            [12, 12, 6],
            "layer 0 have num_heads = 10; wanted 12, num_attention_heads of",
        ),
        (
            "intermediate_size",
            [72, 72, 70],
            "layer 2 have mlp_size = 69; wanted 70, intermediate_size of layer 2",
        ),
        ("num_key_value_heads_per_layer", [6, 6, 6], "layer 0 have num_kv_heads = 5; wanted 6"),
        ("intermediate_size", [72, 69], "intermediate_size = [72, 69]; wanted 3 sizes, one for each layer"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            plan_conversion(open_checkpoint(pruned.save(tmp_path / "hf", **{**lists, key: wrong})))
        assert complaint in str(caught.value)


def test_key_value_heads_may_differ_where_query_heads_do_not(tmp_path: Path) -> None:
    """Models from architecture search have layers with fewer KV heads, each shared by more queries."""
    model = unpruned("llama", num_key_value_heads=4)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in ("k_proj", "v_proj"):  # the four heads of layer 1 become two, in pairs
        weight = model.model.layers[1].self_attn.get_submodule(name).weight.data
        pairs = weight.view(2, 2, 8, -1)
        pairs[:, 1] = pairs[:, 0]
        state[f"model.layers.1.self_attn.{name}.weight"] = pairs[:, 0].reshape(16, -1).clone()
    source = Pruned(model, state).save(tmp_path / "hf", num_key_value_heads=[4, 2, 4])
    assert_answers(source, tmp_path / "w", model)
    assert [sizes.num_kv_heads for sizes in read_model_config(tmp_path / "w").layer_sizes] == [4, 2, 4]


def test_all_layers_may_have_lost_as_much(tmp_path: Path) -> None:
    cuts = {layer: Cut(heads=(0, 11), neurons=tuple(range(12))) for layer in range(3)}
    pruned = prune(unpruned("gpt2"), cuts)
    assert_answers(pruned.save(tmp_path / "hf"), tmp_path / "w", pruned.model)
    assert read_model_config(tmp_path / "w").layer_sizes == (LayerSizes(10, 10, 48),) * 3


def test_an_unpruned_checkpoint_has_no_sizes_of_layers(tmp_path: Path) -> None:
    source = save(unpruned("bloom"), tmp_path / "hf", tokenizer=False)
    planned = plan_conversion(open_checkpoint(source))
    assert planned.config.layer_sizes == () and planned.notes == []


def test_the_heads_that_bloom_keeps_are_recorded(tmp_path: Path) -> None:
    pruned = prune(unpruned("bloom"), {1: Cut(heads=(3, 8))})
    source = pruned.save(tmp_path / "hf", pruned_heads={"1": [8, 3]})
    planned = plan_conversion(open_checkpoint(source))
    kept = (0, 1, 2, 4, 5, 6, 7, 9, 10, 11)
    assert planned.config.layer_sizes == (
        LayerSizes(12, 12, 192),
        LayerSizes(10, 10, 192, kept),
        LayerSizes(12, 12, 192),
    )
    assert planned.notes == [
        "layer 0: 12 of 12 heads, an MLP of 192 of 192",
        "layer 1: 10 of 12 heads, an MLP of 192 of 192",
        "layer 2: 12 of 12 heads, an MLP of 192 of 192",
    ]


def test_positions_tell_whether_the_kept_heads_must_be_known() -> None:
    for name, case in FAMILIES.items():
        config = model_config(case.hf_config())
        learned = {"gpt2", "opt", "xglm", "gpt_bigcode", "gpt_neo"}
        wanted = name not in learned and config.rope is None
        assert family(config.family).depends_on_heads(config) == wanted, name


# ---------------------------------------------------------------- refusals


ONE = {1: Cut(heads=(3,))}
SPREAD = (0, 1, 2, 4, 6, 8, 10)  # of LLaMA's six groups of two: one whole, and one of each other
REFUSED = [
    ("bloom", ONE, None, "layer 1 has 11 of 12 heads; which ones decides their ALiBi slopes"),
    ("bloom", ONE, {"1": [3, 4]}, "leaves layer 1 10 of 12 heads; its tensors have 11"),
    ("bloom", ONE, {"1": [12]}, "heads below 12"),
    ("gpt2", ONE, {"3": [1]}, "wanted layers below 3"),
    ("gpt2", ONE, [3], 'wanted {"layer": [head, ...], ...}'),
    ("gpt2", ONE, {"1": ["3"]}, 'wanted {"layer": [head, ...], ...}'),
    ("gpt2", {}, {"1": [3]}, "leaves layer 1 11 of 12 heads; its tensors have 12"),
    ("gpt2", {0: Cut(heads=tuple(range(12)))}, None, "0 heads and an MLP of 60 in layer 0; this version"),
    ("gpt2", {0: Cut(neurons=tuple(range(60)))}, None, "an MLP of 0 in layer 0; this version runs layers"),
    ("llama", {0: Cut(heads=(0,))}, None, "11 query heads and 6 key/value heads in layer 0; wanted a mul"),
    ("llama", {0: Cut(heads=(0, 1, 2, 4))}, {"0": [0, 1, 2, 4]}, "8 query heads and 5 key/value"),
]


@pytest.mark.parametrize(("family", "cuts", "lost", "complaint"), REFUSED)
def test_what_cannot_be_run_or_told_is_refused(family, cuts, lost, complaint, tmp_path: Path) -> None:
    source = prune(unpruned(family), cuts).save(tmp_path / "hf", **({"pruned_heads": lost} if lost else {}))
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        plan_conversion(open_checkpoint(source))
    assert complaint in str(caught.value) and str(tmp_path / "hf") in str(caught.value)


def test_query_heads_that_are_left_must_be_spread_over_the_groups(tmp_path: Path) -> None:
    """Six heads left of three groups, but three, two and one: the shapes alone look fine."""
    pruned = prune(unpruned("llama", num_key_value_heads=4), {0: Cut(heads=(1, 2, 4, 5, 9, 10))})
    lost = {"pruned_heads": {"0": [1, 2, 4, 5, 9, 10]}}
    with pytest.raises(
        UnsupportedError, match="query heads and 4 key/value heads in layer 0; wanted a multiple"
    ):
        plan_conversion(open_checkpoint(pruned.save(tmp_path / "hf", **lost)))
    uneven = prune(unpruned("llama", num_key_value_heads=2), {0: Cut(heads=(0, 1))})
    with pytest.raises(UnsupportedError, match=r"have {0: 4, 1: 6} in each group of a key/value head"):
        plan_conversion(open_checkpoint(uneven.save(tmp_path / "hf2", pruned_heads={"0": [0, 1]})))


def test_smaller_heads_are_refused(tmp_path: Path) -> None:
    source = save(unpruned("gpt2"), tmp_path / "hf", tokenizer=False)
    state = load_file(source / "model.safetensors")
    for name, shape in [
        ("c_attn.weight", (48, 3 * 47)), ("c_attn.bias", (3 * 47,)), ("c_proj.weight", (47, 48)),
    ]:  # fmt: skip
        state[f"transformer.h.1.attn.{name}"] = torch.zeros(shape)
    save_file(state, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match="attention of layer 1 has 47 columns; wanted heads of 4"):
        plan_conversion(open_checkpoint(source))


def test_tensors_that_disagree_with_each_other_are_refused(tmp_path: Path) -> None:
    pruned = prune(unpruned("gpt2"), CUTS)
    pruned.state["transformer.h.0.attn.c_attn.weight"] = torch.zeros(48, 3 * 44)
    with pytest.raises(
        CheckpointError, match=r"c_attn.weight \(48, 132\) makes .*; the config wants \(48, 120\)"
    ):
        plan_conversion(open_checkpoint(pruned.save(tmp_path / "hf")))


# ---------------------------------------------------------------- the reference model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_unpruned_model_with_zeros(family: str, tmp_path: Path) -> None:
    pruned, lost = pruned_family(family)
    checkpoint = open_checkpoint(pruned.save(tmp_path / "hf", pruned_heads=lost))
    plan_conversion(checkpoint)
    reference, wanted = checkpoint.reference_model(torch.float32), pruned.model
    with torch.inference_mode():
        ids = torch.tensor([PROMPTS[2]])
        torch.testing.assert_close(reference(ids).logits, wanted(ids).logits, atol=1e-4, rtol=0)


def test_a_pruned_checkpoint_passes_parity(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(prune(unpruned("llama"), LLAMA).save(tmp_path / "hf"))
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "w")
    parity = check_parity(checkpoint, tmp_path / "w", planned.config, None)
    assert parity.passed and parity.greedy_agreement == 1.0


def test_a_reference_of_other_weights_fails_parity(tmp_path: Path) -> None:
    pruned = prune(unpruned("gpt2"), CUTS)
    plan_conversion(open_checkpoint(pruned.save(tmp_path / "hf"))).write(tmp_path / "w")
    pruned.state["transformer.h.2.mlp.c_proj.weight"][3] = 0  # one more neuron
    changed = open_checkpoint(pruned.save(tmp_path / "changed"))
    planned = plan_conversion(changed)
    assert not check_parity(changed, tmp_path / "w", planned.config, None).passed


def test_transformers_itself_cannot_load_such_a_checkpoint(tmp_path: Path) -> None:
    """Should this fail one day, transformers' own model is the better reference."""
    pruned = prune(unpruned("gpt2"), CUTS)
    with pytest.raises(RuntimeError, match="size"):
        AutoModelForCausalLM.from_pretrained(pruned.save(tmp_path / "hf"))
