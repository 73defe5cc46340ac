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
from collections.abc import Iterator
from functools import partial

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


def bare_seconds(
    service: EngineService, prompts: list[list[int]], count: int, room: int
) -> tuple[float, int]:
    """Return the seconds and the tokens of all prompts, `room` of them in the engine at a time."""
    ended: queue.SimpleQueue[_Bare] = queue.SimpleQueue()
    params = EngineParams(max_tokens=count, top_k=1)
    waiting, open_, tokens = iter(prompts), 0, 0
    began = time.perf_counter()
    while True:
        for ids in itertools.islice(waiting, room - open_):
            client = _Bare(service.link, ended)
            sequence = SequenceRequest(np.array(ids, "<i4").tobytes(), params)
            service.submit(client, [Submission([sequence], partial(client.put_row, 0), 0)])
            open_ += 1
        if not open_:
            return time.perf_counter() - began, tokens
        tokens += ended.get().tokens
        open_ -= 1


def shares(llm: LLM, texts: list[str], count: int, repeats: int) -> Iterator[tuple[float, float]]:
    """Yield the tokens per second of both sides for each repeat: LLM.generate, the engine without texts."""
    model = llm._model
    assert isinstance(model, LocalModel)
    service = model.engine.texts[0].engine
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    ids = [llm.encode(text) for text in texts]

    def bare() -> float:
        seconds, tokens = bare_seconds(service, ids, count, model.room())
        return tokens / seconds

    def ours() -> float:
        began = time.perf_counter()
        found = llm.generate(texts, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found) / (time.perf_counter() - began)

    bare(), ours()  # warm up
    for number in range(repeats):  # each side is the first one in turn
        if number % 2:
            rate = ours()
            yield rate, bare()
        else:
            rate = bare()
            yield ours(), rate


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
        for ours, bare in shares(llm, texts, asked.output_tokens, asked.repeats):
            found.append(ours / bare)
            print(f"LLM.generate {ours:,.0f} tokens/s, engine {bare:,.0f}: {ours / bare:.3f}", flush=True)
        print(f"{asked.prompts:,} prompts: {statistics.median(found):.3f} of the engine's tokens/s")


if __name__ == "__main__":
    main()
