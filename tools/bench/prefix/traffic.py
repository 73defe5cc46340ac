"""Loads in which prompts begin alike: conversations, common prefixes, a long prompt; chats without hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.bench.load.workloads import mix_requests

#: (median, least, most) tokens of a user's message and of an answer in `conversations` and `prefixes`
_MESSAGE, _ANSWER, _SIGMA = (60, 16, 256), (60, 16, 128), 0.6
#: requests of each group in `prefixes`
_GROUP = 16
#: prompts of `long`: the first one is computed, the others find all full blocks of it
_LONG_TURNS, _LONG_ANSWER = 6, 2

#: prompts that take turns in `swap`: with a cache that holds fewer, each comes from the host tier
_SWAPPED = 4

#: prompt and answer tokens of each decoding stream of the load `streams`
_STREAM_PROMPT, _STREAM_ANSWER = 100, 600

LOADS = ("conversations", "documents", "prefixes", "long", "swap", "streams", "mix")


@dataclass(frozen=True)
class Turn:
    """One request of a conversation. ids: (n,) int32, appended to everything before. answer: new tokens."""

    ids: np.ndarray
    answer: int


@dataclass
class Conversation:
    """Requests that follow each other; a prompt is the last one, its answer and the ids of the turn.

    known: leading tokens of the first prompt that an earlier request of the load has. cycle: 0, or the number
    of prompts that are repeated, each without any answer.
    """

    turns: Sequence[Turn]
    known: int = 0
    cycle: int = 0
    history: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def prompt(self, number: int) -> np.ndarray:
        """Return the prompt of a turn, whose predecessors have been answered."""
        if self.cycle:
            return self.turns[number].ids
        self.history = np.concatenate([self.history, self.turns[number].ids])
        return self.history

    def answered(self, tokens: Sequence[int]) -> None:
        if not self.cycle:
            self.history = np.concatenate([self.history, np.asarray(tokens, np.int32)])


@dataclass(frozen=True)
class Traffic:
    """conversations: all run at the same time. longest: tokens of the longest sequence."""

    conversations: list[Conversation]
    longest: int

    @property
    def requests(self) -> int:
        return sum(len(one.turns) for one in self.conversations)

    def least_computed(self, block_tokens: int) -> int:
        """Return the prompt tokens that must be computed if full blocks of everything earlier are found.

        The last token of an answer is never in the cache, and at least one token of a prompt is computed.
        """
        total = 0
        for one in self.conversations:
            known = length = 0
            for number, turn in enumerate(one.turns):
                if number == 0 or one.cycle:
                    length = len(turn.ids)
                    known = one.known if number == 0 else length if number >= one.cycle else 0
                else:
                    known = length + one.turns[number - 1].answer - 1
                    length = known + 1 + len(turn.ids)
                total += length - min(known, length - 1) // block_tokens * block_tokens
        return total


def make_traffic(
    load: str, vocab_size: int, conversations: int, rounds: int, common: int, seed: int
) -> Traffic:
    """Return a load of LOADS, determined by the seed. common: tokens of the common beginning; for
    `long`, `swap` and `streams` the tokens of a long prompt and its answer. Raises ConfigError for an unknown
    load.
    """
    random = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray:
        return random.integers(3, vocab_size, count).astype(np.int32)  # ids 0 to 2 may be special

    if load == "mix":
        prompts, outputs = mix_requests(vocab_size, conversations, seed)
        single = [Turn(np.asarray(p, np.int32), n) for p, n in zip(prompts, outputs)]
        return _traffic([Conversation([one]) for one in single])
    if load in ("long", "swap", "streams"):
        cycle = 1 if load == "long" else _SWAPPED
        long = [Turn(ids(max(common - _LONG_ANSWER, 1)), _LONG_ANSWER) for _ in range(cycle)] * _LONG_TURNS
        count = conversations if load == "streams" else 0
        others = [Conversation([Turn(ids(_STREAM_PROMPT), _STREAM_ANSWER)]) for _ in range(count)]
        return _traffic([Conversation(long, cycle=cycle), *others])
    if load not in LOADS:
        raise ConfigError(f"--load is {load!r}; wanted one of {', '.join(LOADS)}")
    messages = _lengths(random, conversations * rounds, _MESSAGE).reshape(conversations, rounds)
    answers = _lengths(random, conversations * rounds, _ANSWER).reshape(conversations, rounds)
    found, system = [], ids(common)
    group = 1 if load == "documents" else _GROUP
    for number, (asked, answered) in enumerate(zip(messages, answers)):
        fresh = number == 0 if load == "conversations" else number % group == 0
        if fresh and number:
            system = ids(common)
        turns = [Turn(ids(int(count)), int(length)) for count, length in zip(asked, answered)]
        turns[0] = Turn(np.concatenate([system, turns[0].ids]), turns[0].answer)
        found.append(Conversation(turns, 0 if fresh else common))
    return _traffic(found)


def _traffic(conversations: list[Conversation]) -> Traffic:
    longest = max(
        len(one.turns[0].ids) + one.turns[0].answer
        if one.cycle
        else sum(len(turn.ids) + turn.answer for turn in one.turns)
        for one in conversations
    )
    return Traffic(conversations, longest)


def _lengths(random: np.random.Generator, count: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Return (count,) log-normal integers. shape: (median, least, most)."""
    median, least, most = shape
    values = np.exp(random.normal(np.log(median), _SIGMA, count))
    return np.clip(values.round().astype(np.int64), least, most)
