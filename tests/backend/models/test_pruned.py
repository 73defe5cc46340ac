"""Structured pruning: the engine over layers of different sizes against transformers' unpruned model in which
the same heads and columns are zero."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.engine.offline_models import context_embedding, fp32_bound, hf_greedy, prompts_of
from tests.backend.engine.rank_process import NEW_TOKENS, RankPool
from tests.checkpoints import FAMILIES
from tests.pruned_checkpoints import Cut, Pruned, prune, pruned_family, unpruned
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import LayerSizes, ModelConfig, check_tensor_size
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.models import model_config_ini, read_model_config
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

LENGTHS = [1, 7, 23, 9]
NEW = NEW_TOKENS
SMALL = EngineConfig(max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=4 << 20)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    held = RankPool(2)
    yield held
    held.close()


def converted(family: str, directory: Path) -> tuple[Pruned, Path]:
    pruned, lost = pruned_family(family)
    source = pruned.save(directory / "hf", pruned_heads=lost)
    plan_conversion(open_checkpoint(source)).write(directory / "w")
    return pruned, directory / "w"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_model_answers_as_the_zeroed_one_alone_and_in_a_batch(family: str, tmp_path: Path) -> None:
    pruned, directory = converted(family, tmp_path)
    prompts = prompts_of(LENGTHS, pruned.model.config.vocab_size)
    offline = OfflineEngine.load(directory, SMALL, keep_logits=True)
    params = SamplingParams(max_tokens=NEW)
    together = offline.generate(prompts, params)
    alone = [offline.generate([prompt], params)[0] for prompt in prompts[:2]]
    for prompt, answers in zip(prompts, ([a, b] for a, b in zip(together, [*alone, *together[2:]]))):
        tokens, logits = hf_greedy(pruned.model, prompt, NEW)
        for answer in answers:
            assert answer.tokens == tokens
            assert np.abs(np.stack(answer.logits) - logits).max() < fp32_bound(logits)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_caches_weights_and_blocks_have_the_sizes_of_each_layer(family: str, tmp_path: Path) -> None:
    pruned, directory = converted(family, tmp_path)
    engine = OfflineEngine.load(directory, SMALL).engine
    kv_heads = pruned.kv_heads
    size = engine.model_config.head_size
    assert [cache.blocks.shape[1:] for cache in engine.state.caches] == [
        (2, count, 8, size) for count in kv_heads
    ]
    assert engine.state.block_bytes() == sum(kv_heads) * 2 * 8 * size * 4
    assert [heads.num_heads for heads in engine.state.model.heads] == list(map(len, pruned.kept_heads))
    assert [layer.down.weight.shape[1] for layer in engine.state.model.layers] == pruned.inner
    written = sum(path.stat().st_size for path in directory.glob("model.layers.*.bin"))
    left = sum(tensor.numel() for name, tensor in pruned.state.items() if re.search(r"\.\d+\.", name))
    assert written == 4 * left


@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_ranks_share_the_heads_of_each_layer(family: str, pool: RankPool, tmp_path: Path) -> None:
    pruned, directory = converted(family, tmp_path)
    prompts = prompts_of([5, 1, 20], pruned.model.config.vocab_size)
    wanted = [
        (hf_greedy(pruned.model, prompt, NEW)[0], context_embedding(pruned.model, prompt))
        for prompt in prompts
    ]
    for tensor, stages in [(2, 1), (1, 2)]:
        answers = pool.run(directory, tensor, stages, tmp_path / f"meeting {tensor} {stages}", prompts)
        for (tokens, embedding), (theirs, their_embedding) in zip(answers, wanted):
            assert tokens == theirs, (tensor, stages)
            assert np.allclose(embedding, their_embedding, atol=2e-3), (tensor, stages)


def test_a_tensor_degree_is_checked_against_each_layer(tmp_path: Path) -> None:
    pruned = prune(unpruned("bloom"), {0: Cut((0, 1, 6, 10)), 1: Cut((3, 11))})
    source = pruned.save(tmp_path / "hf", pruned_heads={"0": [0, 1, 6, 10], "1": [3, 11]})
    config = plan_conversion(open_checkpoint(source)).config
    check_tensor_size(config, 2)
    with pytest.raises(
        ConfigError, match="tensor_para_size = 4 does not divide head_num = 10 of layer 1 of hf"
    ):
        check_tensor_size(config, 4)


# ---------------------------------------------------------------- config.ini

INI = """[gpt]
model_name = gpt2
head_num = 12
size_per_head = 4
inter_size = 96
max_pos_seq_len = 64
num_layer = 3
vocab_size = 331
start_id = 0
end_id = 0
weight_data_type = fp32
"""


def read(directory: Path, text: str, base: str = INI) -> ModelConfig:
    (directory / "config.ini").write_text(base + text)
    return read_model_config(directory)


def test_config_ini_carries_the_sizes_of_each_layer(tmp_path: Path) -> None:
    config = read(tmp_path, "head_num_per_layer = 12 8 3\ninter_size_per_layer = 96 1 40\n")
    assert config.layer_sizes == (LayerSizes(12, 12, 96), LayerSizes(8, 8, 1), LayerSizes(3, 3, 40))
    assert (config.num_heads, config.mlp_size, config.hidden_size) == (12, 96, 48)
    second = config.of_layer(1)
    assert (second.num_heads, second.num_kv_heads, second.mlp_size, second.hidden_size) == (8, 8, 1, 48)
    only_mlp = read(tmp_path, "inter_size_per_layer = 96 64 40\n")
    assert [sizes.num_heads for sizes in only_mlp.layer_sizes] == [12, 12, 12]
    assert read(tmp_path, "").layer_sizes == ()


sizes = st.integers(1, 12).flatmap(
    lambda kv: st.builds(
        LayerSizes,
        num_heads=st.integers(1, 12 // kv).map(lambda group: group * kv),
        num_kv_heads=st.just(kv),
        mlp_size=st.integers(1, 96),
    )
)
with_heads = sizes.flatmap(
    lambda size: st.sets(st.integers(0, 11), min_size=size.num_heads, max_size=size.num_heads).map(
        lambda heads: replace(size, kept_heads=tuple(sorted(heads)))
    )
)


@given(layers=st.tuples(*[sizes | with_heads] * 3))
@settings(max_examples=50, deadline=None)
def test_what_is_written_of_layers_is_what_is_read(tmp_path_factory, layers) -> None:
    directory = tmp_path_factory.mktemp("ini")
    config = replace(read(directory, ""), layer_sizes=layers)
    (directory / "config.ini").write_text(model_config_ini(config, 1))
    assert read_model_config(directory) == config


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("head_num_per_layer = 12 8", "has 2 numbers; wanted one for each of num_layer = 3"),
        ("head_num_per_layer = 12 8 13", "has 13 in layer 2; wanted 1 to 12, the size of the unpruned model"),
        ("head_num_per_layer = 12 0 3", "has 0 in layer 1; wanted 1 to 12"),
        ("head_num_per_layer = 12 -1 3", "has '12 -1 3'; wanted whole numbers"),
        ("inter_size_per_layer = 96 1e2 3", "has '96 1e2 3'; wanted whole numbers"),
        ("inter_size_per_layer = 96 9999999999 3", "wanted whole numbers"),
        ("kv_head_num_per_layer = 5 12 12", "has 12 in layer 0, with 5 key/value heads; wanted a multiple"),
        ("kept_heads_per_layer = -, -", "has 2 lists; wanted one for each of num_layer = 3"),
        ("kept_heads_per_layer = -, 1 2, -", "has 2 heads in layer 1; wanted the 12 of head_num"),
        ("head_num_per_layer = 12 2 12\nkept_heads_per_layer = -, 2 1, -", "has 2 1 in layer 1; wanted diff"),
        ("head_num_per_layer = 12 2 12\nkept_heads_per_layer = -, 1 12, -", "wanted different heads of 0"),
        ("kept_heads_per_layer = -, , -", "has ''; wanted whole numbers"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text + "\n")
    assert complaint in str(caught.value)
    assert str(tmp_path / "config.ini") in str(caught.value)
