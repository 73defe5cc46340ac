"""`LLM.connect`: answers of a service are those of an LLM that runs the same repository."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.backend.front.fronts import Front
from tests.checkpoints import greedy
from tests.tools.llm.models import PROMPTS, tiny_checkpoint
from tests.waiting import wait_until
from tridecode import LLM, BeamSearchParams, PoolingParams, PromptTable, SamplingParams
from tridecode.backend.base.errors import (
    ConfigError,
    EngineDownError,
    RequestCancelled,
    RequestError,
    UnsupportedError,
)
from tridecode.tools.build_repo.build import build_repo

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("connect")
    build_repo(str(tiny_checkpoint(folder)), folder / "models", parity=False)
    return folder


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    environment = {"TRIDECODE_RUNTIME_DIR": str(folder / "run")}
    options = ("--api-key", "secret")
    front = Front(folder / "models", folder / "front.log", *options, ready=False, **environment)
    try:
        front.wait_ready(300)
        yield front
    finally:
        front.close()


@pytest.fixture(scope="module")
def llm(front: Front) -> Iterator[LLM]:
    with LLM.connect(front.url, api_key="secret") as llm:
        yield llm


@pytest.fixture(scope="module")
def local(folder: Path, front: Front) -> Iterator[LLM]:
    """The same repository with the same engine, without HTTP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDECODE_RUNTIME_DIR", str(folder / "run"))
        with LLM(folder / "models") as local:
            yield local


@pytest.fixture(scope="module")
def reference(folder: Path):
    checkpoint = folder / "tiny"
    return AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)


def test_greedy_answers_are_those_of_transformers(llm, reference) -> None:
    model, tokenizer = reference
    found = llm.generate(PROMPTS * 10, GREEDY)
    assert [one.prompt for one in found] == PROMPTS * 10
    for one in found:
        assert one.prompt_token_ids == tokenizer(one.prompt).input_ids
        tokens, _ = greedy(model, one.prompt_token_ids, 8)
        (answer,) = one.outputs
        assert answer.token_ids == tokens and answer.finish_reason == "length" and one.finished
        wanted = tokenizer.decode(one.prompt_token_ids + tokens, skip_special_tokens=True)
        assert one.prompt + answer.text == wanted
        assert answer.logprobs is None and answer.cumulative_logprob is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True),
        SamplingParams(n=3, temperature=1.5, seed=7, max_tokens=6, logprobs=2),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, seed=3, max_tokens=12),
        SamplingParams(
            temperature=0, max_tokens=40, frequency_penalty=0.5, presence_penalty=0.5, min_tokens=4
        ),
        SamplingParams(temperature=0, max_tokens=None, stop=["e", "a"], include_stop_str_in_output=True),
        SamplingParams(temperature=0, max_tokens=5, truncate_prompt_tokens=2, stop_token_ids=[7]),
        SamplingParams(temperature=0, max_tokens=0),
        SamplingParams(n=2, best_of=5, temperature=1.5, seed=7, max_tokens=6),
        SamplingParams(best_of=3, temperature=1.5, seed=7, max_tokens=6, logprobs=1),
        SamplingParams(temperature=0, max_tokens=20, structured_outputs={"choice": ["high", "low"]}),
    ],
)
def test_results_are_those_of_an_llm_without_a_service(llm, local, params) -> None:
    found, wanted = llm.generate(PROMPTS, params), local.generate(PROMPTS, params)
    for one, other in zip(found, wanted):
        assert (one.prompt, one.prompt_token_ids) == (other.prompt, other.prompt_token_ids)
        for answer, same in zip(one.outputs, other.outputs, strict=True):
            assert (answer.index, answer.text, answer.token_ids) == (same.index, same.text, same.token_ids)
            assert (answer.finish_reason, answer.stop_reason) == (same.finish_reason, same.stop_reason)
            assert (answer.logprobs is None) == (same.logprobs is None)
            for step, entries in zip(answer.logprobs or [], same.logprobs or [], strict=True):
                assert list(step) == list(entries)
                for token, entry in entries.items():
                    assert step[token].logprob == pytest.approx(entry.logprob, abs=1e-5)
                    assert step[token].decoded_token == entry.decoded_token
                    assert step[token].rank in (entry.rank, None)
            assert answer.cumulative_logprob == pytest.approx(same.cumulative_logprob, abs=1e-4)


def test_chats_embeddings_and_the_tokenizer(llm, local) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert llm.has_chat_template and llm.max_model_len == local.max_model_len == 512
    assert llm.model_name == local.model_name
    (found,), (wanted,) = llm.chat(messages, GREEDY), local.chat(messages, GREEDY)
    assert (found.prompt, found.prompt_token_ids) == (wanted.prompt, wanted.prompt_token_ids)
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert llm.encode("The ferry") == local.encode("The ferry")
    assert llm.decode(llm.encode("The ferry")) == local.decode(local.encode("The ferry"))
    for params in (PoolingParams(), PoolingParams("mean", normalize=False)):
        for one, other in zip(llm.embed(PROMPTS, params), local.embed(PROMPTS, params)):
            np.testing.assert_allclose(one.outputs.embedding, other.outputs.embedding, atol=1e-5)


