"""GGUF files of every architecture that llama.cpp and this project share.

A tiny model of transformers is written as llama.cpp's converter does. llama.cpp itself, transformers' model
and the converted weights must say the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.checkpoints import greedy
from tests.converters.gguf.gguf_files import HARD_TEXTS, bpe_keys
from tests.converters.gguf.gguf_models import CASES, VOCABULARY, write_model
from tests.llama_cpp import LlamaCpp
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.engine.offline import run_greedy
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity.comparison import check_parity
from tridecode.tools.build_repo.build import build_repo

NEW_TOKENS, EOS = 4, 2


def keys() -> dict:
    """ASCII tokens: llama.cpp's server holds back what is only a part of a letter, and its probabilities."""
    tokens = ["w", "1", "</s>", "w1", *(f"t{number}" for number in range(4, VOCABULARY))]
    return {
        "model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": [1] * VOCABULARY, "merges": ["w 1"],
        "bos_token_id": 1, "eos_token_id": EOS,
    }  # fmt: skip


def prompt_of(model) -> list[int]:
    """Token ids behind which the model does not end at once."""
    for seed in range(20):
        prompt = np.random.default_rng(seed).integers(3, VOCABULARY, 24).tolist()
        if EOS not in greedy(model, prompt, NEW_TOKENS)[0]:
            return prompt
    raise AssertionError("the model always ends")


@pytest.mark.parametrize("family", CASES)
def test_a_gguf_says_what_llama_cpp_and_transformers_say(family, tmp_path: Path) -> None:
    case = CASES[family]
    model = case.model()
    prompt = prompt_of(model)
    path = write_model(tmp_path / "m.gguf", model, case, keys())
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).numpy()
    theirs, rows = LlamaCpp(path).greedy(prompt, NEW_TOKENS, VOCABULARY)
    assert np.abs(np.array(rows[0]) - wanted).max() < (1e-3 if case.exact else 5e-2)
    checkpoint = open_checkpoint(path)
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "w")
    tokens, logits = run_greedy(tmp_path / "w", [prompt], NEW_TOKENS)
    ours = torch.from_numpy(np.asarray(logits[0][0])).log_softmax(-1).numpy()
    np.testing.assert_allclose(ours, wanted, atol=2e-4)
    assert tokens[0] == greedy(model, prompt, NEW_TOKENS)[0] == theirs
    assert check_parity(checkpoint, tmp_path / "w", planned.config, None).passed


@pytest.mark.parametrize("family", ["llama", "llama 3", "qwen2", "phi2", "stablelm"])
def test_fused_queries_keys_and_values_are_taken_apart(family, tmp_path: Path) -> None:
    """llama.cpp's converter has an option for it; older files of Phi-2 are always fused."""
    case = CASES[family]
    model = case.model()
    path = write_model(tmp_path / "m.gguf", model, case, keys(), fuse=True)
    assert_reads(path, model)


def test_separate_queries_keys_and_values_become_phi_3s_one(tmp_path: Path) -> None:
    case = CASES["phi3"]
    model = case.model()
    apart, rows = tmp_path / "m.gguf", [64, 32, 32]

    def split(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        if ".attn_qkv." not in name:
            return {name: weight}
        parts = np.split(weight, np.cumsum(rows)[:-1])
        return {name.replace("qkv", part): rows for part, rows in zip("qkv", parts)}

    assert_reads(write_model(apart, model, case, keys(), split=split), model)


def assert_reads(path: Path, model) -> None:
    tensors = open_checkpoint(path).tensors
    for name, wanted in model.state_dict().items():
        torch.testing.assert_close(tensors.read(name), wanted, atol=1e-6, rtol=0)
        assert tensors.shapes[name] == tuple(wanted.shape)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "falcon 40b", "stablelm 12b"])
def test_quantised_matrices_are_expanded(family, tmp_path: Path) -> None:
    case = CASES[family]
    model = case.model()
    path = write_model(tmp_path / "m.gguf", model, case, keys(), gguf.GGMLQuantizationType.Q8_0)
    tensors = open_checkpoint(path).tensors
    for name, wanted in model.state_dict().items():
        if name in tensors.shapes:
            torch.testing.assert_close(tensors.read(name), wanted, atol=2e-2, rtol=0)


def test_baichuan_13b_has_alibi_as_in_llama_cpp(tmp_path: Path) -> None:
    case = CASES["baichuan 7b"]
    model = case.model(num_hidden_layers=40)
    path, prompt = write_model(tmp_path / "m.gguf", model, case, keys()), [5, 6, 7, 8, 9, 200, 31]
    checkpoint = open_checkpoint(path)
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "w")
    tokens, logits = run_greedy(tmp_path / "w", [prompt], NEW_TOKENS)
    theirs, rows = LlamaCpp(path).greedy(prompt, NEW_TOKENS, VOCABULARY)
    ours = torch.from_numpy(np.asarray(logits[0][0])).log_softmax(-1).numpy()
    assert tokens[0] == theirs and np.abs(np.array(rows[0]) - ours).max() < 1e-3
    assert check_parity(checkpoint, tmp_path / "w", planned.config, None).passed


