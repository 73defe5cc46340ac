"""A weight directory gives transformers' tokens at every tensor and pipeline degree.

Ranks are threads here; tests/backend/models/test_ranks.py has processes, for every family.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.thread_ranks import generate_on_ranks
from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import ConfigError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

LENGTHS, NEW_TOKENS = [5, 1, 20], 4
#: settings of LLaMA that ranks cannot just cut: fewer key/value heads than ranks, an MLP that is not a
#: multiple
UNEVEN = {
    "multi-query": {"num_key_value_heads": 1},
    "two-kv-heads": {"num_key_value_heads": 2},
    "odd-mlp": {"intermediate_size": 50, "mlp_bias": True, "attention_bias": True, "num_key_value_heads": 4},
}
_made: dict[tuple, tuple] = {}


def prepared(folder: Path, family: str, ranks: int = 1, **settings):
    """Return weight directory, prompts and transformers' greedy tokens of a model of 12 heads and 3
    layers."""
    key = (family, ranks, *sorted(settings.items()))
    if key not in _made:
        model = FAMILIES[family](**{**FAMILIES[family].shared, **settings})
        where = folder / str(len(_made))
        save(model, where / "hf", tokenizer=False)
        plan_conversion(open_checkpoint(where / "hf"), "fp32").write(where / "w", ranks)
        prompts = prompts_of(LENGTHS, model.config.vocab_size)
        _made[key] = where / "w", prompts, [hf_greedy(model, prompt, NEW_TOKENS)[0] for prompt in prompts]
    return _made[key]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    yield tmp_path_factory.mktemp("degrees")
    _made.clear()


@pytest.mark.parametrize(
    ("tensor", "stages"),
    [(1, 3), (4, 2)],
    ids=["pp 3", "tp 4 x pp 2"],
)
@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "gpt_neox"])
def test_families_at_further_degrees(folder, family, tensor, stages):
    settings = {"num_key_value_heads": 4} if family == "llama" else {}
    directory, prompts, wanted = prepared(folder, family, **settings)
    assert generate_on_ranks(directory, tensor, stages, prompts, NEW_TOKENS)[0] == wanted


@pytest.mark.parametrize(
    ("kind", "stored", "tensor"),
    [
        *[("multi-query", 1, 2), ("multi-query", 1, 12), ("multi-query", 4, 1), ("multi-query", 4, 3)],
        *[("two-kv-heads", 1, 4), ("two-kv-heads", 4, 2), ("two-kv-heads", 4, 6), ("two-kv-heads", 4, 1)],
        *[("odd-mlp", 1, 4), ("odd-mlp", 4, 1), ("odd-mlp", 4, 2), ("odd-mlp", 2, 4)],
    ],
)
def test_heads_that_ranks_share_and_an_mlp_that_is_padded(folder, kind, tensor, stored):
    """This also holds for directories that were written at such a degree."""
    kv_heads = UNEVEN[kind]["num_key_value_heads"]
    directory, prompts, wanted = prepared(folder, "llama", stored, **UNEVEN[kind])
    tokens, engines = generate_on_ranks(directory, tensor, 1, prompts, NEW_TOKENS)
    assert tokens == wanted
    for engine in engines:  # a rank caches only its own KV heads
        assert {cache.blocks.shape[2] for cache in engine.state.caches} == {max(kv_heads // tensor, 1)}


@pytest.mark.parametrize(
    ("tensor", "key"), [(5, "head_num = 12"), (24, "head_num = 12"), (3, "kv_head_num = 2")]
)
def test_an_error_names_the_degrees_that_fit(folder, tensor, key):
    directory, prompts, _ = prepared(folder, "llama", **UNEVEN["two-kv-heads"])
    wanted = f"= {tensor} does not divide {key} .*wanted one of 1, 2, 4, 6, 12$"
    with pytest.raises(ConfigError, match=wanted):
        generate_on_ranks(directory, tensor, 1, prompts, NEW_TOKENS)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt_bigcode", {"multi_query": True}),
        ("falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": False}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": True}),
    ],
)
@pytest.mark.parametrize("tensor", [2, 4])
def test_families_with_fewer_kv_heads_than_ranks(folder, family, settings, tensor):
    directory, prompts, wanted = prepared(folder, family, **settings)
    tokens, engines = generate_on_ranks(directory, tensor, 1, prompts, NEW_TOKENS)
    assert tokens == wanted
    assert {cache.blocks.shape[2] for engine in engines for cache in engine.state.caches} == {1}
