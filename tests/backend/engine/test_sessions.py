"""Sessions of the scheduler, on a device whose cache records which tokens each token attended to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.backend.engine.toy_device import DOOR, VOCAB, Run, limits
from tridecode.backend.base.errors import CapacityError, RequestError, SessionGoneError, UnsupportedError
from tridecode.backend.engine.cache import sessions
from tridecode.backend.engine.parts.forks import Forks
from tridecode.backend.engine.step.plan import StepPlan, StepResult
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest, SessionRound, Submit

_PRIME = 1_000_003


def mixed(values) -> int:
    found = 17
    for value in values:
        found = (found * 31 + value + 1) % _PRIME
    return found


def visible(length: int, memory: int) -> int:
    """Return the first position that the last of `length` tokens attends to."""
    return max(0, length - memory) if memory else 0


def wanted_tokens(prompt: list[int], count: int, end_id: int, seed: int, memory: int) -> list[int]:
    """Run the device's model on a whole prompt. The value of a token mixes the tokens that it attends to, and
    the next token mixes the values at its position, so a wrong token at any depth changes the result."""
    known, output = list(prompt), []
    while len(output) < count and (not output or output[-1] != end_id):
        last = len(known)
        values = [mixed(known[visible(p + 1, memory) : p + 1]) for p in range(visible(last, memory), last)]
        output.append(mixed([*values, seed, len(output)]) % VOCAB)
        known.append(output[-1])
    return output


class DeepDevice:
    """Executes plans as the kernels do: a step writes its tokens to the cache, then every token attends."""

    def __init__(self, limits):
        places = limits.num_blocks * limits.block_tokens
        self.block_tokens = limits.block_tokens
        self.tokens, self.positions = np.full(places, -1), np.full(places, -1)
        self.values = np.full(places, -1, np.int64)
        self.last: dict[int, int] = {}
        self.state: dict[int, tuple[int, int]] = {}  # seed, generated
        self.computed = 0  # tokens of prompts

    def run(self, plan: StepPlan) -> StepResult:
        assert len(set(plan.kv_slots.tolist())) == plan.num_tokens, "two tokens are written to one place"
        for source, block in (plan.part(Forks) or Forks()).blocks:
            size = self.block_tokens
            old, new = (slice(number * size, (number + 1) * size) for number in (source, block))
            for kept in (self.tokens, self.positions, self.values):
                kept[new] = kept[old]
        for start in plan.starts:
            self.state[start.slot] = start.params.seed, start.generated
        self.computed += plan.num_tokens - plan.num_decodes
        rows = list(zip(plan.query_starts[:-1].tolist(), plan.query_starts[1:].tolist()))
        for row, (first, last) in enumerate(rows):
            slot = int(plan.slots[row])
            ids = [self.last[slot] if token < 0 else int(token) for token in plan.token_ids[first:last]]
            written = plan.kv_slots[first:last]
            self.tokens[written], self.positions[written] = ids, plan.positions[first:last]
        sampled = []
        for row, (first, last) in enumerate(rows):
            slot, length = int(plan.slots[row]), int(plan.context_lens[row])
            places = self._places(plan, row, length)
            top = int(plan.positions[last - 1])
            assert sorted(self.positions[places].tolist()) == list(range(top + 1 - length, top + 1))
            in_order = places[np.argsort(self.positions[places])]
            for count in range(last - first, 0, -1):  # tokens of the row, counted from its end
                seen = self.tokens[in_order[: length - count + 1]]
                self.values[in_order[length - count]] = mixed(seen.tolist())
            if plan.samples[row]:
                seed, generated = self.state[slot]
                values = self.values[in_order].tolist()
                self.last[slot] = mixed([*values, seed, generated]) % VOCAB
                self.state[slot] = seed, generated + 1
                sampled.append(self.last[slot])
        return StepResult(np.array(sampled, np.int32), np.zeros(len(sampled), np.float32))

    def _places(self, plan: StepPlan, row: int, length: int) -> np.ndarray:
        index = np.arange(length)
        return (
            plan.block_tables[row][index // self.block_tokens] * self.block_tokens + index % self.block_tokens
        )


class Conversation:
    """A client with its door: keeps the history of one row, from which the next round begins."""

    def __init__(
        self, run: SessionRun, number: int, session_len: int = 40, memory: int = 0, idle_s: float = 60.0
    ):
        self.run, self.number, self.memory = run, number, memory
        self.history: list[int] = []
        self.started = self.brings_history = False
        self.shape = {"session_len": session_len, "memory_len": memory, "idle_s": idle_s}

    def submit(self, new: list[int], count: int, end_id: int = -1, seed: int = 0) -> int:
        """Begin a round; returns its request."""
        retained = [len(self.history)] if self.started else []
        self.whole = [*self.history, *new] if self.started else new
        self.asked = count, end_id, seed
        history = [np.array(self.history, "<i4").tobytes()] if self.brings_history else []
        wanted = SessionRound(self.number, retained=retained, history=history, **self.shape)
        return self.run.submit_round(wanted, [new], max_tokens=count, end_id=end_id, seed=seed)

    def close(self, request: int) -> None:
        """Take the answer of a round; it must equal the model's on the whole history."""
        tokens, event = self.run.tokens[request, 0], self.run.ends[request, 0][0]
        assert event.finish in ("length", "end_id"), event
        count, end_id, seed = self.asked
        assert tokens == wanted_tokens(self.whole, count, end_id, seed, self.memory)
        self.started = True
        self.history = [*self.whole, *tokens]
        if event.finish == "end_id":
            self.history.pop()  # the next prompt overwrites it

    def round(self, new: list[int], count: int, **params) -> int:
        """A whole round; returns how many tokens of prompts the device computed in it."""
        before = self.run.device.computed
        request = self.submit(new, count, **params)
        self.run.until_ended(request)
        self.close(request)
        return self.run.device.computed - before


