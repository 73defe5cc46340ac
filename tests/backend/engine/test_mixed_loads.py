"""Random loads with drafts: requests of many kinds that arrive and are cancelled while others run. Each
answer is that of the same request alone, on an engine without drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.backend.engine.draft_heads import known_model
from tests.backend.engine.offline_models import drafting_engine, offline_engine, prompts_of, run_in_flight
from tests.backend.engine.test_draft_model import like
from tests.backend.hf_models import llama
from tridecode.backend.engine.offline import _DOOR, Generation, OfflineEngine
from tridecode.backend.engine.speculation.depth import DepthPolicy
from tridecode.backend.wire.messages import SamplingParams

SIZES = dict(max_sequences=16, block_tokens=8, max_step_tokens=48, max_sequence_tokens=64)
KNOWN = tuple(map(tuple, prompts_of([5, 9, 7, 3], 103)))
REQUESTS = 12
#: blocks: few, so that sequences are preempted, or enough
BLOCKS = (11, 64)


@dataclass
class Request:
    prompt: list[int]
    params: dict[str, Any]
    wanted: Generation


class Load:
    """Random requests for one model. plain: an engine without drafts, for the wanted answers."""

    def __init__(self, plain: OfflineEngine, seed: int):
        self.plain, self.random = plain, random.Random(seed)
        self.vocab = plain.model_config.vocab_size

    def request(self) -> Request:
        prompt, params = self._prompt(), self._params()
        answer = self._alone(prompt, params).tokens
        if self._chance(0.3):
            params["end_id"] = self.random.choice(answer)
        elif self._chance(0.4) and "beam_width" not in params:
            last = self.random.randrange(len(answer))
            params["stop_words"] = [answer[max(last - self.random.randrange(3), 0) : last + 1]]
        if self._chance(0.7) and "beam_width" not in params:  # right drafts, or right but for one
            drafts = answer.copy()
            if self._chance(0.5):
                drafts[self.random.randrange(len(drafts))] = self.random.randrange(self.vocab)
            params["draft_tokens"] = drafts
        return Request(prompt, params, self._alone(prompt, params))

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _ids(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocab) for _ in range(count)]

    def _prompt(self) -> list[int]:
        kind = self.random.randrange(3)
        if kind == 0:
            return self._ids(self.random.randint(1, 20))
        if kind == 1:  # it repeats itself
            return (self._ids(self.random.randint(1, 4)) * 10)[: self.random.randint(2, 24)]
        return list(self.random.choice(KNOWN))

    def _params(self) -> dict[str, Any]:
        most = self.random.choice([1, 2, 3, 8, 20, 30])
        params: dict[str, Any] = dict(max_tokens=most, seed=self.random.randrange(100))
        others: list[tuple[float, dict[str, Any]]] = [
            (0.4, dict(temperature=self.random.choice([0.3, 1.0, 1.6]), top_k=self.random.choice([0, 5]))),
            (0.3, dict(repetition_penalty=1.3, frequency_penalty=0.4)),
            (0.2, dict(no_repeat_ngram_size=self.random.randint(1, 3))),
            (0.2, dict(min_tokens=self.random.randint(1, most))),
            (0.3, dict(return_log_probs=True)),
            (0.2, dict(top_log_probs=self.random.randint(0, 4))),
            (0.3, dict(speculate=False)),
            (0.2, dict(num_return_sequences=self.random.randint(2, 3))),
            (0.2, dict(return_perf_metrics=True)),
            (0.1, dict(return_generation_logits=True)),
            (0.1, dict(bad_words=[self._ids(1), self._ids(2)])),
            (0.2, dict(cache=self.random.choice(["off", "write"]))),
        ]
        if self._chance(0.1):
            return params | dict(beam_width=2)
        for share, more in others:
            if self._chance(share):
                params |= more
        return params

    def _alone(self, prompt: list[int], params: dict[str, Any]) -> Generation:
        number = self.plain.submit(prompt, SamplingParams(**params | dict(speculate=False, cache="off")))
        run_in_flight(self.plain, 1)
        return self.plain.generations[number]


def engine_of(speculation: str, blocks: int) -> OfflineEngine:
    model, _, _, heads = known_model(llama, KNOWN, 24)
    block = offline_engine(model, keep_logits=False, **SIZES).engine.state.block_bytes()
    settings = {**SIZES, "cache_bytes": blocks * block}
    if "draft" in speculation:
        settings["draft"] = like(model)
        settings["cache_bytes"] *= 2  # its layers make blocks larger
    if "heads" in speculation:
        settings["trained"] = heads
    return drafting_engine(model, speculation, **settings)


def run(offline: OfflineEngine, load: Load, requests: list[Request], depth: int) -> dict[int, Request]:
    """Submit the requests while others run, cancel some, and return the others by their numbers."""
    numbers: dict[int, Request] = {}
    waiting = requests.copy()

    def join() -> bool:
        while waiting and load._chance(0.5):
            request = waiting.pop()
            numbers[offline.submit(request.prompt, SamplingParams(**request.params))] = request
        if numbers and load._chance(0.02):
            number = load.random.choice(list(numbers))
            offline.scheduler.cancel(_DOOR, number)
            offline._take(offline.scheduler.take_events())
            if any(one.finish == "cancelled" for one in offline.generations[number].sequences):
                del numbers[number]
        return bool(waiting)

    run_in_flight(offline, depth, join)
    return numbers


@pytest.fixture(scope="module")
def plain() -> OfflineEngine:
    return offline_engine(known_model(llama, KNOWN, 24)[0], keep_logits=False, **SIZES)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("speculation", ["lookup", "draft", "lookup+draft", "heads", "lookup+heads"])
def test_a_mixed_load_with_drafts_gives_the_answers_of_each_request_alone(
    plain: OfflineEngine, speculation: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(plain, blocks)
    offline, choose = engine_of(speculation, blocks), DepthPolicy.choose

    def choose_any(policy: DepthPolicy, *given: Any, **named: Any) -> list[int]:
        """Depths change from step to step, as the times of steps change them."""
        counts = choose(policy, *given, **named)
        share = load.random.choice([0.0, 0.5, 1.0])
        return [load.random.randint(round(share * count), count) for count in counts]

    monkeypatch.setattr(DepthPolicy, "choose", choose_any)
    for depth in (1, 2, 3):
        requests = [load.request() for _ in range(REQUESTS)]
        for number, request in run(offline, load, requests, depth).items():
            found = offline.generations[number]
            for one, wanted in zip(found.sequences, request.wanted.sequences, strict=True):
                assert (one.tokens, one.finish) == (wanted.tokens, wanted.finish), request
                assert one.log_probs == pytest.approx(wanted.log_probs, abs=1e-3), request
                assert len(one.top_log_probs) == len(wanted.top_log_probs), request
                logits = np.frombuffer(one.generation_logits, np.float32)
                assert logits == pytest.approx(np.frombuffer(wanted.generation_logits, np.float32), abs=1e-2)
            if found.perf is not None:
                assert 0 <= found.perf.accepted_draft_tokens <= found.perf.draft_tokens
    learning = offline.scheduler.planner.drafts.learning  # type: ignore[union-attr]
    assert learning is not None and sum(learning.accepted.values()) > 5
    assert all(0 <= learning.accepted[name] <= count for name, count in learning.drafted.items())
    if blocks == BLOCKS[0]:
        assert offline.scheduler.counters.preemptions > 0
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"
