"""The text service in a process without Triton, in front of a fake engine and of a real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.checkpoints import FAMILIES, greedy, tiny_tokenizer
from tests.fake_engine import FakeEngine, FakeSupervisor, rebuilt, scripted
from tests.reliability.rank_service import write_weights
from tests.waiting import wait_until
from tridecode.backend.supervisor import processes

ROOT = Path(__file__).parents[3]
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message['role'] not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}
[{{ message['role'] }}] {{ message['content'] }}{% endfor %}
{% if add_generation_prompt %} [assistant]{% endif %}"""
TEXT = " the ferry leaves at seven and returns at nine"


class Program:
    """tests/backend/service/text_program.py as a child process."""

    def __init__(self, engine_dir: Path, tokenizer_dir: Path, environment: dict[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.backend.service.text_program", str(engine_dir), str(tokenizer_dir)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **environment},
        )  # fmt: skip
        self.pid = self._read()["pid"]

    def begin(self, **wanted: Any) -> None:
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()

    def ask(self, **wanted: Any) -> dict[str, Any]:
        self.begin(**wanted)
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        assert line, "the program has ended"
        return json.loads(line)

    end = _read

    def close(self) -> int:
        self._process.stdin.close()
        try:
            return self._process.wait(20)
        finally:
            self._process.kill()


@contextmanager
def program(*arguments: Any) -> Iterator[Program]:
    one = Program(*arguments)
    try:
        yield one
    finally:
        code = one.close()
    assert code == 0


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ids(tokenizer_dir):
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def decode(tokenizer_dir):
    return Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).decode


@pytest.fixture(scope="module")
def engine(ids) -> Iterator[FakeEngine]:
    with FakeEngine(next_token=scripted(ids(TEXT)), step_s=0.002) as engine:
        yield engine


@pytest.fixture(scope="module")
def supervisor(engine) -> Iterator[FakeSupervisor]:
    with FakeSupervisor(engine) as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def front(supervisor, tokenizer_dir) -> Iterator[Program]:
    with program("/models/toy", tokenizer_dir, {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}) as one:
        yield one


def sent_prompt(engine: FakeEngine) -> list[int]:
    return np.frombuffer(engine.submits[-1].sequences[0].prompt, "<i4").tolist()


def test_a_streamed_text_ends_before_its_stop_word_and_the_engine_stops(front, engine, ids, decode) -> None:
    found = front.ask(prompt="When does it leave?", max_tokens=400, stop=["and returns", "nowhere"])
    assert "".join(found["pieces"]) == " the ferry leaves at seven " and len(found["pieces"]) > 2
    assert found["finish"] == "stop" and "error" not in found
    assert found["prompt_tokens"] == len(ids("When does it leave?"))
    until = min(n for n in range(len(ids(TEXT))) if "and returns" in decode(ids(TEXT)[:n]))
    assert found["output_tokens"] == until
    assert sent_prompt(engine) == ids("When does it leave?")
    wait_until(lambda: engine.running == 0)
    assert engine.hellos[0].server_pid == front.pid and engine.hellos[0].shm_region == ""
    assert engine.submits[-1].label == "mine"


def test_a_whole_text_comes_in_one_piece_and_ids_are_a_prompt_too(front, engine, ids) -> None:
    wanted = ids("When?")
    found = front.ask(prompt=wanted, max_tokens=len(ids(TEXT)), whole=True)
    assert found["pieces"] == [TEXT] and found["finish"] == "length"
    assert (found["prompt_tokens"], found["output_tokens"]) == (len(wanted), len(ids(TEXT)))
    assert sent_prompt(engine) == wanted


def test_a_cancelled_request_ends_in_the_engine(front, engine) -> None:
    cancels = len(engine.cancels)
    found = front.ask(prompt="When?", max_tokens=450, cancel_after=3)
    assert found["code"] == "CANCELLED" and len(found["pieces"]) >= 3
    wait_until(lambda: len(engine.cancels) > cancels and engine.running == 0)