class SessionRun(Run):
    def __init__(self, limits, overlap: bool = False):
        super().__init__(limits, overlap)
        self.device = DeepDevice(limits)
        self.requests = 0

    def submit_round(self, wanted: SessionRound | None, prompts: list[list[int]], **params) -> int:
        self.requests += 1
        sequences = [
            SequenceRequest(np.array(prompt, np.int32).tobytes(), SamplingParams(**params))
            for prompt in prompts
        ]
        self.scheduler.submit(DOOR, Submit(self.requests, sequences, session=wanted))
        self.take(self.scheduler.take_events())
        return self.requests

    def until_ended(self, request: int) -> None:
        for _ in range(500):
            if self.ends[request, 0] and not self.pending:
                return
            self.step()
        raise AssertionError(f"request {request} did not end")

    def finish_requests(self) -> None:
        while self.scheduler.has_work or self.pending:
            self.step()

    def check_blocks(self) -> None:
        """Every block is free, a sequence's or cached; among the cached ones are those of sessions."""
        used = {block for sequence in self.open() for block in sequence.blocks}
        pool = self.scheduler.cache.index
        assert pool.num_free + pool.num_cached + len(used) == pool.num_blocks
        assert self.scheduler.sessions.num_blocks <= pool.num_cached


both_orders = pytest.mark.parametrize("overlap", [False, True, "stages"], ids=["plain", "overlap", "stages"])


@both_orders
def test_a_round_computes_the_new_tokens_and_the_last_one_only(overlap):
    run = SessionRun(limits(), overlap)
    talk = Conversation(run, 1)
    assert talk.round([1, 2, 3, 4, 5], 4) == 5
    assert talk.round([6, 7], 3) == 3  # the last token of an answer was not fed
    assert talk.round([8], 4) == 2
    assert len(talk.history) == 19
    run.check_blocks()
    run.scheduler.end_session(DOOR, 1)
    run.finish()


@both_orders
def test_an_end_token_is_replaced_by_the_next_prompt(overlap):
    run = SessionRun(limits(), overlap)
    talk = Conversation(run, 1)
    answer = wanted_tokens([1, 2, 3], 8, -1, 0, 0)
    talk.round([1, 2, 3], 8, end_id=answer[2])
    kept = 3 + answer.index(answer[2])
    assert len(talk.history) == kept
    assert talk.round([9, 9], 4) == 2  # all kept tokens are in the cache
    assert talk.round([], 4) == 1  # a round may have no new tokens


