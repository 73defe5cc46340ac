"""Tokens per second of `LLM.generate`, as a share of the same engine without texts.

    python -m tridecode.tools.bench.studies.llm_rate REPOSITORY [--prompts 1000] [--output-tokens 64]

Both sides use one engine of this machine and greedy requests of the same token ids. The bare side submits
them to the engine's socket and counts the tokens that come. The other one is LLM.generate with the texts: it
also tokenises the prompts, detokenises the answers and makes the results. The two alternate, and the share is
the median over the repeats, so that a machine that becomes slower affects both.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from tridecode.backend.service.client_request import ClientRequest
from tridecode.backend.service.engine_service import EngineService, Submission
from tridecode.backend.service.link import Link
from tridecode.backend.wire.messages import Event, SequenceRequest
from tridecode.backend.wire.messages import SamplingParams as EngineParams
from tridecode.tools.llm.llm import LLM
from tridecode.tools.llm.local_model import LocalModel
from tridecode.tools.llm.params import SamplingParams

_TEXT = "the ferry leaves the harbour at seven and returns before nine with mail and fish"


class _Bare(ClientRequest):
    """A request whose events are only counted. ended_to: gets it at the end of its sequence."""

    def __init__(self, link: Link, ended_to: queue.SimpleQueue[_Bare]):
        super().__init__(link)
        self.tokens, self._ended_to, self._ended = 0, ended_to, False

    @property
    def ended(self) -> bool:
        return self._ended

    def put_row(self, row: int, event: Event) -> None:
        self.tokens += len(event.tokens)
        if event.finish:
            self._ended = True
            self._ended_to.put(self)


def make_prompts(llm: LLM, count: int, tokens: int) -> list[str]:
    """Return texts of about as many tokens, no two with a common beginning."""
    draws = random.Random(7)
    words = _TEXT.split()
    words_each = max(1, tokens * len(words) // len(llm.encode(_TEXT, False)))
    return [" ".join([str(n), *draws.choices(words, k=words_each)]) for n in range(count)]


def count_bare_tokens(service: EngineService, prompts: list[list[int]], count: int, room: int) -> int:
    """Submit all prompts, `room` of them at a time, and return the tokens that have come."""
    ended: queue.SimpleQueue[_Bare] = queue.SimpleQueue()
    params = EngineParams(max_tokens=count, top_k=1)
    waiting, running, tokens = iter(prompts), 0, 0
    while True:
        for ids in itertools.islice(waiting, room - running):
            client = _Bare(service.link, ended)
            sequence = SequenceRequest(np.array(ids, "<i4").tobytes(), params)
            service.submit(client, [Submission([sequence], partial(client.put_row, 0), 0)])
            running += 1
        if not running:
            return tokens
        tokens += ended.get().tokens
        running -= 1


class Rate(NamedTuple):
    """One run. cpu_us: processor time of this process a token, in microseconds, without the engine's."""

    tokens_per_s: float
    cpu_us: float


def _measured(run: Callable[[], int]) -> Rate:
    """run: returns the tokens that it made."""
    began, worked = time.perf_counter(), time.process_time()
    tokens = run()
    took, work = time.perf_counter() - began, time.process_time() - worked
    return Rate(tokens / took, work / tokens * 1e6)


def rates(llm: LLM, texts: list[str], count: int, repeats: int) -> Iterator[tuple[Rate, Rate]]:
    """Yield the rates of both sides for each repeat: LLM.generate, the engine without texts."""
    model = llm._model
    assert isinstance(model, LocalModel)
    service, room = model.engine.texts[0].engine, model.room()
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    ids = [llm.encode(text) for text in texts]

    def ours() -> int:
        return sum(len(one.outputs[0].token_ids) for one in llm.generate(texts, params, use_tqdm=False))

    bare = partial(count_bare_tokens, service, ids, count, room)
    bare(), ours()  # warm up
    for number in range(repeats):  # each side is the first one in turn
        if number % 2:
            first = _measured(ours)
            yield first, _measured(bare)
        else:
            first = _measured(bare)
            yield _measured(ours), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("repository")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=4)
    asked = parser.parse_args()
    with LLM(asked.repository) as llm:
        texts = make_prompts(llm, asked.prompts, asked.prompt_tokens)
        found = []
        for ours, bare in rates(llm, texts, asked.output_tokens, asked.repeats):
            share = ours.tokens_per_s / bare.tokens_per_s
            found.append(share)
            sides = f"LLM.generate {ours.tokens_per_s:,.0f} tokens/s, engine {bare.tokens_per_s:,.0f}"
            print(f"{sides}: {share:.3f}; {ours.cpu_us:.1f} and {bare.cpu_us:.1f} us a token", flush=True)
        print(f"{asked.prompts:,} prompts: {statistics.median(found):.3f} of the engine's tokens/s")


if __name__ == "__main__":
    main()
