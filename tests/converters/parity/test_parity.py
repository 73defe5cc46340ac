"""The parity check passes what is right and fails what is wrong, however small the wrong is."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.checkpoints import CORE, FAMILIES, save, tiny_gpt2, tiny_llama, tiny_tokenizer
from tridecode.backend.base.errors import WeightFileError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity import comparison as parity_module
from tridecode.converters.parity.comparison import NEW_TOKENS, check_parity, fixed_prompts
from tridecode.converters.parity.files import LmHead, Shards, TokenizerParity
from tridecode.converters.parity.report import Parity, PromptParity, compare_prompt, judge

SOURCE = Path("the source's")


def prove(
    source: Path, directory: Path, dtype: str = "fp32", spoil=None, tokenizer: Path | None = SOURCE
) -> Parity:
    """Convert, let `spoil` touch the weight directory, compare."""
    checkpoint = open_checkpoint(source)
    planned = plan_conversion(checkpoint, dtype)
    planned.write(directory)
    if spoil is not None:
        spoil(directory)
    tokenizer = source / "tokenizer.json" if tokenizer is SOURCE else tokenizer
    return check_parity(checkpoint, directory, planned.config, tokenizer)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("family", CORE)
def test_a_right_conversion_passes(tmp_path, family, dtype):
    parity = prove(save(FAMILIES[family](), tmp_path / "hf"), tmp_path / "w", dtype)
    assert parity.passed
    assert parity.largest_logit_error < 5e-4 < parity.logit_error_bound
    assert parity.greedy_agreement == 1.0
    assert len(parity.prompts) >= 10
    assert {prompt.steps for prompt in parity.prompts} == {NEW_TOKENS}
    assert set(parity.checksums) == {"config.ini", "manifest.json", "tokenizer.json"}
    tokenizer, head, shards = parity.tokenizer, parity.lm_head, parity.shards
    assert (tokenizer.file, tokenizer.agreement, tokenizer.round_trip) == ("tokenizer.json", 1.0, 1.0)
    assert head.source == head.stored == head.served in ("tied", "untied")
    files = list((tmp_path / "w").glob("*.bin"))
    assert (shards.files, shards.bytes) == (len(files), sum(file.stat().st_size for file in files))
    assert json.loads(json.dumps(parity.as_dict()))["lm_head"]["served"] == head.served


def without_manifest(spoil):
    """The mistake of a converter: no manifest tells that the files are not those that were written."""

    def change(directory: Path) -> None:
        spoil(directory)
        (directory / "manifest.json").unlink()

    return change


def swap(first: str, second: str):
    def change(directory: Path) -> None:
        a, b = (directory / first).read_bytes(), (directory / second).read_bytes()
        (directory / first).write_bytes(b)
        (directory / second).write_bytes(a)

    return change


def edit_ini(old: str, new: str):
    def change(directory: Path) -> None:
        text = (directory / "config.ini").read_text()
        assert old in text
        (directory / "config.ini").write_text(text.replace(old, new))

    return change


def shift_one_bias(directory: Path) -> None:
    path = directory / "model.layers.1.attention.dense.bias.bin"
    values = np.fromfile(path, np.float32)
    values[3] += 0.1
    values.tofile(path)


MISTAKES = {
    "gate and up exchanged": (
        "llama",
        swap("model.layers.1.mlp.gate_proj.weight.0.bin", "model.layers.1.mlp.up_proj.weight.0.bin"),
    ),
    "two norms exchanged": (
        "gpt2",
        swap(
            "model.layers.0.input_layernorm.weight.bin", "model.layers.0.post_attention_layernorm.weight.bin"
        ),
    ),
    "rope_theta lost": ("llama", edit_ini("rope_theta = 10000.0", "rope_theta = 500000.0")),
    "another GELU": ("gpt2", edit_ini("activation_type = Gelu", "activation_type = gelu_erf")),
    "one bias value off by 0.1": ("bloom", shift_one_bias),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_conversion_fails(tmp_path, mistake):
    family, spoil = MISTAKES[mistake]
    source = save(FAMILIES[family](), tmp_path / "hf")
    parity = prove(source, tmp_path / "w", spoil=without_manifest(spoil))
    assert not parity.passed and not parity.shards.damaged
    assert parity.largest_logit_error > parity.logit_error_bound


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_manifest_shows_every_change_after_conversion(tmp_path, mistake):
    family, spoil = MISTAKES[mistake]
    source = save(FAMILIES[family](), tmp_path / "hf")
    if mistake in ("rope_theta lost", "another GELU"):
        with pytest.raises(WeightFileError, match="config.ini"):
            prove(source, tmp_path / "w", spoil=spoil)
    else:
        assert prove(source, tmp_path / "w", spoil=spoil).shards.damaged


@pytest.fixture
def no_rounding_allowed(monkeypatch):
    """Set the bound to 0, as if the model amplified rounding beyond the usual bound."""
    monkeypatch.setattr(parity_module, "_BOUNDS", dict.fromkeys(("fp32", "fp16", "bf16"), 1e-9))


@pytest.mark.parametrize("family", CORE)
def test_a_model_that_amplifies_rounding_is_held_to_what_it_does_to_transformers(
    tmp_path, family, no_rounding_allowed
):
    parity = prove(save(FAMILIES[family](), tmp_path / "hf"), tmp_path / "w")
    assert parity.passed
    assert 1e-9 * parity.largest_logit < parity.largest_logit_error <= parity.logit_error_bound
    assert parity.logit_error_bound == 4 * parity.reference_difference < 1e-4 * parity.largest_logit


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_model_that_amplifies_rounding_shows(tmp_path, mistake, no_rounding_allowed):
    family, spoil = MISTAKES[mistake]
    source = save(FAMILIES[family](), tmp_path / "hf")
    parity = prove(source, tmp_path / "w", spoil=without_manifest(spoil))
    assert not parity.passed and parity.largest_logit_error > parity.logit_error_bound


def test_prompts_are_the_same_every_time_and_fit_the_model():
    config = ModelConfig("gpt", "g", 1, 8, 2, 2, 4, 12, 331, 20, 1e-5, 0, 0)
    tokenizer = tiny_tokenizer().backend_tokenizer
    prompts = fixed_prompts(tokenizer, config)
    assert prompts == fixed_prompts(tokenizer, config)
    lengths = {len(ids) for _, ids in prompts}
    assert {1, 5} <= lengths and max(lengths) == 20 - NEW_TOKENS
    assert all(0 <= token < 331 for _, ids in prompts for token in ids)


def test_ids_beyond_the_models_vocabulary_are_not_asked_of_it():
    config = ModelConfig("gpt", "g", 1, 8, 2, 2, 4, 12, 300, 128, 1e-5, 0, 0)
    tokenizer: Tokenizer = tiny_tokenizer().backend_tokenizer
    assert all(token < 300 for _, ids in fixed_prompts(tokenizer, config) for token in ids)


# ---------------------------------------------------------------- judging, on logits made by hand


def logits(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_tokens_are_compared_up_to_the_first_that_differs():
    theirs = logits((0, 1, 5), (3, 2.99, 0), (9, 0, 0))
    ours = logits((0, 1, 5), (2.985, 2.99, 0), (0, 0, 777))  # the third step has another prefix
    item = compare_prompt("p", [1], [2, 1, 2], ours, [2, 0, 0], theirs)
    assert (item.steps, item.agrees) == (2, False)
    assert item.logit_error == pytest.approx(0.015, abs=1e-6)
    assert item.margin == pytest.approx(0.01, abs=1e-6)


def test_without_a_difference_the_smallest_margin_is_kept():
    theirs = logits((0, 1, 5), (3, 2.5, 0))
    item = compare_prompt("p", [1], [2, 0], theirs, [2, 0], theirs)
    assert (item.steps, item.agrees, item.logit_error, item.margin) == (2, True, 0.0, 0.5)


FACTS = {
    "source": "s", "family": "gpt", "weight_dtype": "fp32", "engine": {}, "reference": {},
    "largest_logit": 1.0, "tokenizer": TokenizerParity(), "lm_head": LmHead("tied", "tied", "tied"),
    "shards": Shards(1, 4, []),
}  # fmt: skip


@pytest.mark.parametrize(
    ("agrees", "error", "margin", "passes"),
    [
        (True, 0.5, 3.0, True),
        (True, 1.1, 3.0, False),  # beyond rounding
        (False, 0.9, 1.9, True),  # a near tie: rounding may turn it
        (False, 0.9, 2.1, False),  # no tie: the token is wrong
        (True, float("nan"), 3.0, False),
    ],
)
def test_only_rounding_is_forgiven(agrees, error, margin, passes):
    good = PromptParity("good", 3, 8, True, 0.0, 1.0)
    parity = judge([good, PromptParity("p", 3, 8, agrees, error, margin)], bound=1.0, **FACTS)
    assert parity.passed == passes
    assert parity.greedy_agreement == (16 if agrees else 15) / 16  # of steps


@pytest.mark.parametrize(
    "spoilt",
    [
        {"tokenizer": TokenizerParity("tokenizer.json", 0.9, 1.0)},
        {"lm_head": LmHead("untied", "tied", "tied")},
        {"lm_head": LmHead("untied", "untied", "tied")},
        {"lm_head": LmHead("unknown", "untied", "tied")},
        {"shards": Shards(1, 4, ["a.bin has other bytes"])},
    ],
)
def test_files_that_are_wrong_fail_whatever_the_logits_say(spoilt):
    parity = judge([PromptParity("good", 3, 8, True, 0.0, 1.0)], bound=1.0, **{**FACTS, **spoilt})
    assert not parity.passed
    assert {"tokenizer": "tokenizer agrees on 90%", "lm_head": "lm_head un", "shards": "damaged"}[
        next(iter(spoilt))
    ] in parity.summary()


def test_an_untied_head_is_compared_too(tmp_path):
    source = save(tiny_gpt2(tie_word_embeddings=False), tmp_path / "hf")
    right = prove(source, tmp_path / "a")
    assert right.passed and right.lm_head == LmHead("untied", "untied", "untied")
    remove = without_manifest(lambda directory: (directory / "model.lm_head.weight.bin").unlink())
    wrong = prove(source, tmp_path / "b", spoil=remove)
    assert not wrong.passed and wrong.lm_head == LmHead("untied", "untied", "tied")


def test_a_head_that_appears_beside_a_tied_model_fails(tmp_path):
    def add_head(directory: Path) -> None:
        shutil.copyfile(directory / "model.wte.bin", directory / "model.lm_head.weight.bin")

    parity = prove(save(tiny_gpt2(), tmp_path / "hf"), tmp_path / "w", spoil=without_manifest(add_head))
    assert parity.lm_head == LmHead("tied", "tied", "untied")
    assert not parity.passed


def test_one_changed_bit_of_a_shard_fails_though_no_logit_shows_it(tmp_path):
    def flip(directory: Path) -> None:
        path = directory / "model.wte.bin"
        data = bytearray(path.read_bytes())
        data[40] ^= 1  # the lowest bit of a float32
        path.write_bytes(data)

    parity = prove(save(tiny_gpt2(), tmp_path / "hf"), tmp_path / "w", spoil=flip)
    assert parity.largest_logit_error < parity.logit_error_bound
    assert not parity.passed
    assert len(parity.shards.damaged) == 1 and "model.wte.bin has SHA-256" in parity.shards.damaged[0]


def test_a_shard_that_is_cut_short_is_an_error(tmp_path):
    def cut(directory: Path) -> None:
        path = directory / "model.wte.bin"
        path.write_bytes(path.read_bytes()[:-4])

    with pytest.raises(WeightFileError, match="model.wte.bin holds"):
        prove(save(tiny_gpt2(), tmp_path / "hf"), tmp_path / "w", spoil=cut)


def test_a_tokenizer_that_splits_otherwise_than_the_source_fails(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = Tokenizer.from_file(str(source / "tokenizer.json")).encode("The").tokens[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    parity = prove(source, tmp_path / "w", tokenizer=tmp_path / "tokenizer.json")
    assert not parity.passed and parity.tokenizer.agreement < 1.0
    assert parity.tokenizer.round_trip == 1.0  # swapped both ways: only the comparison shows it


def test_without_a_tokenizer_random_ids_are_compared(tmp_path):
    parity = prove(save(tiny_gpt2(), tmp_path / "hf"), tmp_path / "w", tokenizer=None)
    assert parity.passed
    assert parity.tokenizer == TokenizerParity("none", None, None)
    assert len(parity.prompts) == 8 and all("random ids" in prompt.prompt for prompt in parity.prompts)
    assert set(parity.checksums) == {"config.ini", "manifest.json"}


def test_a_directory_without_a_manifest_lists_every_shard(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf")
    parity = prove(source, tmp_path / "w", spoil=lambda directory: (directory / "manifest.json").unlink())
    files = {path.name: path for path in (tmp_path / "w").glob("*.bin")}
    assert parity.passed and set(parity.checksums) == {"config.ini", "tokenizer.json", *files}
    assert all(
        parity.checksums[name] == hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
    )


def test_grouped_heads_and_scaled_rope_pass(tmp_path):
    model = tiny_llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    assert prove(save(model, tmp_path / "hf"), tmp_path / "w").passed


@pytest.mark.parametrize("family", ["llama", "bloom", "gpt2", "xglm"])
def test_a_comparison_calls_transformers_without_a_warning(tmp_path, family):
    source = save(FAMILIES[family](), tmp_path / "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert prove(source, tmp_path / "w").passed