@both_orders
@pytest.mark.parametrize("memory", [5, 8])
def test_a_ring_keeps_the_last_tokens(memory, overlap):
    run = SessionRun(limits(), overlap)
    talk = Conversation(run, 1, memory=memory)
    assert talk.round([1, 2, 3, 4], 9) == 4
    assert talk.round([5, 6, 7], 5) == 4
    assert talk.round([8], 6, end_id=wanted_tokens([*talk.history, 8], 6, -1, 0, memory)[1]) == 2
    talk.round([], 3)  # recomputes the token before the end token, which may already have been fed
    talk.round([4, 5], 3)
    assert run.scheduler.sessions.num_blocks == 2  # a ring of 5 to 8 tokens needs two blocks of 4
    run.check_blocks()


@both_orders
@pytest.mark.parametrize("memory", [0, 5])
def test_another_engine_continues_a_session_with_its_history(memory, overlap):
    talk = Conversation(SessionRun(limits(), overlap), 1, memory=memory)
    talk.round([1, 2, 3, 4, 5], 4)
    talk.run, talk.brings_history = SessionRun(limits(), overlap), True
    talk.round([6, 7], 3)
    assert len(talk.history) == 14
    talk.round([8], 4)  # brings its history again; the engine has the session now
    talk.brings_history = False
    assert talk.round([9], 2) == 2
    talk.run.check_blocks()


def test_a_history_that_is_shorter_than_the_round_names_is_refused():
    run = SessionRun(limits())
    wanted = SessionRound(1, 40, [5], history=[np.arange(4, dtype="<i4").tobytes()])
    with pytest.raises(RequestError, match="row 0 keeps 5 tokens; the session has 4"):
        run.submit_round(wanted, [[1]], max_tokens=2)


@both_orders
@pytest.mark.parametrize("memory", [0, 6])
def test_blocks_of_idle_sessions_go_to_requests_and_are_computed_again(memory, overlap):
    run = SessionRun(limits(num_blocks=6), overlap)
    talks = [Conversation(run, number, memory=memory) for number in (1, 2)]
    for talk in talks:
        talk.round([1, 2, 3, talk.number], 5)
    assert run.scheduler.sessions.num_blocks == 2 * (2 if memory else 2)
    request = run.submit_round(None, [list(range(17))], max_tokens=3)  # 5 blocks
    run.until_ended(request)
    assert run.tokens[request, 0] == wanted_tokens(list(range(17)), 3, -1, 0, 0)
    assert run.scheduler.counters.preemptions == 0, "an idle session is preferred to a running sequence"
    run.check_blocks()
    assert talks[0].round([7], 2) > 2
    assert talks[1].round([7], 2) >= 2
    run.check_blocks()


def test_the_session_that_was_used_longest_ago_gives_its_blocks_first():
    run = SessionRun(limits(num_blocks=9))
    talks = [Conversation(run, number) for number in (1, 2, 3)]
    for talk in talks:
        talk.round([talk.number, 2, 3], 5)  # 2 blocks each
    talks[0].round([4], 1)  # 3 blocks
    request = run.submit_round(None, [list(range(14))], max_tokens=1)  # 4 blocks; 2 are free
    run.until_ended(request)
    assert talks[0].round([5], 1) == 2
    assert talks[1].round([5], 1) == 9


def test_a_cancelled_round_leaves_the_session_as_it_was():
    for steps in (0, 1, 3):
        run = SessionRun(limits())
        talk = Conversation(run, 1)
        talk.round([1, 2, 3, 4, 5], 4)
        request = talk.submit([6, 7], 8)
        for _ in range(steps):
            run.step()
        run.scheduler.cancel(DOOR, request)
        run.take(run.scheduler.take_events())
        assert talk.round([8, 9], 4) == (2 if steps else 3), "what was cached stays cached"


