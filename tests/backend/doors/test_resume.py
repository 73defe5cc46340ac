"""An engine that dies is a pause: the next one continues the requests, at the link and at every door."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors import test_interactive as rounds
from tests.backend.doors.running import only, running
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.backend.service.test_engine_link import Collector, link_to, sequence
from tests.fake_engine import (
    LIMITS,
    REASON,
    FakeEngine,
    FakeSupervisor,
    rebuilt,
    toy_beam_steps,
    toy_next,
    toy_tokens,
)
from tests.waiting import wait_until
from tridecode.backend.doors import fastertransformer, interactive, llmapi, text, token_model, vllm
from tridecode.backend.doors.contracts.fastertransformer import FASTERTRANSFORMER
from tridecode.backend.doors.contracts.llmapi import LLMAPI
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.doors.contracts.tensorrt_llm_tokens import TENSORRT_LLM_TOKENS
from tridecode.backend.doors.contracts.vllm import VLLM
from tridecode.backend.service.engine_link import EngineLink
from tridecode.backend.service.owner import Owner
from tridecode.backend.wire import messages as m

STEP_S = 0.005


@pytest.fixture()
def engine():
    with FakeEngine(step_s=STEP_S) as engine:
        yield engine


@pytest.fixture()
def supervisor(engine):
    with FakeSupervisor(engine) as supervisor:
        yield supervisor


@pytest.fixture()
def link(supervisor):
    link = link_to(supervisor)
    link.wait_ready(60)
    yield link
    link.close()


# ---------------------------------------------------------------- at the link


def begin(link: EngineLink, *sequences: m.SequenceRequest, **options) -> Collector:
    done = Collector(sum(one.params.num_sequences for one in sequences))
    link.submit(link.reserve(), list(sequences), done, **{"resume_within_s": 30.0, **options})
    wait_until(lambda: len(done.events) > 3 * len(sequences))
    return done


@pytest.mark.parametrize(
    "params", [dict(), dict(top_k=0, seed=77, count_prompt=False)], ids=["greedy", "sampled"]
)
def test_64_requests_continue_with_the_tokens_of_an_undisturbed_run(link, engine, supervisor, params, caplog):
    caplog.set_level(logging.INFO, "tridecode.door")
    requests = [Collector() for _ in range(64)]
    for i, done in enumerate(requests):
        link.submit(link.reserve(), [sequence([4, i], max_tokens=200, **params)], done, resume_within_s=30.0)
    wait_until(lambda: all(len(done.events) > 20 for done in requests))
    with rebuilt(engine, supervisor) as following:
        for i, done in enumerate(requests):
            assert done.wait(60)[-1].finish == "length"
            assert done.tokens() == toy_tokens([4, i], 200, m.SamplingParams(**params), LIMITS.vocab_size)
        assert len(following.submits) == 64 and all(one.sent[0].tokens for one in following.submits)
    assert link.resumed().requests == 64 and link.resumed().wait_s > 0
    assert f"64 requests are waiting for another engine: the engine is down: {REASON}" in caplog.text
    assert "another engine continues 64 requests after" in caplog.text


def test_samples_and_prompts_of_one_request_continue_each_where_it_was(link, engine, supervisor):
    params = m.SamplingParams(max_tokens=200, top_k=0, seed=3)
    samples = sequence([4], max_tokens=200, top_k=0, seed=3, num_return_sequences=3)
    done = begin(link, samples, sequence([5], max_tokens=2))
    with rebuilt(engine, supervisor):
        done.wait(60)
    for i in range(3):
        one = msgspec.structs.replace(params, seed=3 + i)
        assert done.tokens(i) == toy_tokens([4], 200, one, LIMITS.vocab_size)
    assert done.tokens(3) == toy_tokens([5], 2, m.SamplingParams(), LIMITS.vocab_size)
    assert sum(bool(event.finish) for event in done.events) == 4


def test_beams_continue_behind_the_steps_that_were_sent(link, engine, supervisor):
    params = m.SamplingParams(max_tokens=100, beam_width=3)
    done = begin(link, sequence([4], max_tokens=100, beam_width=3))
    with rebuilt(engine, supervisor):
        done.wait(60)
    assert [event.beams for event in done.events] == toy_beam_steps(params)


def test_a_request_without_a_token_is_begun_again(link, engine, supervisor):
    engine.freeze()
    done = Collector()
    link.submit(link.reserve(), [sequence([4], max_tokens=20)], done, resume_within_s=30.0)
    with rebuilt(engine, supervisor):
        done.wait(60)
    assert done.tokens() == toy_tokens([4], 20, m.SamplingParams(), LIMITS.vocab_size)


def test_a_request_that_kills_engines_kills_two_and_ends(link, engine, supervisor):
    done = begin(link, sequence([4], max_tokens=400))
    with rebuilt(engine, supervisor, step_s=STEP_S) as second:
        wait_until(lambda: second.running)
        with rebuilt(second, supervisor) as third:
            last = done.wait(60)[-1]
            assert (last.finish, last.code) == ("error", "UNAVAILABLE") and REASON in last.error
            link.wait_ready(60)
            other = begin(link, sequence([5], max_tokens=20))
            other.wait(60)
            assert len(third.submits) == 1


def test_a_request_that_does_not_wait_ends_with_the_reason(link, engine, supervisor):
    declines = begin(link, sequence([4], max_tokens=400), resume_within_s=0.0)
    short = begin(link, sequence([4], max_tokens=400), resume_within_s=0.2)
    engine.stop()
    supervisor.set_phase("down", REASON)
    assert REASON in declines.wait(60)[-1].error
    assert short.wait(60)[-1].error == (
        f"the engine is down: {REASON}; no other engine was ready in time to continue the request"
    )


def test_an_engine_that_cannot_come_back_ends_those_that_wait(link, engine, supervisor):
    done = begin(link, sequence([4], max_tokens=400))
    engine.stop()
    supervisor.set_phase("down", REASON)
    wait_until(lambda: link.state().phase == "down")
    assert not done.events[-1].finish
    supervisor.set_phase("failed", "config.ini: head_num is 0")
    assert "head_num is 0" in done.wait(60)[-1].error


def test_an_engine_that_has_dropped_the_door_continues_its_requests(link, engine):
    done = begin(link, sequence([4], max_tokens=300))
    engine.forget_doors()
    assert done.wait(60)[-1].finish == "length"
    assert done.tokens() == toy_tokens([4], 300, m.SamplingParams(), LIMITS.vocab_size)
    assert len(engine.submits) == 2


def test_an_engine_that_was_frozen_continues_its_requests(engine, supervisor):
    link = link_to(supervisor, engine_silent_s=0.8)
    link.wait_ready(60)
    done = begin(link, sequence([4], max_tokens=300))
    engine.freeze()
    wait_until(lambda: link.state().phase == "starting", 60)
    engine.thaw()
    assert done.wait(60)[-1].finish == "length"
    assert done.tokens() == toy_tokens([4], 300, m.SamplingParams(), LIMITS.vocab_size)
    link.close()


def test_a_supervisor_that_is_replaced_with_its_engine_ends_no_request(engine, supervisor):
    found = [supervisor.endpoint]

    def ensure(engine_dir: str, server_pid: int, number: int, on_replacing=lambda reason: None) -> str:
        if len(found) > 1:
            on_replacing("its supervisor was silent and has been replaced")
        return found[-1]

    link = EngineLink(
        "/models/toy", "test", Owner.this_process(), ensure=ensure, silent_s=0.6, engine_silent_s=0.9
    ).start()
    link.wait_ready(60)
    done = begin(link, sequence([4], max_tokens=300))
    with FakeEngine(epoch=2) as following, FakeSupervisor(following) as other:
        found.append(other.endpoint)
        engine.freeze()
        supervisor.silence()
        assert done.wait(60)[-1].finish == "length"
        assert done.tokens() == toy_tokens([4], 300, m.SamplingParams(), LIMITS.vocab_size)
        engine.thaw()
        link.close()


# ---------------------------------------------------------------- at the doors

EOS = byte_level().token_to_id("<|endoftext|>")


def letters(history: list[int], generated: int, params: m.SamplingParams, vocab_size: int) -> int:
    """Printable tokens of the byte-level tokenizer, which depend on the last ids and the seed."""
    return 60 + toy_next(history, generated, params, vocab_size) % 26


def texts(*values: str) -> np.ndarray:
    array = np.empty((len(values), 1), object)
    array[:, 0] = [value.encode() for value in values]
    return array


def numbers(name: str, value: Any, contract: Any, shape: tuple = (1, 1)) -> np.ndarray:
    return np.full(shape, value, fake_triton.triton_string_to_numpy(f"TYPE_{contract.by_name[name].dtype}"))


def token_request(contract: Any, **others: Any) -> dict:
    ids = numbers("input_ids", 0, contract, (1, 3))
    ids[0] = [70, 71, 72]
    values = {
        "input_lengths": 3,
        "request_output_len": 120,
        "runtime_top_k": 0,
        "runtime_top_p": 0.9,
        **others,
    }
    return {"input_ids": ids, **{k: numbers(k, v, contract, (1,)) for k, v in values.items()}}


def text_request(**others: Any) -> dict:
    values = {"max_tokens": 120, "top_p": 0.9, "seed": 5, "stream": True, "return_log_probs": True, **others}
    return {"text_input": texts("Hello"), **{k: numbers(k, v, TENSORRT_LLM) for k, v in values.items()}}


def vllm_request(**others: Any) -> dict:
    sampling = json.dumps({"max_tokens": 120, "seed": 5, "n": 2, "stop": ["never said"]})
    flags = {"stream": True, "return_cumulative_logprob": True, **others}
    arrays = {"text_input": texts("Hello")[0], "sampling_parameters": texts(sampling)[0]}
    return {**arrays, **{name: np.array([flag]) for name, flag in flags.items()}}


def llmapi_request(**others: Any) -> dict:
    values = {"streaming": True, "sampling_param_max_tokens": 120, "sampling_param_top_p": 0.9, **others}
    arrays = {k: numbers(k, v, LLMAPI, (1,)) for k, v in values.items()}
    return {"text_input": texts("Hello", "you")[:, 0], **arrays}


#: module, contract, max_batch_size, the request
DOORS = {
    "fastertransformer": (
        fastertransformer,
        FASTERTRANSFORMER,
        64,
        lambda **flags: token_request(FASTERTRANSFORMER, random_seed=5, **flags),
    ),
    "tensorrt_llm": (
        token_model,
        TENSORRT_LLM_TOKENS,
        64,
        lambda **flags: token_request(TENSORRT_LLM_TOKENS, seed=5, streaming=True, **flags),
    ),
    "text": (text, TENSORRT_LLM, 64, text_request),
    "samples of a text": (text, TENSORRT_LLM, 64, lambda **f: text_request(num_return_sequences=2, **f)),
    "vllm": (vllm, VLLM, 0, vllm_request),
    "llmapi": (llmapi, LLMAPI, 0, llmapi_request),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository") / "bytes"
    folder.mkdir()
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder.parent


@contextlib.contextmanager
def serving(kind: str, repository: Any, **engine: Any) -> Iterator[Any]:
    module, contract, batch, _ = DOORS[kind]
    inputs = {field.name: f"TYPE_{field.dtype}" for field in contract.inputs if field.declared}
    outputs = {output.name: f"TYPE_{output.dtype}" for output in contract.outputs}
    parameters = {"tokenizer_dir": "bytes", "merge_behind_s": "inf"}
    config = fake_triton.model_config(kind, inputs, outputs, parameters, True, batch)
    limits = msgspec.structs.replace(LIMITS, vocab_size=600, end_id=EOS, start_id=EOS)
    fake = FakeEngine(limits=limits, next_token=letters, **engine)
    with running(module.TritonPythonModel, config, fake, repository) as door:
        yield door


def told(sent: list[fake_triton.Sent]) -> dict:
    """Everything that the client received, independent of the division into responses."""
    found: dict = {}
    for one in sent:
        assert one.error is None, one.error
        outputs = one.outputs or {}
        row = [
            int(outputs[name].reshape(-1)[0]) for name in ("batch_index", "sequence_index") if name in outputs
        ]
        for name, array in outputs.items():
            if name == "text_output":
                for at, value in enumerate(array.reshape(-1).tolist()):
                    found[(name, *row, at)] = found.get((name, *row, at), b"") + value
            elif name in ("output_ids", "output_log_probs"):
                found.setdefault((name, *row), []).extend(array.reshape(-1).tolist())
            elif name in ("cum_log_probs", "cumulative_logprob", "finish_reason"):
                found[(name, *row)] = array.tolist()
    return found


def stream(door: Any, arrays: dict) -> fake_triton.InferenceRequest:
    request = fake_triton.InferenceRequest(arrays)
    door.execute([request])
    wait_until(lambda: len(request.sender.sent) > 3, what="the first responses")
    return request


@pytest.mark.parametrize("kind", DOORS)
def test_a_stream_of_every_contract_is_unbroken(kind, repository):
    arrays = DOORS[kind][3]
    with serving(kind, repository) as door:
        wanted = told(fake_triton.ask(door, fake_triton.InferenceRequest(arrays())))
    with serving(kind, repository, step_s=STEP_S) as door:
        request = stream(door, arrays())
        with rebuilt(door.test_engine, door.test_supervisor):
            assert request.sender.wait(60)
            assert told(request.sender.sent) == wanted
            door.metrics.publish()


@pytest.mark.parametrize("kind", DOORS)
def test_a_stream_that_declines_ends_with_the_reason(kind, repository):
    with serving(kind, repository, step_s=STEP_S) as door:
        request = stream(door, DOORS[kind][3](resume=False))
        with rebuilt(door.test_engine, door.test_supervisor) as following:
            assert request.sender.wait(60)
            error = request.sender.sent[-1].error
            assert error.code() == fake_triton.TritonError.UNAVAILABLE and REASON in error.message()
            assert not following.submits


def test_a_repository_may_switch_it_off(repository):
    config = fake_triton.model_config("ft", {}, {"output_ids": "TYPE_UINT32"}, {"resume_within_s": "0"}, True)
    with running(fastertransformer.TritonPythonModel, config, FakeEngine(step_s=STEP_S)) as door:
        request = stream(door, token_request(FASTERTRANSFORMER))
        with rebuilt(door.test_engine, door.test_supervisor):
            assert request.sender.wait(60)
            assert REASON in request.sender.sent[-1].error.message()


def test_the_metrics_page_says_how_many_and_how_long(repository):
    registry = fake_triton.MetricFamily.registry
    registry.clear()
    with serving("text", repository, step_s=STEP_S) as door:
        requests = [stream(door, text_request()) for _ in range(3)]
        with rebuilt(door.test_engine, door.test_supervisor):
            assert all(request.sender.wait(60) for request in requests)
        door.metrics.publish()
        key = (("model", "text"),)
        assert registry["tridecode_resumed_requests_total"].metrics[key].value() == 3
        assert 0 < registry["tridecode_resume_wait_seconds_total"].metrics[key].value() < 30


# ---------------------------------------------------------------- conversations


def test_a_round_and_the_rounds_after_it_continue():
    with rounds.serving(step_s=STEP_S) as door:
        rounds.ids_of(fake_triton.ask(door, rounds.start(7, [[11, 12], []], 4, start_id=9)))
        first = [[11, 12, *rounds.said([11, 12], 4)], [9, *rounds.said([9], 4)]]
        request = rounds.a_round(7, [[31], [41]], 60)
        door.execute([request])
        wait_until(lambda: door.test_engine.running and door.test_engine.steps > 10)
        with rebuilt(door.test_engine, door.test_supervisor) as following:
            assert request.sender.wait(60)
            second = [[*first[0], 31], [*first[1], 41]]
            second = [[*row, *rounds.said(row, 60)] for row in second]
            assert rounds.ids_of(request.sender.sent) == [second[0], second[1][1:] + only_end(request)]
            third = rounds.ids_of(fake_triton.ask(door, rounds.a_round(7, [[51], [61]], 2)))
            whole = [*second[0], 51]
            assert third[0][: len(whole) + 2] == [*whole, *rounds.said(whole, 2)]
            assert not following.submits[-1].session.history, "sent once"


def only_end(request: fake_triton.InferenceRequest) -> list[int]:
    """The fill behind the shorter row."""
    outputs = only(request.sender.sent)
    width, length = outputs["output_ids"].shape[-1], outputs["sequence_length"][0, 1, 0]
    return outputs["output_ids"][0, 1, 0, length:width].tolist()


def test_a_conversation_whose_engine_died_between_two_rounds_continues():
    with rounds.serving() as door:
        rounds.ids_of(fake_triton.ask(door, rounds.start(7, [[11, 12]], 4)))
        with rebuilt(door.test_engine, door.test_supervisor):
            wait_until(lambda: door.link.state().epoch == 2 and door.link.state().phase == "ready")
            whole = [11, 12, *rounds.said([11, 12], 4), 13]
            answer = rounds.ids_of(fake_triton.ask(door, rounds.a_round(7, [[13]], 3)))
            assert answer == [[*whole, *rounds.said(whole, 3)]]


def test_the_interactive_contract_declines_as_the_others_do():
    assert interactive.TritonPythonModel.contract.by_name["resume"].dims == (-1, 1)
    with rounds.serving(step_s=STEP_S) as door:
        request = rounds.start(7, [[11, 12]], 90, resume=False)
        door.execute([request])
        wait_until(lambda: door.test_engine.running)
        with rebuilt(door.test_engine, door.test_supervisor):
            assert request.sender.wait(60)
            assert REASON in request.sender.sent[-1].error.message()
