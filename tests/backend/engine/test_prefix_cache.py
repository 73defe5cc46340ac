"""The prefix index under the scheduler: what is found, what is kept, who may overtake. The toy device shows a
wrong block as a wrong token."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests.backend.engine.request_rules import SHARED, RequestMachine
from tests.backend.engine.toy_device import DOOR, Run, expected, limits
from tridecode.backend.base.errors import RequestError
from tridecode.backend.engine.cache.block_keys import Context
from tridecode.backend.engine.schedule.waiting import MOST_OVERTAKEN
from tridecode.backend.wire.messages import SamplingParams

WIDE = {"num_blocks": 400, "max_sequence_tokens": 400, "max_step_tokens": 64}


def computed(run: Run) -> int:
    return run.scheduler.counters.computed_prompt_tokens


def cached(run: Run) -> int:
    return run.scheduler.cache.cached_tokens


class PrefixMachine(RequestMachine):
    """Requests with common beginnings, rounds of conversations, samples and beams, with every use of the
    cache; cancelled, preempted and abandoned at any time."""

    @initialize(
        blocks=st.integers(8, 20),
        step=st.integers(4, 12),
        overlap=st.sampled_from([False, True, "stages"]),
    )
    def start(self, blocks: int, step: int, overlap: bool | str) -> None:
        sizes = limits(num_blocks=blocks, max_step_tokens=step, max_sequence_tokens=32)
        self.run = Run(sizes, overlap)
        self.number = 0
        self.wanted: dict[int, tuple[list[int], SamplingParams]] = {}
        self.hashed: dict[bytes, bytes] = {}  # identity -> identity of its parent and ids
        hasher = self.run.scheduler.cache.index.hasher
        plain_hash = hasher._hash

        def recorded(data: bytes) -> bytes:
            key = plain_hash(data)
            self.hashed[key] = data
            return key

        hasher._hash = recorded

    @rule(
        shared=st.sampled_from(SHARED),
        own=st.lists(st.integers(0, 2), max_size=6),
        count=st.integers(0, 8),
        end=st.sampled_from([-1, 3]),
        samples=st.sampled_from([0, 0, 0, 3]),
        cache=st.sampled_from(["on", "on", "on", "write", "off"]),
        salt=st.sampled_from(["", "", "a"]),
    )
    def ask(self, shared, own, count, end, samples, cache, salt) -> None:
        self.submit(
            [*shared, *own],
            max_tokens=count,
            end_id=end,
            num_return_sequences=samples,
            cache=cache,
            cache_salt=salt,
        )

    @rule(data=st.data(), new=st.lists(st.integers(0, 2), min_size=1, max_size=3), count=st.integers(1, 6))
    def ask_again(self, data: st.DataObject, new: list[int], count: int) -> None:
        """The next round of a conversation, or a retry of an answer that was cut short."""
        earlier = [
            number
            for number, (_, params) in self.wanted.items()
            if params.num_slots == 1 and self.run.ends[number, 0]
        ]
        if earlier:
            number = data.draw(st.sampled_from(earlier))
            prompt = [*self.wanted[number][0], *self.run.tokens[number, 0]]
            self.submit(prompt + (new if data.draw(st.booleans()) else []), max_tokens=count)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.run.step()

    @invariant()
    def users_are_counted_and_every_indexed_block_holds_its_tokens(self) -> None:
        self.run.check_holders()
        index, cache = self.run.scheduler.cache.index, self.run.device.cache
        for key, block in index._blocks.items():
            ids = cache[block].astype("<i4").tobytes()
            assert self.hashed[key][16:] == ids, f"block {block} does not hold the tokens of its identity"
            parent = index._parents[block]
            if parent >= 0:
                assert index._keys[parent] == self.hashed[key][:16]

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        self.run.finish()
        for number, (prompt, params) in self.wanted.items():
            for i in range(params.num_sequences):
                (end,) = self.run.ends[number, i]
                if params.beam_width > 1 or end.finish in ("error", "cancelled"):
                    continue
                answer = expected(prompt, params.max_tokens, params.end_id, params.seed + i)
                assert self.run.tokens[number, i] == answer


TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# ---------------------------------------------------------------- what is computed


def test_rounds_of_conversations_compute_only_what_no_block_holds() -> None:
    """Eight conversations of six rounds with 100 common tokens, which arrive together: prefill computes the
    tokens behind the last full block that any earlier round has, and no more."""
    run = Run(limits(**{**WIDE, "num_blocks": 1000}, max_sequences=8), overlap=True)
    common, size = [(7 * i) % 50 for i in range(100)], run.scheduler.limits.block_tokens
    histories = [[*common, i] for i in range(8)]
    least = 0
    for turn in range(6):
        for i, history in enumerate(histories):
            history += [(i + turn + j) % 50 for j in range(9)]
            run.submit(10 * turn + i, history, max_tokens=11)
            known = len(common) if turn == 0 else len(history) - 9 - 1  # its last token was not computed
            least += len(history) - (known // size * size if turn or i else 0)
        run.finish()
        for i, history in enumerate(histories):
            assert run.tokens[10 * turn + i, 0] == expected(history, 11)
            history += run.tokens[10 * turn + i, 0]
    assert computed(run) <= 1.02 * least, (computed(run), least)
    total = run.scheduler.counters.prompt_tokens
    assert computed(run) + cached(run) == total and cached(run) > total / 2


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    run = Run(limits(**WIDE))
    for number in range(2):
        run.submit(number, [1] * 16, max_tokens=2)
        run.finish()
    assert computed(run) == 16 + 4 and cached(run) == 12


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    """Two sequences that need 4 blocks each share 6: the one that is preempted computes less than it had."""
    run = Run(limits(num_blocks=7))
    run.submit(1, [1] * 4, max_tokens=12)
    run.submit(2, [2] * 4, max_tokens=12)
    run.finish()
    assert run.scheduler.counters.preemptions > 0 and cached(run) > 0
    assert run.tokens[1, 0] == expected([1] * 4, 12) and run.tokens[2, 0] == expected([2] * 4, 12)


@pytest.mark.parametrize(
    ("first", "second", "hits"),
    [
        ({}, {}, True),
        ({"cache": "write"}, {}, True),
        ({}, {"cache": "write"}, False),
        ({"cache": "off"}, {}, False),
        ({}, {"cache": "off"}, False),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, True),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
        ({"cache_salt": "a"}, {}, False),
        ({}, {"cache_salt": "a"}, False),
        ({}, {"return_context_logits": True}, False),
        ({}, {"return_context_log_prob": True}, False),
        ({}, {"return_context_embedding": True}, False),
        ({}, {"pooling": "mean"}, False),
        ({}, {"pooling": "last"}, True),
        ({}, {"return_generation_logits": True}, True),
        ({}, {"return_log_probs": True, "top_log_probs": 3}, True),
        ({}, {"beam_width": 2}, True),
        ({"beam_width": 2}, {}, True),
        ({}, {"num_return_sequences": 3}, True),
        ({"num_return_sequences": 3}, {}, True),
    ],
)
def test_who_finds_whose_blocks(first: dict, second: dict, hits: bool) -> None:
    run = Run(limits(**WIDE))
    for number, params in enumerate((first, second)):
        run.submit(number, [3] * 21, max_tokens=3, **params)
        for _ in range(8):
            run.step()
        if number == 0:
            before = computed(run)
    again = second.get("num_return_sequences", 1)  # each sample computes the last token of the prompt
    assert computed(run) - before == (again if hits else 21)


@pytest.mark.parametrize(
    ("scope", "salt", "hits"),
    [("all", "", True), ("salt", "", False), ("salt", "mine", True), ("none", "mine", False)],
)
def test_the_scope_of_the_repository_decides_who_shares(scope: str, salt: str, hits: bool) -> None:
    run = Run(limits(**WIDE, cache_scope=scope))
    for number in range(2):
        run.submit(number, [3] * 21, max_tokens=3, cache_salt=salt)
        run.finish()
    assert (cached(run) == 20) == hits and (hits or cached(run) == 0)


def test_a_salt_that_is_too_long_refuses_its_request_alone() -> None:
    run = Run(limits(**WIDE))
    run.submit(1, [1, 2, 3], max_tokens=3, cache_salt="é" * 128)
    with pytest.raises(RequestError, match="cache_salt has 258 bytes; wanted 256 at most"):
        run.submit(2, [1, 2, 3], max_tokens=3, cache_salt="é" * 129)
    with pytest.raises(RequestError, match="cache is 'never'; wanted one of on, write, off"):
        run.submit(3, [1, 2, 3], max_tokens=3, cache="never")
    run.finish()
    assert run.tokens[1, 0] == expected([1, 2, 3], 3)


def test_a_prompt_waits_for_a_prefix_that_another_computes() -> None:
    """Three equal prompts that arrive together: one is computed, in chunks, the others wait and find it."""
    run = Run(limits(**{**WIDE, "max_step_tokens": 16}))
    for number in range(3):
        run.submit(number, [5] * 40, max_tokens=2)
    run.submit(3, [6], max_tokens=2)
    run.step()
    assert [sequence.group.request for sequence in run.open() if sequence.slot >= 0] == [0]
    run.finish()
    assert computed(run) == 40 + 2 * 4 + 1
    assert all(run.tokens[number, 0] == expected([5] * 40, 2) for number in range(3))


def test_a_cancelled_prompt_lets_those_behind_it_compute_what_it_would_have() -> None:
    run = Run(limits(**{**WIDE, "max_step_tokens": 16}))
    for number in range(2):
        run.submit(number, [5] * 40, max_tokens=2)
    run.step()
    run.scheduler.cancel(DOOR, 0)
    run.take(run.scheduler.take_events())
    run.finish()
    assert run.tokens[1, 0] == expected([5] * 40, 2) and computed(run) == 16 + 24


# ---------------------------------------------------------------- the queue


def test_a_warm_prompt_overtakes_a_cold_one_for_which_there_are_no_blocks() -> None:
    run = Run(limits(num_blocks=16, max_step_tokens=64, max_sequence_tokens=60))
    run.submit(1, [5] * 20, max_tokens=30, end_id=-1)  # runs and grows
    run.step()
    run.submit(2, [6] * 48, max_tokens=2)  # cold: 13 blocks
    run.submit(3, [5] * 20 + [1], max_tokens=2)  # warm: one block more
    run.submit(4, [7], max_tokens=2)  # cold
    for _ in range(3):
        run.step()
    assert run.ends[3, 0] and not run.tokens[2, 0] and not run.tokens[4, 0]
    run.finish()
    assert run.tokens[2, 0] == expected([6] * 48, 2)


def test_a_cold_prompt_is_overtaken_a_bounded_number_of_times() -> None:
    """Warm prompts arrive without end while a cold one waits for blocks that they keep in use."""
    run = Run(limits(num_blocks=16, max_step_tokens=64, max_sequence_tokens=60, max_queued_requests=1000))
    run.submit(0, [5] * 20, max_tokens=30)
    run.step()
    run.submit(1, [6] * 48, max_tokens=2)
    number, ended = 1, 0
    while not run.tokens[1, 0]:
        assert ended < 3 * MOST_OVERTAKEN + 20, "the cold prompt starves"
        while run.scheduler.num_waiting < 4:
            number += 1
            run.submit(number, [5] * 20 + [number % 50], max_tokens=10)
        run.step()
        ended = sum(bool(run.ends[key]) for key in list(run.ends))
    assert run.tokens[1, 0][:1] == expected([6] * 48, 1)


def test_the_first_event_tells_the_cached_tokens() -> None:
    run, seen = Run(limits(**WIDE)), []
    take = run.take
    run.take = lambda events: (seen.extend(event for _, event in events), take(events))[1]
    for number in range(2):
        run.submit(number, [3] * 21, max_tokens=3)
        run.finish()
    assert [event.cached_tokens for event in seen] == [0, 0, 0, 20, 0, 0]


def test_performance_metrics_tell_hits_and_misses_of_the_prompt() -> None:
    """21 tokens are 6 blocks, 5 of them cached the second time. The blocks of the answer are neither."""
    run, perfs = Run(limits(**WIDE)), []
    take = run.take
    run.take = lambda events: (perfs.extend(event.extra.perf for _, event in events), take(events))[1]
    for number, hits in enumerate((0, 5)):
        run.submit(number, [3] * 21, max_tokens=12, return_perf_metrics=True)
        run.finish()
        assert (perfs[-1].reused_blocks, perfs[-1].missed_blocks) == (hits, 6 - hits)
        assert perfs[-1].new_blocks == 8 - hits, "32 tokens are cached"


# ---------------------------------------------------------------- identities


def test_contexts_and_salts_have_identities_of_their_own() -> None:
    hasher = Run(limits()).scheduler.cache.index.hasher
    masks = [
        hasher.mask(Context(adapter=b"1")),
        hasher.mask(Context(prompt=1)),
        hasher.mask(Context(shift=9)),
    ]
    assert hasher.mask(Context()) == b"" and len({*masks}) == 3
    assert hasher.root(Context(salt="a")) != hasher.root(Context(salt="b"))