def test_a_chat_is_rendered_and_tokenised_as_by_transformers(front, engine) -> None:
    messages = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "At nine."}]
    messages += [{"role": "user", "content": "Are you sure?"}]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    found = front.ask(messages=messages, max_tokens=3)
    assert found["finish"] == "length" and found["output_tokens"] == 3
    assert sent_prompt(engine) == wanted and wanted[0] == tokenizer.bos_token_id
    assert found["prompt_tokens"] == len(wanted)


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (dict(prompt="x" * 70_000, max_tokens=1), "has 70,000 bytes; this model accepts 65,536"),
        (dict(prompt="x " * 600, max_tokens=1), "this model accepts 512 in all"),
        (dict(prompt=[5, 1000], max_tokens=1), "has the token id 1000; wanted whole numbers below 1000"),
        (dict(prompt=[5, -1], max_tokens=1), "has the token id -1"),
        (dict(prompt="x", max_tokens=1, stop=["x"] * 257), "stop_words has 257 words"),
        (dict(messages=[{"role": "robot", "content": "x"}], max_tokens=1), "no such role"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_the_engine(front, engine, wanted, error) -> None:
    before = len(engine.submits)
    found = front.ask(**wanted)
    assert found["code"] == "INVALID_ARG" and error in found["error"], found
    assert len(engine.submits) == before


def test_a_text_continues_on_the_next_engine(tokenizer_dir, ids) -> None:
    with (
        FakeEngine(next_token=scripted(ids(TEXT)), step_s=0.02) as engine,
        FakeSupervisor(engine) as supervisor,
    ):
        endpoint = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        with program("/models/toy", tokenizer_dir, endpoint) as front:
            front.begin(prompt="When?", max_tokens=len(ids(TEXT)))
            wait_until(lambda: engine.steps > 3)
            with rebuilt(engine, supervisor) as following:
                found = front.end()
                assert "".join(found["pieces"]) == TEXT and found["output_tokens"] == len(ids(TEXT))
                assert following.submits[0].sent


def test_a_real_engine_that_the_service_starts_answers_as_transformers(tmp_path) -> None:
    """Its life is that of the process: the supervisor ends when the program has ended."""
    case = FAMILIES["gpt2"]
    model = case(**case.shared)
    write_weights(model, tmp_path)
    engine_dir = tmp_path / "engine"
    (engine_dir / "1").mkdir(parents=True)
    settings = {
        "device": "cpu", "data_type": "fp32", "num_threads": 1, "max_sequences": 4, "cache_bytes": 4 << 20,
        "model_checkpoint_path": tmp_path / "weights",
    }  # fmt: skip
    lines = [f'parameters {{ key: "{k}" value: {{ string_value: "{v}" }} }}' for k, v in settings.items()]
    (engine_dir / "config.pbtxt").write_text("\n".join(lines))
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    prompt = tokenizer.encode("the ferry leaves").ids
    wanted, _ = greedy(model, prompt, 12)
    runtime = tempfile.mkdtemp(prefix="tdtext")  # pytest's own folders are too long for a socket
    environment = {
        "TRIDECODE_ENGINE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "TRIDECODE_RUNTIME_DIR": runtime,
    }  # fmt: skip
    with program(engine_dir, tmp_path / "hf", environment) as front:
        found = front.ask(prompt="the ferry leaves", max_tokens=12)
        assert "".join(found["pieces"]) == tokenizer.decode(prompt + wanted)[len("the ferry leaves") :]
        assert (found["prompt_tokens"], found["output_tokens"]) == (len(prompt), 12)
        assert processes_of(engine_dir)
    wait_until(lambda: not processes_of(engine_dir), 30, "the end of supervisor and rank")
    shutil.rmtree(runtime, ignore_errors=True)


def processes_of(engine_dir: Path) -> list[int]:
    lines = {pid: processes.command_line(pid) or [] for pid in processes.all_pids()}
    return [pid for pid, words in lines.items() if any(str(engine_dir) in word for word in words)]