def test_streams_with_and_without_an_event_loop(llm) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1)
    (whole,) = llm.generate(PROMPTS[0], params)[0].outputs
    texts = [found.outputs[0].text for found in llm.stream(PROMPTS[0], params)]
    assert texts[-1] == whole.text and len(texts) > 2
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))

    async def last(prompt: str) -> tuple[list[int], int]:
        ids: list[int] = []
        async for found in llm.astream(prompt, params):
            ids = list(found.outputs[0].token_ids)
        return ids, len(found.outputs[0].logprobs or [])

    async def together() -> list:
        chat = llm.achat([{"role": "user", "content": "Hello"}], GREEDY)
        return await asyncio.gather(last(PROMPTS[0]), last(PROMPTS[1]), chat, llm.aembed(PROMPTS))

    first, _, (answer,), vectors = asyncio.run(together())
    assert first == (whole.token_ids, 60) and answer.finished and len(vectors) == 4


def running(front: Front) -> int:
    page = front.http.get("/metrics", headers={"authorization": "Bearer secret"}).text
    (line,) = [line for line in page.splitlines() if line.startswith("tridecode_engine_open_requests")]
    return int(float(line.split()[-1]))


def test_a_stream_that_is_left_is_cancelled_in_the_engine(llm, front) -> None:
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    stream.close()
    wait_until(lambda: running(front) == 0, 60, "the engine to have no request")


def test_a_task_that_is_cancelled_cancels_its_prompts(llm, front) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(llm.agenerate(PROMPTS, LONG))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    wait_until(lambda: running(front) == 0, 60, "the engine to have no request")


def test_errors_of_the_service_have_the_classes_of_an_llm(llm) -> None:
    for params, kind, text in (
        (SamplingParams(top_p=1.5), RequestError, "top_p is 1.5"),
        (SamplingParams(temperature="hot"), RequestError, "temperature"),  # type: ignore[arg-type]
        (SamplingParams(max_tokens=10**6), RequestError, "max_tokens"),
        (BeamSearchParams(2), UnsupportedError, "a service has no beam search"),
        (SamplingParams(prompt_logprobs=1), UnsupportedError, "a service returns no prompt_logprobs"),
        (SamplingParams(n=2, best_of=1), RequestError, "best_of is 1 and n is 2"),
    ):
        with pytest.raises(kind, match=text):
            llm.generate(PROMPTS, params)
    with pytest.raises(UnsupportedError, match="prompt tables"):
        llm.generate(PROMPTS[0], prompt_table=PromptTable(np.zeros((2, 8), np.float32)))
    with pytest.raises(RequestError, match='"absent" does not exist'):
        llm.generate(PROMPTS[0], GREEDY, adapter="absent")
    assert llm.generate(PROMPTS[0], GREEDY)[0].finished


def test_sessions_continue_by_the_prefix_cache(llm, local) -> None:
    rounds = []
    for one in (llm, local):
        with one.session() as session:
            first = session.generate("The history of", GREEDY)
            second = session.generate(" and then", GREEDY)
            rounds.append((first.outputs[0].token_ids, second.outputs[0].token_ids, session.token_ids))
    assert rounds[0] == rounds[1]


def test_wrong_addresses_keys_and_names_are_refused(front) -> None:
    with pytest.raises(ConfigError, match="is not an address of HTTP"):
        LLM.connect("localhost:9000")
    with pytest.raises(ConfigError, match="[Kk]ey"):
        LLM.connect(front.url, api_key="wrong")
    with pytest.raises(ConfigError, match="'absent' is not served"):
        LLM.connect(front.url, api_key="secret", model="absent")
    with socket.socket() as held:  # a port on which nobody listens
        held.bind(("127.0.0.1", 0))
        began = time.monotonic()
        with pytest.raises(EngineDownError, match="does not answer"):
            LLM.connect(f"http://127.0.0.1:{held.getsockname()[1]}")
        assert time.monotonic() - began < 30


def test_closing_ends_the_waits_of_other_threads(front) -> None:
    llm = LLM.connect(f"{front.url}/v1", api_key="secret")
    found: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate(PROMPTS * 20, LONG)
        except (RequestCancelled, EngineDownError) as error:
            found.append(error)

    thread = threading.Thread(daemon=True, target=ask)
    thread.start()
    time.sleep(0.3)
    llm.close()
    thread.join(60)
    assert not thread.is_alive() and len(found) == 1
    with pytest.raises(EngineDownError, match="is closed"):
        llm.generate(PROMPTS[0])
    llm.close()
