"""Prompts of a given length, from a file, or with the lengths of a data set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.checkpoints import tiny_tokenizer
from tridecode.backend.base.errors import ConfigError
from tridecode.tools.bench.jobs import with_workload
from tridecode.tools.bench.load.prompts import read_prompts, text_prompts
from tridecode.tools.bench.load.workloads import workload_prompts
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.shapes.random_repo import toy_tokenizer


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_text_prompts_have_exactly_the_tokens_that_were_asked_for(tokens, tmp_path) -> None:
    for name, tokenizer in {
        "plain": Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str()),
        "toy": toy_tokenizer(1024),
    }.items():
        texts = text_prompts(tokenizer, 5, tokens, seed=1)
        assert [len(tokenizer.encode(text).ids) for text in texts] == [tokens] * 5, name
        assert texts == text_prompts(tokenizer, 5, tokens, seed=1)
        assert tokens == 1 or len(set(texts)) > 1


def test_a_bos_that_the_tokenizer_adds_counts_as_a_prompt_token() -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizer(adds_bos=True).backend_tokenizer.to_str())
    assert len(tokenizer.encode("").ids) == 1
    (text,) = text_prompts(tokenizer, 1, 9, seed=1)
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 8


def test_lines_of_a_file_are_prompts(tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    assert read_prompts(path, 2) == ["one", "two"]
    path.write_text('{"text": "one"}\n{"txt": "two"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        (b"{", "line 1: wanted a JSON object"),
        (b'{"text": 3}', "line 1: wanted a JSON object"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b"[" * 100_000, "line 1: wanted a JSON object"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_read_is_named(tmp_path, content, told) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"p.jsonl.*{told}"):
        read_prompts(path)


def test_a_workload_has_lambadas_lengths_and_the_same_ids_every_time() -> None:
    prompts = workload_prompts("lambada", 1000)
    lengths = np.array([len(prompt) for prompt in prompts])
    assert (len(prompts), lengths.min(), lengths.max()) == (5153, 58, 222)
    assert lengths.mean() == pytest.approx(80.2, abs=0.01) and lengths.std() == pytest.approx(12.3, abs=0.01)
    assert lengths[:16].std() > 3  # a mix of lengths, not sorted
    ids = np.concatenate(prompts)
    assert ids.min() == 3 and ids.max() == 999
    assert workload_prompts("lambada", 1000, 20) == prompts[:20]
    assert workload_prompts("lambada", 1000, 20, seed=1) != prompts[:20]
    with pytest.raises(ConfigError, match="no workload 'squad'; wanted lambada"):
        workload_prompts("squad", 1000)


def test_prompts_of_a_file_or_workload_go_with_one_batch_size() -> None:
    job = Job(preset="toy", batches=(1, 8), output_tokens=4)
    with pytest.raises(ConfigError, match="--batches is 1, 8; wanted one number"):
        with_workload(job, "lambada", 5)
    with pytest.raises(ConfigError, match="2122 tokens; toy has 2048 positions"):
        with_workload(replace(job, batches=(4,), output_tokens=1900), "lambada", None)
