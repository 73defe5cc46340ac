"""`tridecode batch --model CHECKPOINT`: a real engine on the CPU, whose texts are transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import greedy, save, tiny_llama
from tests.tools.batch.batches import read, request, write
from tests.waiting import wait_until
from tridecode.tools.batch.batch import BatchOptions, run_batch

PROMPTS = {
    "english": "The history of",
    "french": "Il pleut sur",
    "code": "def add(a, b",
    "long": "a b c " * 30,
}
COUNT = 8


def processes_of(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


@pytest.mark.slow
def test_a_checkpoint_answers_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save(tiny_llama(max_position_embeddings=512), tmp_path / "tiny")
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    body = {"model": "mine", "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    lines = [request(n, "/v1/completions", {**body, "prompt": text}) for n, text in PROMPTS.items()]
    lines.append(request("vector", "/v1/embeddings", {"input": PROMPTS["english"], "model": "mine"}))
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    options = BatchOptions(source, out, tmp_path / "errors", model=str(checkpoint), cache=tmp_path / "cache")
    assert run_batch(replace(options, served_model_name=("mine",))) == 0
    bodies = {line["custom_id"]: line["response"]["body"] for line in read(out)}
    assert set(bodies) == {*PROMPTS, "vector"}
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name, text in PROMPTS.items():
        prompt = tokenizer(text).input_ids
        tokens, _ = greedy(model, prompt, COUNT)
        wanted = tokenizer.decode(prompt + tokens, skip_special_tokens=True)[len(text) :]
        assert bodies[name]["choices"][0]["text"] == wanted, name
        assert bodies[name]["usage"]["completion_tokens"] == COUNT
    with torch.inference_mode():
        prompt = tokenizer(PROMPTS["english"], return_tensors="pt").input_ids
        state = model(prompt, output_hidden_states=True).hidden_states[-1][0, -1]
    vector = torch.tensor(bodies["vector"]["data"][0]["embedding"])
    assert torch.allclose(vector, state / state.norm(), atol=1e-4)
    wait_until(lambda: not processes_of(tmp_path), 30, "the end of the engine")