@pytest.mark.parametrize("name", ["llama 3", "qwen2"])
def test_a_repository_of_a_gguf_has_its_tokenizer_and_its_answers(name, tmp_path: Path) -> None:
    case = CASES[name]
    vocabulary = bpe_keys("llama-bpe" if name == "llama 3" else "qwen2")
    model = case.model(vocab_size=len(vocabulary["tokens"]))
    path = write_model(tmp_path / "m.gguf", model, case, vocabulary)
    repository = build_repo(path, tmp_path / "repo")
    parity = json.loads((repository / "PARITY.json").read_text())
    assert parity["tokenizer"]["reference"] == "llama.cpp"
    assert parity["reference"]["tensors"] == "read by transformers"
    assert parity["passed"] and parity["greedy_agreement"] == 1.0
    served = Tokenizer.from_file(str(repository / "preprocessing/1/tokenizer/tokenizer.json"))
    theirs = LlamaCpp(path)
    for text in HARD_TEXTS:
        assert served.encode(text).ids == theirs.tokenize(text), text


SCALINGS = {
    "llama 3": ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "llama 3 of other parameters": ("longrope", {"attention_factor": 1.0}),
    "llama linear": ("linear", {"factor": 4.0}),
    "llama yarn": ("yarn", {"factor": 4.0, "original_max_positions": 32}),
    "qwen2 yarn": ("yarn", {"factor": 4.0}),
    "phi3 long": ("longrope", {"size": 8, "long_factors": (1.0, 2.0, 4.0, 8.0), "recompute": True}),
}


@pytest.mark.parametrize("family", SCALINGS)
def test_rope_scalings_are_kept(family, tmp_path: Path) -> None:
    case, (scaling, numbers) = CASES[family], SCALINGS[family]
    path = write_model(tmp_path / "m.gguf", case.model(), case, keys())
    rope = plan_conversion(open_checkpoint(path)).config.rope
    assert rope.scaling == scaling
    for key, value in numbers.items():
        assert getattr(rope, key) == value


REFUSED = {
    "experts": ("llama", {"llama.expert_count": 8}, "llama.expert_count = 8; this"),
    "scores": ("qwen2", {"qwen2.attn_logit_softcapping": 30}, "qwen2.attn_logit_softcapping = 30"),
    "heads by layer": ("llama", {"llama.attention.head_count": [4, 2]}, "= [4, 2], which differs by layer"),
    "half a rotation": ("qwen2", {"qwen2.rope.dimension_count": 8}, "rope.dimension_count = 8"),
    "longrope alone": ("llama", {"llama.rope.scaling.type": "longrope"}, "longrope without its factors"),
    "yarn's factor": ("qwen2 yarn", {"qwen2.rope.scaling.yarn_attn_factor": 3}, "yarn_attn_factor = 3"),
    "grouped starcoder": ("starcoder", {"starcoder.attention.head_count_kv": 2}, "with 2 kv heads"),
    "baichuan": ("baichuan 7b", {"baichuan.block_count": 30}, "Baichuan with 30 layers; this"),
    "no size": ("gpt2", {"gpt2.embedding_length": 0}, "gpt2.embedding_length = 0; wanted 1 or more"),
    "a text": ("gpt2", {"gpt2.block_count": "two"}, "gpt2.block_count = two; wanted"),
    "another": ("llama", {"general.architecture": "mamba"}, "the GGUF architecture 'mamba'; this"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_network_does_not_run_is_refused_by_name(case, tmp_path: Path) -> None:
    family, changed, complaint = REFUSED[case]
    made = CASES[family]
    path = write_model(tmp_path / "m.gguf", made.model(), made, keys(), changed=changed)
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        plan_conversion(open_checkpoint(path))
    assert complaint in str(caught.value) and str(path) in str(caught.value)


def test_factors_that_no_network_divides_by_are_refused(tmp_path: Path) -> None:
    case = CASES["qwen2"]
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write_model(tmp_path / "m.gguf", case.model(), case, keys(), split=lambda n, w: {n: w} | factors)
    with pytest.raises(UnsupportedError, match="rope_freqs.weight, which llama.cpp does not use there"):
        open_checkpoint(path)


def test_a_part_of_a_split_file_and_a_type_that_is_not_expanded_are_refused(tmp_path: Path) -> None:
    case = CASES["qwen2"]
    model, changed = case.model(), {"split.no": 1, "split.count": 3}
    path = write_model(tmp_path / "m.gguf", model, case, keys(), changed=changed)
    with pytest.raises(UnsupportedError, match="part 2 of 3 of a split file; join them"):
        open_checkpoint(path)
    numbers = {"blk.0.attn_q.weight": np.ones((64, 64), np.int32)}
    path = write_model(
        tmp_path / "n.gguf", model, case, keys(), split=lambda n, w: {n: numbers.get(n, w)}, kind=None
    )
    with pytest.raises(UnsupportedError, match="blk.0.attn_q.weight is stored as I32, which this version"):
        open_checkpoint(path)


def test_a_key_that_is_not_known_is_named(tmp_path: Path) -> None:
    case = CASES["qwen2"]
    path = write_model(tmp_path / "m.gguf", case.model(), case, keys(), changed={"qwen2.dream.depth": 3})
    assert open_checkpoint(path).notes == ["keys of m.gguf that are not read: dream.depth"]
