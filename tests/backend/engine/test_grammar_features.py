"""Grammars with the other features of a request: n, sessions, penalties, words, and a continuation by another
engine, on one rank and on several. The tokens are those of transformers with a mask of our own."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from tests.backend.engine.grammar_models import (
    END,
    OTHER_END,
    constrained_engine,
    random_model,
    sampled,
    tokenizer_folder,
)
from tests.backend.engine.offline_models import hf_greedy
from tests.backend.engine.test_resumption import Client, step, submitted
from tests.backend.engine.thread_ranks import on_ranks
from tests.checkpoints import save, tiny_tokenizer
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest, SessionRound, Submit
from tridecode.backend.wire.structured_output import StructuredOutput
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

TOKENIZER = tiny_tokenizer()
#: it never forces a byte, because the engine would tokenise forced bytes in only one way
PATTERN = "[a-f]{5,7}[0-9]{4,9}"
PREFIX = "[a-f]{0,7}|[a-f]{5,7}[0-9]{0,9}"
OUTPUT = StructuredOutput("regex", PATTERN)
PROMPTS = [[5, 6, 7], [9] * 20, [31, 12], [100, 42, 17, 8]]


@functools.cache
def texts() -> dict[int, str]:
    """Return the text of each token that may occur in an answer to PATTERN."""
    found = {token: TOKENIZER.decode([token]) for token in range(3, len(TOKENIZER))}
    return {token: text for token, text in found.items() if re.fullmatch("[a-f0-9]+", text)}


class _Mask(LogitsProcessor):
    """Excludes the tokens after which the answer is not a prefix of a match of PATTERN."""

    def __init__(self, prompt_tokens: int):
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        answer = "".join(texts().get(token, "") for token in input_ids[0, self._prompt_tokens :].tolist())
        possible = [token for token, text in texts().items() if re.fullmatch(PREFIX, answer + text)]
        if re.fullmatch(PATTERN, answer):
            possible.append(END)
        masked = torch.full_like(scores, -torch.inf)
        masked[:, possible] = scores[:, possible]
        return masked  # type: ignore[return-value]


def expected(prompt: list[int], *processors: LogitsProcessor) -> list[int]:
    """Return transformers' greedy answer to PATTERN, with its end token."""
    tokens = hf_greedy(random_model(), prompt, 20, *processors, _Mask(len(prompt)))[0]
    return tokens[: tokens.index(END) + 1]


def greedy(**values: object) -> SamplingParams:
    return sampled(**{"top_k": 1, "max_tokens": 20, "more_end_ids": [], **values})


def request(prompt: list[int], params: SamplingParams) -> SequenceRequest:
    return SequenceRequest(np.array(prompt, "<i4").tobytes(), params, structured_output=OUTPUT)


def is_whole(tokens: list[int]) -> bool:
    return tokens[-1] in (END, OTHER_END) and re.fullmatch(PATTERN, TOKENIZER.decode(tokens[:-1])) is not None


def test_penalties_and_words_change_what_the_grammar_allows() -> None:
    plain = [expected(prompt) for prompt in PROMPTS]
    words = [[plain[0][0]], plain[0][1:3]]
    cases = [
        ({}, []),
        ({"repetition_penalty": 5.0}, [RepetitionPenaltyLogitsProcessor(5.0)]),
        ({"no_repeat_ngram_size": 2}, [NoRepeatNGramLogitsProcessor(2)]),
        ({"bad_words": words}, [NoBadWordsLogitsProcessor(words)]),
    ]
    wanted = [expected(PROMPTS[0], *given) for _, given in cases]
    assert len({tuple(tokens) for tokens in wanted}) == 4, "a rule does not change its answer"
    offline = constrained_engine()
    numbers = [offline.submit(PROMPTS[0], greedy(**values), structured_output=OUTPUT) for values, _ in cases]
    others = [offline.submit(prompt, greedy(), structured_output=OUTPUT) for prompt in PROMPTS]
    offline.run()
    assert [offline.generations[number].tokens for number in numbers] == wanted
    assert [offline.generations[number].tokens for number in others] == plain
    offline.scheduler.grammars.close()


def test_a_stop_word_ends_an_answer_that_the_grammar_would_continue() -> None:
    wanted = expected(PROMPTS[0], RepetitionPenaltyLogitsProcessor(5.0))
    assert len(wanted) > 5 and wanted[2:4] not in (wanted[0:2], wanted[1:3])
    params = greedy(repetition_penalty=5.0, stop_words=[wanted[2:4]])
    offline = constrained_engine()
    number = offline.submit(PROMPTS[0], params, structured_output=OUTPUT)
    offline.run()
    answer = offline.generations[number]
    assert answer.finish == "stop_word" and answer.tokens == wanted[:4]
    offline.scheduler.grammars.close()