@both_orders
def test_a_ring_that_a_cancelled_round_overwrote_is_computed_again(overlap):
    run = SessionRun(limits(), overlap)
    talk = Conversation(run, 1, memory=6)
    talk.round([1, 2, 3, 4, 5], 4)
    request = talk.submit([6, 7], 8)
    for _ in range(5):
        run.step()
    run.scheduler.cancel(DOOR, request)
    run.take(run.scheduler.take_events())
    run.settle()
    assert talk.round([8, 9], 4) == 11
    assert talk.round([8, 9], 4) == 3


@both_orders
def test_a_round_of_no_tokens_adds_its_prompt(overlap):
    run = SessionRun(limits(), overlap)
    talk = Conversation(run, 1)
    talk.round([1, 2, 3], 6, end_id=wanted_tokens([1, 2, 3], 6, -1, 0, 0)[2])
    talk.round([4, 5], 0)
    talk.round([6], 3)


def test_rows_of_a_session_are_conversations_of_their_own():
    run = SessionRun(limits())
    first = run.submit_round(SessionRound(1, 40), [[1, 2, 3], [4, 5]], max_tokens=3)
    run.until_ended(first)
    run.finish_requests()
    histories = [[*prompt, *run.tokens[first, row]] for row, prompt in enumerate(([1, 2, 3], [4, 5]))]
    retained = [len(history) for history in histories]
    second = run.submit_round(SessionRound(1, 40, retained), [[6], [7, 8]], max_tokens=4)
    run.finish_requests()
    for row, new in enumerate(([6], [7, 8])):
        assert run.tokens[second, row] == wanted_tokens([*histories[row], *new], 4, -1, 0, 0)


def test_an_idle_session_ends_and_its_blocks_are_free():
    run = SessionRun(limits())
    talk = Conversation(run, 1, idle_s=5.0)
    talk.round([1, 2, 3], 4)
    run.now += 4.0
    run.step()
    assert run.scheduler.sessions.num_blocks == 2
    run.now += 1.5
    run.step()
    run.finish()
    with pytest.raises(SessionGoneError, match="idle for more than 5 s"):
        talk.submit([4], 1)


def test_a_session_ends_with_its_door():
    run = SessionRun(limits())
    talk = Conversation(run, 1)
    talk.round([1, 2, 3], 4)
    talk.submit([4], 8)
    run.step()
    run.scheduler.cancel_door(DOOR)
    run.finish()
    with pytest.raises(SessionGoneError):
        talk.submit([4], 1)


def test_a_start_replaces_the_session_of_its_number():
    run = SessionRun(limits())
    Conversation(run, 1).round([1, 2, 3, 4, 5], 4)
    again = Conversation(run, 1)
    assert again.round([1, 2], 3) == 2
    run.check_blocks()
    assert run.scheduler.sessions.num_blocks == 1


@pytest.mark.parametrize(
    ("wanted", "new", "count", "error", "text"),
    [
        (SessionRound(9, 40, [3]), [[1]], 1, SessionGoneError, "does not have it"),
        (SessionRound(1, 40, [4]), [[1]], 1, RequestError, r"keeps 4 tokens; the session has 3"),
        (
            SessionRound(1, 40, [3, 3]),
            [[1], [1]],
            1,
            RequestError,
            "this round has 2 rows; the session has 1",
        ),
        (SessionRound(1, 40, [3]), [[1] * 4], 34, RequestError, r"41 together; session_len is 40"),
        (SessionRound(2, 41), [[1]], 1, RequestError, "session_len is 41; this model accepts 1 to 40"),
        (SessionRound(2, 40, [], 2), [[1] * 3], 1, RequestError, "3 new tokens; memory_len is 2"),
    ],
)
def test_a_round_that_does_not_fit_its_session_is_refused(wanted, new, count, error, text):
    run = SessionRun(limits())
    talk = Conversation(run, 1)
    talk.round([1, 2], 1)
    with pytest.raises(error, match=text):
        run.submit_round(wanted, new, max_tokens=count)
    talk.round([5], 1)  # as if nothing had been sent


