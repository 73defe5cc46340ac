"""Programs for vLLM's offline interface run with another import and another path.

They call what its quick start calls: LLM(model=...), generate, the tokenizer's chat template, chat.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.llm.models import tiny_checkpoint

pytestmark = pytest.mark.slow
GENERATE = """
from vllm import LLM, SamplingParams

questions = ["The ferry leaves", "Il pleut sur", "def add(a, b", "The history of"]
sizes = {"max_model_len": 256, "max_num_seqs": 8}
llm = LLM(model="facebook/opt-125m", tensor_parallel_size=1, dtype="float32", **sizes)
outputs = llm.generate(questions, SamplingParams(temperature=0.8, top_p=0.95))
assert [one.prompt for one in outputs] == questions
for one in outputs:
    print(f"Prompt: {one.prompt!r}, Generated text: {one.outputs[0].text!r}")
greedy = SamplingParams(temperature=0.0, max_tokens=5, stop=["\\n\\n"], logprobs=1, ignore_eos=True)
(first,) = llm.generate({"prompt_token_ids": outputs[0].prompt_token_ids}, greedy)[0].outputs
assert len(first.token_ids) == 5 and first.finish_reason == "length" and first.logprobs[0]
"""
CHAT = """
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

llm = LLM(model="facebook/opt-125m", dtype="float32", max_model_len=256, max_num_seqs=8)
tokenizer = AutoTokenizer.from_pretrained("facebook/opt-125m")
chats = [[{"role": "user", "content": text}] for text in ("When does it leave?", "Il pleut sur")]
texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ours = llm.chat(chats, params, use_tqdm=False)
theirs = llm.generate(texts, params)
for one, other in zip(ours, theirs):
    assert one.prompt == other.prompt
    print(one.outputs[0].text)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    tiny_checkpoint(folder)
    return folder


@pytest.mark.parametrize(("program", "lines"), [(GENERATE, 4), (CHAT, 2)], ids=["generate", "chat"])
def test_a_program_runs(folder: Path, tmp_path: Path, program: str, lines: int) -> None:
    program = program.replace("from vllm import", "from tridecode import")
    program = program.replace("facebook/opt-125m", str(folder / "tiny"))
    environment = {
        "TRIDECODE_CACHE": str(folder / "cache"),
        "TRIDECODE_RUNTIME_DIR": str(tmp_path / "run"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) >= lines