def test_each_round_of_a_session_obeys_a_grammar_of_its_own() -> None:
    offline, history = constrained_engine(), []
    for turn, new in enumerate(PROMPTS):
        whole = [*history, *new]
        output = OUTPUT if turn != 2 else None
        retained = [len(history)] if history else []
        number = offline.submit(
            new, greedy(), session=SessionRound(1, 300, retained), structured_output=output
        )
        offline.run()
        tokens = offline.generations[number].tokens
        if output is None:
            free = hf_greedy(random_model(), whole, 20)[0]
            assert tokens == (free[: free.index(END) + 1] if END in free else free)
        else:
            assert tokens == expected(whole)
        history = [*whole, *tokens]
    offline.scheduler.grammars.close()


#: requests of one batch: greedy, with penalties, sampled, several answers to a prompt
MIXED = [
    [request(PROMPTS[0], greedy(return_log_probs=True))],
    [request(PROMPTS[1], sampled(seed=4, max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.2))],
    [request(PROMPTS[2], sampled(seed=5, max_tokens=20, num_return_sequences=3))],
    [request(PROMPTS[3], sampled(seed=6, max_tokens=20, top_p=0.8, bad_words=[[20], [21, 22]]))],
    [request(PROMPTS[1], greedy(min_tokens=9)), request(PROMPTS[2], greedy())],
]


def moved(first: OfflineEngine, second: OfflineEngine, steps: int) -> list[dict]:
    """Begin MIXED on one engine, and continue on another once the first request has `steps` tokens."""
    clients = {}
    for number, sequences in enumerate(MIXED):
        clients[number] = Client(Submit(number, sequences), random_model().config.vocab_size)
        first.scheduler.submit(b"door", clients[number].submit)
    _step(first, clients, steps)
    for client in clients.values():
        if not client.has_ended:
            second.scheduler.submit(b"door", client.again())
    _step(second, clients)
    return [clients[number].summary() for number in sorted(clients)]


def _step(offline: OfflineEngine, clients: dict[int, Client], steps: int = 10**6) -> None:
    """Step until nothing is left to do, or until the first request has this many tokens."""
    offline._take = lambda events: [clients[event.request].take(event) for _, event in events]  # type: ignore
    while offline.scheduler.has_work or offline._pending:
        if sum(len(event.tokens) for event in clients[0].events) >= steps:
            return
        offline.step()


def tokens_of(found: list[dict]) -> list[list[int]]:
    return [value for one in found for key, value in sorted(one.items()) if key[0] == "tokens"]


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_answers_that_another_engine_continues_are_those_of_one_engine(steps: int) -> None:
    offline, clients = submitted(random_model(), MIXED, max_sequences=8, tokenizer_dir=tokenizer_folder())
    while offline.scheduler.has_work:
        step(offline, clients)
    wanted = [clients[number].summary() for number in sorted(clients)]
    offline.scheduler.grammars.close()
    assert wanted[0]["tokens", 0] == expected(PROMPTS[0])
    first, second = constrained_engine(), constrained_engine()
    found = moved(first, second, steps)
    assert second.scheduler.counters.resumed >= 4
    assert tokens_of(found) == tokens_of(wanted) and len(tokens_of(found)) == 8
    assert all(is_whole(tokens) for tokens in tokens_of(found))
    for one in (first, second):
        one.scheduler.grammars.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammars")
    plan_conversion(open_checkpoint(str(save(random_model(layers=2), folder / "hf")))).write(folder / "w")
    return folder / "w"


@pytest.mark.parametrize(("tensor", "stages", "pipelined"), [(2, 1, False), (1, 2, True), (2, 2, True)])
def test_several_ranks_continue_what_others_began(
    directory: Path, tensor: int, stages: int, pipelined: bool
) -> None:
    """An engine of one rank begins, and the ranks continue requests with n, penalties and words."""
    settings = {"max_sequences": 8, "tokenizer_dir": tokenizer_folder()}

    def all_of(offline: OfflineEngine) -> list[dict]:
        return moved(offline, offline, 10**6)

    def first_part(offline: OfflineEngine) -> dict[int, Client]:
        clients = {number: Client(Submit(number, sequences), 640) for number, sequences in enumerate(MIXED)}
        for client in clients.values():
            offline.scheduler.submit(b"door", client.submit)
        _step(offline, clients, 4)
        return clients

    wanted, _ = on_ranks(directory, 1, 1, all_of, **settings)
    clients, _ = on_ranks(directory, 1, 1, first_part, **settings)

    def second_part(offline: OfflineEngine) -> list[dict]:
        for client in clients.values():
            if not client.has_ended:
                offline.scheduler.submit(b"door", client.again())
        _step(offline, clients)
        assert offline.scheduler.counters.resumed >= 4
        return [clients[number].summary() for number in sorted(clients)]

    found, _ = on_ranks(directory, tensor, stages, second_part, pipelined, **settings)
    assert tokens_of(found) == tokens_of(wanted)
    assert all(is_whole(tokens) for tokens in tokens_of(found))
