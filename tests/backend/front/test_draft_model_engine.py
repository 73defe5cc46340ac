"""The service before a real engine with a draft model: texts, a kill, and a refusal at the start."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.backend.front.fronts import Front
from tests.checkpoints import greedy, save, tiny_llama
from tests.waiting import wait_until
from tridecode.backend.supervisor import processes
from tridecode.tools.build_repo.build import build_repo

PROMPT = "the ferry leaves at seven"
COUNT = 200


def alike() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return a target and a draft model that agree: the target's additional layers add nothing."""
    target = tiny_llama(max_position_embeddings=512, num_hidden_layers=16)
    with torch.no_grad():
        for layer in target.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    draft = tiny_llama(max_position_embeddings=512)
    assert len(draft.model.layers) == 2
    draft.load_state_dict(target.state_dict(), strict=False)
    return target, draft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("draft")
    target, draft = (save(model, made / name) for name, model in zip(("hf", "small"), alike()))
    settings = {"cache_bytes": 64 << 20, "num_threads": 1, "max_sequences": 16, "device": "cpu"}
    build_repo(
        target, made / "repo", tensor_para_size=1, draft=draft, parity=False, dtype="fp32",
        engine_settings=settings, console=Console(file=io.StringIO()),
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    with Front(folder / "repo", folder / "front.log") as front:
        yield front
    wait_until(lambda: not ranks_of(folder), 60, "the end of the engine")


def ranks_of(folder: Path) -> list[int]:
    lines = {pid: processes.command_line(pid) or [] for pid in processes.all_pids()}
    return [
        pid
        for pid, words in lines.items()
        if "tridecode.backend.engine" in words and any(str(folder) in word for word in words)
    ]


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    """transformers' greedy text."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    prompt = tokenizer.encode(PROMPT)
    tokens, _ = greedy(model, prompt, COUNT)
    return tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]


def test_a_text_with_drafts_continues_after_a_kill_of_the_engine(
    front: Front, folder: Path, text: str
) -> None:
    asked = {"model": "hf", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True, "skip_special_tokens": False}
    assert front.openai.completions.create(**asked).choices[0].text == text
    assert "a step of 1 rows of 2 tokens" in front.text(), "its costs are measured"
    parts: list[str] = []
    for chunk in front.openai.completions.create(stream=True, **asked):
        parts += [choice.text for choice in chunk.choices]
        if len(parts) == 10:
            (rank,) = ranks_of(folder)
            os.kill(rank, signal.SIGKILL)
    assert "".join(parts) == text


def test_another_tokenizer_of_the_draft_model_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(folder / "repo", tmp_path / "repo"))
    file = repository / "fastertransformer" / "draft" / "tokenizer.json"
    facts = json.loads(file.read_text())
    facts["added_tokens"][0]["content"] = "<|other|>"
    facts["model"]["vocab"]["<|other|>"] = facts["model"]["vocab"].pop("<|endoftext|>")
    file.write_text(json.dumps(facts))
    wanted = r"the tokenizer of the draft model in \S+ is not that of the served model: found id 0"
    with Front(repository, tmp_path / "front.log", ready=False) as front:
        wait_until(lambda: re.search(wanted, front.text()), 120, "the refusal")
