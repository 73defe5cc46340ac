"""Requests that one engine begins and another continues: the whole equals an undisturbed run."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.engine.offline_models import context_embedding, hf_greedy, offline_engine, prompts_of
from tests.backend.engine.toy_device import DOOR, VOCAB, Run, expected, limits
from tests.backend.hf_models import gpt2, llama
from tests.thinning import diagonal
from tridecode.backend.base.errors import CapacityError, RequestError
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.service.delivered import Delivered
from tridecode.backend.wire.beam_tree import BeamTree
from tridecode.backend.wire.messages import Event, SamplingParams, Sent, SequenceRequest, Submit


class Client:
    """The events of one request, of whichever engine."""

    def __init__(self, submit: Submit, vocab_size: int):
        self.submit, self.vocab_size = submit, vocab_size
        count = sum(one.params.num_sequences for one in submit.sequences)
        self.delivered = Delivered(count)
        self.events: list[Event] = []
        self.trees = defaultdict(BeamTree)

    def take(self, event: Event) -> None:
        assert event.finish != "error", event.error
        self.delivered.take(event)
        self.events.append(event)
        if event.beams is not None:
            self.trees[event.sequence].take(event.beams)

    @property
    def has_ended(self) -> bool:
        return all(sequence.ended for sequence in self.delivered.sequences)

    def again(self) -> Submit:
        return Submit(self.submit.request, self.submit.sequences, sent=self.delivered.sent(self.vocab_size))

    def summary(self) -> dict:
        """All that the client has in the end."""
        found: dict = defaultdict(list)
        for event in self.events:
            at = event.sequence
            found["tokens", at] += event.tokens
            found["log_probs", at] += event.log_probs
            found["tops", at] += [(top.rank, top.ids) for top in event.top_log_probs]
            found["finish", at] += [event.finish] * bool(event.finish)
            found["embeddings", at] += [event.context_embedding] * bool(event.context_embedding)
            if event.extra is not None:
                found["context", at].append(event.extra.context_logits)
                found["generation", at].append(event.extra.generation_logits)
                found["context_log_prob", at].append(event.extra.context_log_prob)
        for at, tree in self.trees.items():
            found["beams", at] = [(beam.tokens, beam.log_probs, beam.cum_log_prob) for beam in tree.beams]
        return found


def step(offline: OfflineEngine, clients: dict[int, Client]) -> None:
    plan = offline.scheduler.plan()
    events = offline.scheduler.take_events()
    if plan is not None:
        events = events + offline.scheduler.commit(plan, offline.engine.launch(plan).wait())
    for _, event in events:
        clients[event.request].take(event)


def submitted(model, sequences: list[list[SequenceRequest]], **engine) -> tuple[OfflineEngine, dict]:
    offline = offline_engine(model, keep_logits=False, **engine)
    clients = {}
    for number, one in enumerate(sequences):
        clients[number] = Client(Submit(number, one), model.config.vocab_size)
        offline.scheduler.submit(DOOR, clients[number].submit)
    return offline, clients


def finish(offline: OfflineEngine, clients: dict[int, Client]) -> list[dict]:
    while offline.scheduler.has_work:
        step(offline, clients)
    for client in clients.values():
        assert client.has_ended
    return [clients[number].summary() for number in sorted(clients)]


def moved(model, sequences: list[list[SequenceRequest]], steps: int, **engine) -> list[dict]:
    """The same requests; after this many steps another engine continues them."""
    offline, clients = submitted(model, sequences, **engine)
    for _ in range(steps):
        step(offline, clients)
    offline = offline_engine(model, keep_logits=False, **engine)
    for client in clients.values():
        if not client.has_ended:
            offline.scheduler.submit(DOOR, client.again())
    return finish(offline, clients)


def check_equal(found: list[dict], wanted: list[dict]) -> None:
    for one, other in zip(found, wanted):
        assert one.keys() == other.keys()
        for key in other:
            if key[0] in ("context", "generation"):
                a, b = (np.frombuffer(b"".join(value[key]), np.float32) for value in (one, other))
                assert a.shape == b.shape, key
                np.testing.assert_allclose(a, b, atol=2e-4, err_msg=str(key))
            elif key[0] == "embeddings":
                assert len(one[key]) == len(other[key])
                for a, b in zip(one[key], other[key]):
                    np.testing.assert_allclose(
                        np.frombuffer(a, np.float32), np.frombuffer(b, np.float32), atol=1e-3
                    )
            elif key[0] == "context_log_prob":
                assert sum(one[key]) == pytest.approx(sum(other[key]), abs=1e-3)
            elif key[0] == "log_probs":
                assert one[key] == pytest.approx(other[key], abs=1e-4), key
            elif key[0] == "beams":
                assert [beam[0] for beam in one[key]] == [beam[0] for beam in other[key]]
                for a, b in zip(one[key], other[key]):
                    assert a[1] == pytest.approx(b[1], abs=1e-4)
                    assert a[2] == pytest.approx(b[2], abs=1e-3)
            else:
                assert one[key] == other[key], key


SAMPLED = dict(temperature=1.3, top_k=0, top_p=0.95, seed=2**63 + 11, max_tokens=24)
KINDS = {
    "greedy": dict(max_tokens=24, return_log_probs=True, top_log_probs=3),
    "sampled": dict(SAMPLED, return_log_probs=True),
    "top-k": dict(SAMPLED, top_k=7),
    "decaying top-p": dict(SAMPLED, top_p=0.9, top_p_decay=0.8, top_p_min=0.2, top_p_reset_id=5),
    "penalties of all tokens": dict(SAMPLED, repetition_penalty=1.7, frequency_penalty=0.4),
    "penalties of new tokens": dict(
        SAMPLED, presence_penalty=1.5, repetition_penalty=1.4, count_prompt=False
    ),
    "min_tokens and bad words": dict(SAMPLED, min_tokens=18, end_id=3, bad_words=[[7], [11, 2], [4, 9]]),
    "logits": dict(
        SAMPLED, return_context_logits=True, return_generation_logits=True, return_context_log_prob=True
    ),
    "embedding and log probability": dict(
        max_tokens=24, return_context_embedding=True, return_context_log_prob=True
    ),
    "samples": dict(SAMPLED, num_return_sequences=3, return_log_probs=True),
    "samples that end apart": dict(SAMPLED, temperature=2.5, top_p=1.0, num_return_sequences=4, end_id=3),
    "competing beams": dict(max_tokens=24, beam_width=3, end_id=3, return_log_probs=True, top_k=0),
    "competing beams with penalties": dict(max_tokens=24, beam_width=3, repetition_penalty=1.3, min_tokens=5),
    "pooled beams": dict(max_tokens=24, beam_width=3, beam_pool=True, end_id=3, return_log_probs=True),
}


@pytest.mark.parametrize(("steps", "kind"), diagonal([1, 3, 9, 20], KINDS, 2))
def test_another_engine_continues_as_if_nothing_had_happened(kind: str, steps: int) -> None:
    model = llama()
    prompts = prompts_of([21, 9], model.config.vocab_size, seed=4)
    params = SamplingParams(**KINDS[kind])
    sequences = [[SequenceRequest(np.array(prompt, "<i4").tobytes(), params)] for prompt in prompts]
    wanted = finish(*submitted(model, sequences))
    check_equal(moved(model, sequences, steps), wanted)


@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_greedy_tokens_are_transformers_own(make) -> None:
    model = make()
    prompts = prompts_of([9, 30, 1], model.config.vocab_size)
    params = SamplingParams(max_tokens=17)
    sequences = [[SequenceRequest(np.array(prompt, "<i4").tobytes(), params) for prompt in prompts]]
    (found,) = moved(model, sequences, 8)
    for index, prompt in enumerate(prompts):
        assert found["tokens", index] == hf_greedy(model, prompt, 17)[0]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_logits_of_a_prompt_do_not_take_its_embedding_along(steps: int) -> None:
    """The first chunk of a prompt has an event of its own, when its embedding is not complete."""
    model = llama()
    (prompt,) = prompts_of([40], model.config.vocab_size)
    params = SamplingParams(max_tokens=5, return_context_embedding=True, return_context_logits=True)
    sequences = [[SequenceRequest(np.array(prompt, "<i4").tobytes(), params)]]
    (found,) = moved(model, sequences, steps)
    (embedding,) = found["embeddings", 0]
    np.testing.assert_allclose(
        np.frombuffer(embedding, np.float32), context_embedding(model, prompt), atol=1e-3
    )
    assert len(b"".join(found["context", 0])) == 4 * 40 * model.config.vocab_size


def test_a_stop_word_may_begin_before_the_death_and_end_after_it() -> None:
    model = llama()
    (prompt,) = prompts_of([9], model.config.vocab_size)
    greedy = hf_greedy(model, prompt, 17)[0]
    params = SamplingParams(max_tokens=17, stop_words=[greedy[6:10]])
    sequences = [[SequenceRequest(np.array(prompt, "<i4").tobytes(), params)]]
    for steps in range(1, 11):
        (found,) = moved(model, sequences, steps)
        assert found["tokens", 0] == greedy[:10], f"after {steps} steps"
        assert found["finish", 0] == ["stop_word"]


def test_times_of_a_resumed_request_are_those_of_its_first_engine() -> None:
    model = llama()
    (prompt,) = prompts_of([9], model.config.vocab_size)
    params = SamplingParams(max_tokens=9, return_perf_metrics=True)
    offline, clients = submitted(model, [[SequenceRequest(np.array(prompt, "<i4").tobytes(), params)]])
    for _ in range(5):
        step(offline, clients)
    first = clients[0].events[-1].extra.perf
    between = time.time_ns()
    offline = offline_engine(model, keep_logits=False)
    offline.scheduler.submit(DOOR, clients[0].again())
    finish(offline, clients)
    last = clients[0].events[-1].extra.perf
    assert last.arrival_ns == first.arrival_ns and last.first_scheduled_ns == first.first_scheduled_ns
    assert last.first_token_ns == first.first_token_ns < between < last.last_token_ns


# ---------------------------------------------------------------- without a model


def sent(*tokens: int, ended: bool = False) -> Sent:
    return Sent(np.array(tokens, "<i4").tobytes(), ended)


def again(run: Run, request: int, prompts: list[list[int]], before: list[Sent], **params) -> None:
    sequences = [
        SequenceRequest(np.array(prompt, np.int32).tobytes(), SamplingParams(**params)) for prompt in prompts
    ]
    run.scheduler.submit(DOOR, Submit(request, sequences, sent=before))
    run.take(run.scheduler.take_events())


@pytest.mark.parametrize(("overlap", "micro_batches"), [(False, 1), (True, 1), (False, 2)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_resumed_and_new_requests_share_the_cache(
    overlap: bool, micro_batches: int, data: st.DataObject
) -> None:
    run = Run(limits(num_blocks=14, max_sequence_tokens=24, micro_batches=micro_batches), overlap)
    wanted = {}
    for request in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
        count, end_id = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([-1, 3, 17]))
        whole = expected(prompt, count, end_id)
        known = data.draw(st.integers(0, len(whole)))
        again(run, request, [prompt], [sent(*whole[:known])], max_tokens=count, end_id=end_id)
        wanted[request] = whole[known:], "end_id" if whole[-1] == end_id else "length"
        for _ in range(data.draw(st.integers(0, 2))):
            run.step()
    run.finish()
    for request, (tokens, reason) in wanted.items():
        assert run.tokens[request, 0] == tokens
        assert [event.finish for event in run.ends[request, 0]] == [reason]


def test_a_sequence_whose_last_event_alone_was_lost_ends_with_its_reason() -> None:
    run = Run(limits())
    again(run, 1, [[1, 2], [3]], [sent(4, 5, 6), sent(7, 9)], max_tokens=3, end_id=9)
    assert [event.finish for event in (run.ends[1, 0] + run.ends[1, 1])] == ["length", "end_id"]
    assert not run.scheduler.has_work
    run.finish(steps=0)


def test_sequences_that_have_ended_are_not_computed_again() -> None:
    run = Run(limits())
    whole = expected([3], 4)
    again(run, 1, [[1, 2], [3]], [sent(4, ended=True), sent(*whole[:2])], max_tokens=4)
    run.finish()
    assert not run.ends[1, 0] and run.tokens[1, 1] == whole[2:]


def test_a_resumed_request_is_not_refused_for_those_that_came_before_it() -> None:
    tight = limits(max_sequences=2, max_queued_requests=2)
    run = Run(tight)
    for request in range(4):
        run.submit(request, [1, 2], max_tokens=5)
    with pytest.raises(CapacityError):
        run.submit(9, [1], max_tokens=5)
    for request in range(10, 14):
        again(run, request, [[1, 2]], [sent(*expected([1, 2], 2))], max_tokens=5)
    with pytest.raises(CapacityError):  # no engine of these limits can have accepted more
        again(run, 14, [[1, 2]], [sent()], max_tokens=5)
    run.finish()
    for request in range(10, 14):
        assert run.tokens[request, 0] == expected([1, 2], 5)[2:]


@pytest.mark.parametrize(
    ("before", "params", "found"),
    [
        ([sent(), sent()], {}, "2 sequences were sent before; the request has 1"),
        ([Sent(b"abc")], {}, "3 bytes of tokens were sent before; wanted int32"),
        ([sent(*range(6))], {}, "6 tokens were sent before; max_tokens is 5"),
        ([sent(VOCAB)], {}, "not those of a sequence of this model"),
        ([sent(1)], {"beam_width": 2}, "not those of a sequence of this model"),
    ],
)
def test_what_does_not_suit_the_request_is_refused(before, params, found) -> None:
    run = Run(limits())
    with pytest.raises(RequestError, match=found):
        again(run, 1, [[1, 2]], before, max_tokens=5, **params)
    assert not run.scheduler.has_work
