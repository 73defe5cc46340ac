"""Sessions and prompt tables of `LLM` over a real engine: answers are transformers'."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import greedy
from tests.prompt_adapters import greedy_embedded, make_prompt
from tests.tools.llm.models import PROMPTS, tiny_checkpoint
from tridecode import LLM, PromptTable, SamplingParams
from tridecode.backend.base.errors import ContextLengthError, RequestError, SessionGoneError
from tridecode.tools.build_repo.build import build_repo

pytestmark = pytest.mark.slow
COUNT = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a prompt task, which PEFT has saved."""
    folder = tmp_path_factory.mktemp("sessions")
    checkpoint = tiny_checkpoint(folder)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    make_prompt(model, folder / "squad", "prompt", 4, seed=5)
    build_repo(str(checkpoint), folder / "models", parity=False, prompts=[folder / "squad"])
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDECODE_RUNTIME_DIR", str(folder / "run"))
        with LLM(folder / "models") as llm:
            yield llm


@pytest.fixture(scope="module")
def model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder / "tiny")


# ---------------------------------------------------------------- sessions


def test_rounds_continue_each_other(llm, model) -> None:
    with llm.session() as session:
        tokens: list[int] = []
        for text in ("The history of", " and then", " the end"):
            output = session.generate(text, GREEDY)
            new = llm.encode(text, None if not tokens else False)
            assert (output.prompt, output.prompt_token_ids) == (text, new)
            wanted, _ = greedy(model, tokens + new, COUNT)
            assert output.outputs[0].token_ids == wanted
            tokens += new + wanted
            assert session.token_ids == tokens


def test_a_stream_is_a_round_and_one_that_is_left_changes_nothing(llm, model) -> None:
    long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    with llm.session() as session:
        first = session.generate("The history of", GREEDY)
        before = session.token_ids
        stream = session.stream(" and", long)
        next(stream)
        with pytest.raises(RequestError, match="a round of this session is running"):
            session.generate(" x", GREEDY)
        stream.close()
        assert session.token_ids == before
        *_, last = session.stream(" and then", GREEDY)
        wanted, _ = greedy(model, before + llm.encode(" and then", False), COUNT)
        assert last.outputs[0].token_ids == wanted and first.outputs[0].token_ids == before[-COUNT:]


def test_an_end_token_is_replaced_by_the_next_round(llm, model) -> None:
    ids = llm.encode("The history of")
    wanted, _ = greedy(model, ids, 3)
    end = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=[wanted[2]])
    with llm.session() as session:
        answer = session.generate("The history of", end).outputs[0]
        assert answer.finish_reason == "stop" and answer.token_ids == wanted
        assert session.token_ids == ids + wanted[:2]
        more, _ = greedy(model, ids + wanted[:2] + [5, 6], COUNT)
        assert session.generate([5, 6], GREEDY).outputs[0].token_ids == more


def test_a_session_that_the_engine_has_freed_is_computed_again(llm, model) -> None:
    with llm.session(idle_s=0.2) as session, llm.session(64, memory_tokens=32, idle_s=0.2) as ring:
        for one in (session, ring):
            one.generate("The history of", GREEDY)
        time.sleep(2.5)  # the engine looks twice a second
        before = session.token_ids
        wanted, _ = greedy(model, before + [5, 6], COUNT)
        assert session.generate([5, 6], GREEDY).outputs[0].token_ids == wanted
        with pytest.raises(SessionGoneError):
            ring.generate([5, 6], GREEDY)


def test_what_does_not_fit_a_session_is_refused(llm) -> None:
    with llm.session(24) as session:
        session.generate([5, 6, 7], GREEDY)
        with pytest.raises(ContextLengthError, match="the session has 9 tokens.*room for 24 in all"):
            session.generate([5], SamplingParams(max_tokens=20))
        with pytest.raises(RequestError, match="n is 2 in a session"):
            session.generate([5], SamplingParams(n=2))
        with pytest.raises(RequestError, match="stop has texts in a session"):
            session.generate([5], SamplingParams(stop="x"))
        whole = session.generate([5], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert len(whole.outputs[0].token_ids) == 24 - 9 - 1
    with pytest.raises(RequestError, match="the session is closed"):
        session.generate([5], GREEDY)
    for wrong in ({"max_tokens": 10**6}, {"memory_tokens": -1}, {"idle_s": 0}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            llm.session(**wrong)


# ---------------------------------------------------------------- prompt tables


def test_tables_of_each_prompt_are_the_embeddings_of_transformers(llm, model) -> None:
    vocab, width = model.config.vocab_size, model.config.hidden_size
    tables = [torch.randn(n, width, generator=torch.Generator().manual_seed(n)) * 0.5 for n in (3, 5)]
    prompts = [llm.encode(text) for text in PROMPTS[:3]]
    given = [PromptTable(table.numpy()) for table in tables]
    found = llm.generate(prompts, GREEDY, prompt_table=[*given, None])
    for one, ids, table in zip(found, prompts, tables):
        virtual = [*range(vocab, vocab + len(table)), *ids]
        wanted, _ = greedy_embedded(model, virtual, table, vocab, COUNT)
        assert one.outputs[0].token_ids == wanted and one.prompt_token_ids == ids
    assert found[2].outputs[0].token_ids == greedy(model, prompts[2], COUNT)[0]


def test_a_task_of_the_repository_is_named(llm, model, folder) -> None:
    from safetensors.torch import load_file

    (table,) = load_file(folder / "squad" / "adapter_model.safetensors").values()
    ids, vocab = llm.encode(PROMPTS[0]), model.config.vocab_size
    wanted, _ = greedy_embedded(model, [*range(vocab, vocab + len(table)), *ids], table, vocab, COUNT)
    assert llm.generate(ids, GREEDY, prompt_table="squad")[0].outputs[0].token_ids == wanted
    *_, last = llm.stream(ids, GREEDY, prompt_table="squad")
    assert last.outputs[0].token_ids == wanted


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("absent", "prompt_table is 'absent'; wanted one of the tasks squad"),
        (PromptTable([[1.0, 2.0]]), "has 2 values a position; wanted"),
        (PromptTable([1.0]), "wanted floats of shape"),
        (PromptTable([[1, 2]]), "wanted floats of shape"),
        (PromptTable([[1.0]], "hard"), "kind of a prompt table is 'hard'; wanted soft, prefix, p-tuning"),
        ([None], "1 prompt tables for 2 prompts"),
    ],
)
def test_wrong_tables_are_refused(llm, table, text) -> None:
    with pytest.raises(RequestError, match=text):
        llm.generate(PROMPTS[:2], GREEDY, prompt_table=table)
