"""`LLM` with several ranks, in several processes, in a forked child, and in a running event loop."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.checkpoints import greedy
from tests.tools.llm.models import PROMPTS, tiny_checkpoint
from tridecode import LLM, SamplingParams
from tridecode.backend.base.errors import ConfigError
from tridecode.tools.build_repo.build import build_repo

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROGRAM = """
import json, sys
from tridecode import LLM, SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
with LLM(sys.argv[1]) as llm:
    print("ready", flush=True)
    sys.stdin.readline()
    found = llm.generate(json.loads(sys.argv[2]), params)
    print(json.dumps([one.outputs[0].token_ids for one in found]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    build_repo(str(tiny_checkpoint(folder)), folder / "models", parity=False)
    return folder


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder / "tiny")


@pytest.fixture
def llm(folder: Path, runtime: None) -> Iterator[LLM]:
    with LLM(folder / "models") as llm:
        yield llm


@pytest.mark.parametrize("degrees", [(2, 1), pytest.param((1, 2), marks=pytest.mark.nightly)])
def test_ranks_are_processes(folder, model, tmp_path, degrees) -> None:
    tensor, stages = degrees
    with LLM(
        folder / "tiny",
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        dtype="float32",
        cache=tmp_path / "cache",
    ) as llm:
        for one in llm.generate(PROMPTS, GREEDY):
            assert one.outputs[0].token_ids == greedy(model, one.prompt_token_ids, 6)[0]


def test_two_processes_run_one_repository_at_the_same_time(folder, model) -> None:
    command = [sys.executable, "-c", PROGRAM, str(folder / "models"), json.dumps(PROMPTS)]
    programs = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        assert [one.stdout.readline().strip() for one in programs] == ["ready", "ready"]  # both at once
        answers = [one.communicate("\n", timeout=200)[0] for one in programs]
    finally:
        for one in programs:
            one.kill()
            one.wait()
    assert json.loads(answers[0]) == json.loads(answers[1])
    assert all(len(ids) == 6 for ids in json.loads(answers[0]))


def test_a_forked_child_is_refused_and_leaves_the_engine_to_its_parent(llm) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate(PROMPTS[0], GREEDY)
            text = "no error"
        except ConfigError as error:
            text = str(error)
        llm.close()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert "is a fork of it; wanted an LLM of its own" in text
    assert llm.generate(PROMPTS[0], GREEDY)[0].finished


def test_sync_calls_work_inside_a_running_event_loop(llm) -> None:
    """A notebook runs its cells inside such a loop."""

    async def cell() -> None:
        assert llm.generate(PROMPTS, GREEDY)[3].finished
        *_, last = llm.stream(PROMPTS[0], GREEDY)
        assert last.finished
        assert len(llm.embed(PROMPTS[0])) == 1
        with llm.session() as session:
            assert session.generate(PROMPTS[0], GREEDY).finished
        (found,) = await llm.agenerate(PROMPTS[0], GREEDY)
        assert found.finished

    asyncio.run(cell())


def test_many_async_calls_run_together(llm) -> None:
    """More than the threads of a loop's pool."""

    async def together() -> list:
        return await asyncio.gather(*(llm.agenerate(PROMPTS[0], GREEDY) for _ in range(60)))

    found = asyncio.run(together())
    assert len({tuple(one.outputs[0].token_ids) for (one,) in found}) == 1


def test_settings_of_a_checkpoint_with_a_repository_are_refused(folder) -> None:
    for wrong in ({"tensor_parallel_size": 2}, {"dtype": "float16"}, {"revision": "main"}):
        with pytest.raises(ConfigError, match="is a model repository, whose config.pbtxt has the settings"):
            LLM(folder / "models", **wrong)
    with pytest.raises(ConfigError, match="dtype is 'int7'; wanted one of"):
        LLM(folder / "tiny", dtype="int7")
    with pytest.raises(TypeError, match="trust_me"):
        LLM(folder / "tiny", trust_me=True)