def test_a_model_whose_attention_orders_its_keys_has_no_ring():
    run = SessionRun(limits(ring_fault="this model's attention (ALiBi) depends on the distance of every key"))
    Conversation(run, 1, memory=40).round([1, 2, 3], 2)
    with pytest.raises(UnsupportedError, match="memory_len is 8 and session_len 40.*ALiBi"):
        Conversation(run, 2, memory=8).submit([1, 2, 3], 2)


def test_sessions_reserve_their_tokens(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_RESERVED_TOKENS", 2 * (1024 + 40))
    run = SessionRun(limits())
    for number in (1, 2):
        Conversation(run, number).round([1], 1)
    with pytest.raises(CapacityError, match="2 sessions have reserved 2,128 tokens"):
        Conversation(run, 3).submit([1], 1)
    run.scheduler.end_session(DOOR, 1)
    Conversation(run, 3).round([1], 1)


def test_a_prompt_that_grows_into_the_long_factors_is_computed_again():
    run = SessionRun(limits(long_prompt_tokens=8))
    run.device = _Shifted(run.scheduler.limits)
    talk = Conversation(run, 1)
    assert talk.round([1, 2, 3], 3) == 3
    assert talk.round([4], 1) == 2
    assert talk.round([5, 6], 1) == 10  # the prompt is the history and the new tokens: 10 of them


def test_tokens_that_another_state_of_an_adapter_computed_are_computed_again():
    """An adapter whose matrices have changed has another digest."""
    run = SessionRun(limits())
    talk = Conversation(run, 1)
    assert talk.round([1, 2, 3, 4, 5], 4) == 5
    before = run.device.computed
    request = talk.submit([6], 2)
    (sequence,) = run.open()
    sequence.group.adapter, sequence.group.adapter_digest = 7, b"new"
    run.until_ended(request)
    talk.close(request)
    assert run.device.computed - before == 10
    assert run.scheduler.sessions.num_blocks == 3
    run.check_blocks()


def test_a_preempted_round_goes_on_from_the_blocks_that_are_left():
    run = SessionRun(limits())
    talk = Conversation(run, 1)
    talk.round([1, 2, 3, 4, 5], 4)
    before = run.device.computed
    request = talk.submit([6], 5)
    run.step()
    run.settle()
    (sequence,) = run.open()
    run.scheduler.planner.preempt(sequence)
    run.check_blocks()
    run.until_ended(request)
    talk.close(request)
    assert run.device.computed - before == 2 + 3, "two full blocks of the session were still there"
    run.check_blocks()


def test_a_conversation_and_requests_find_each_others_full_blocks():
    """Blocks of 4 tokens: what a request has computed, a session finds, and the other way round."""
    run = SessionRun(limits(num_blocks=40))
    prompt = list(range(12))
    request = run.submit_round(None, [prompt], max_tokens=5)
    run.until_ended(request)
    talk, other = Conversation(run, 1), Conversation(run, 2)
    assert talk.round([*prompt, 7], 5) == 1, "three blocks of the request"
    assert talk.round([8], 4) == 2
    assert other.round([*talk.history, 9], 2) == len(talk.history) + 1 - (len(talk.history) - 1) // 4 * 4
    before = run.device.computed
    history = talk.history
    request = run.submit_round(None, [[*history, 3]], max_tokens=2)
    run.until_ended(request)
    assert run.device.computed - before == len(history) + 1 - (len(history) - 1) // 4 * 4
    assert run.tokens[request, 0] == wanted_tokens([*history, 3], 2, -1, 0, 0)
    run.check_blocks()


def test_a_round_hashes_only_the_blocks_behind_those_of_the_round_before(monkeypatch):
    """The identities are those of a request with the whole prompt."""
    run = SessionRun(limits(num_blocks=40))
    hasher, sizes = run.scheduler.cache.index.hasher, []
    chain = hasher.chain

    def noted(parent: bytes, ids: bytes, block_bytes: int) -> list[bytes]:
        sizes.append(len(ids) // 4)
        return chain(parent, ids, block_bytes)

    talk = Conversation(run, 1)
    talk.round(list(range(14)), 7)
    assert len(talk.history) == 21
    monkeypatch.setattr(hasher, "chain", noted)
    request = talk.submit([9, 9], 4)  # 20 of 23 tokens are known full blocks of 4 tokens
    (sequence,) = run.open()
    assert sizes == [0]
    wanted = run.scheduler.prompt_hasher.of(np.array(talk.whole, "<i4").tobytes(), SamplingParams())
    assert sequence.group.chain == wanted
    run.until_ended(request)
    talk.close(request)
    del talk.history[10:]  # the client goes back
    talk.submit([3, 3, 3], 2)
    assert sizes[-1] == 4, "10 tokens are kept; one block of 13 tokens is new"


@pytest.mark.parametrize(
    ("params", "scope"), [({"cache": "off"}, "all"), ({}, "none"), ({}, "salt"), ({"cache_salt": "x"}, "all")]
)
def test_a_conversation_that_does_not_share_keeps_its_own_blocks(params, scope):
    run = SessionRun(limits(num_blocks=40, cache_scope=scope))
    prompt = list(range(12))
    run.until_ended(run.submit_round(None, [prompt], max_tokens=5))
    before, wanted = run.device.computed, SessionRound(1, 40)
    first = run.submit_round(wanted, [prompt], max_tokens=5, **params)
    run.until_ended(first)
    assert run.device.computed - before == 12, "nothing of the request is found"
    history, before = [*prompt, *run.tokens[first, 0]], run.device.computed
    second = run.submit_round(SessionRound(1, 40, [len(history)]), [[3]], max_tokens=2, **params)
    run.until_ended(second)
    assert run.device.computed - before == 2, "its own blocks are"
    assert run.tokens[second, 0] == wanted_tokens([*history, 3], 2, -1, 0, 0)


class _Shifted(DeepDevice):
    """Removes the position shift of long prompts, which applies to all positions of a row."""

    def run(self, plan: StepPlan) -> StepResult:
        plan.positions = plan.positions % 40
        return super().run(plan)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.data())
def test_any_rounds_beside_any_requests_give_the_answers_of_whole_prompts(data):
    """Random conversations with and without rings, cancelled rounds and plain requests share a cache that
    holds about two of them."""
    draw = data.draw
    run = SessionRun(limits(num_blocks=10, max_sequences=3), draw(st.booleans()))
    talks = [Conversation(run, number, memory=draw(st.sampled_from([0, 4, 7]))) for number in range(4)]
    open_rounds: dict[int, tuple[Conversation, int]] = {}
    token = st.integers(0, VOCAB - 1)
    for _ in range(draw(st.integers(5, 40))):
        action = draw(st.sampled_from(["round", "round", "step", "step", "step", "plain", "cancel"]))
        talk = draw(st.sampled_from(talks))
        if action == "round" and talk.number not in open_rounds and len(talk.history) < 28:
            new = draw(st.lists(token, min_size=0 if talk.started else 1, max_size=4))
            end_id = draw(st.one_of(st.just(-1), token))
            open_rounds[talk.number] = (
                talk,
                talk.submit(new, draw(st.integers(0, 5)), end_id, draw(st.integers(0, 2))),
            )
        elif action == "plain":
            run.submit_round(
                None, [draw(st.lists(token, min_size=1, max_size=20))], max_tokens=draw(st.integers(1, 9))
            )
        elif action == "cancel" and talk.number in open_rounds:
            request = open_rounds[talk.number][1]
            run.scheduler.cancel(DOOR, request)
            run.take(run.scheduler.take_events())
            if run.ends[request, 0][0].finish == "cancelled":
                del open_rounds[talk.number]
        else:
            run.step()
        for number, (owner, request) in list(open_rounds.items()):
            if run.ends[request, 0]:
                owner.close(request)
                del open_rounds[number]
        run.check_blocks()
    run.finish_requests()
    for owner, request in open_rounds.values():
        owner.close(request)
    for talk in talks:
        run.scheduler.end_session(DOOR, talk.number)
    run.finish()
