"""The scheduler without a device: the toy device computes from what the cache would hold, so that a wrong
plan shows as a wrong token."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.engine.toy_device import DOOR, VOCAB, Run, expected, limits
from tridecode.backend.base.errors import CapacityError, RequestError
from tridecode.backend.engine.schedule.prefill_planner import HELD_SHARE, HELD_STEPS
from tridecode.backend.engine.schedule.sequence import Stage
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest, Submit


@pytest.mark.parametrize(("overlap", "micro_batches"), [(False, 1), (True, 1), (False, 2), (False, 4)])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_request_gets_its_own_tokens_whatever_shares_the_cache(
    overlap: bool, micro_batches: int, data: st.DataObject
) -> None:
    run = Run(
        limits(
            num_blocks=data.draw(st.integers(10, 24)),
            max_step_tokens=data.draw(st.integers(4, 12)),
            block_tokens=data.draw(st.sampled_from([1, 3, 4])) if data.draw(st.booleans()) else 4,
            max_sequence_tokens=20,
            micro_batches=micro_batches,
        ),
        overlap,
    )
    capacity = run.scheduler.limits.num_blocks * run.scheduler.limits.block_tokens
    wanted = {}
    for request in range(data.draw(st.integers(1, 12))):
        prompts = data.draw(
            st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=3)
        )
        count, end_id = (
            data.draw(st.integers(0, min(10, capacity - 9))),
            data.draw(st.sampled_from([-1, 3, 17])),
        )
        try:
            run.submit(request, *prompts, max_tokens=count, end_id=end_id)
        except RequestError as error:  # a tiny cache
            assert "cache blocks" in str(error)
            continue
        wanted.update({(request, i): (prompt, count, end_id) for i, prompt in enumerate(prompts)})
        for _ in range(data.draw(st.integers(0, 3))):
            run.step()
    cancelled = data.draw(st.sets(st.sampled_from(sorted({key[0] for key in wanted})))) if wanted else set()
    for request in sorted(cancelled):
        run.scheduler.cancel(DOOR, request)
        run.step()
    run.finish()
    for key, (prompt, count, end_id) in wanted.items():
        assert len(run.ends[key]) == 1, f"{key} ended {len(run.ends[key])} times"
        answer = expected(prompt, count, end_id)
        if run.ends[key][0].finish == "cancelled":
            assert key[0] in cancelled
            assert run.tokens[key] == answer[: len(run.tokens[key])]
        else:
            assert run.tokens[key] == answer
            assert run.ends[key][0].finish == ("end_id" if answer and answer[-1] == end_id else "length")


def test_a_request_joins_while_others_run() -> None:
    run = Run(limits())
    run.submit(1, [1, 2, 3], max_tokens=20)
    for _ in range(5):
        run.step()
    run.submit(2, [4], max_tokens=2)
    run.step()
    assert len(run.tokens[2, 0]) == 1 and len(run.tokens[1, 0]) == 6, (
        "the newcomer waited for a running request"
    )


def test_a_slot_whose_last_token_is_in_flight_takes_the_next_prompt() -> None:
    """One slot, three requests: no step is lost between the end of one and the beginning of the next. Where
    the last tokens fill a block that enters the prefix index, the slot is kept until they are known."""
    run = Run(limits(max_sequences=1, num_blocks=2), overlap=True)
    prompts = {1: [1, 2, 3], 2: [4, 5], 3: [6, 7, 8, 9]}
    for request, prompt in prompts.items():
        run.submit(request, prompt, max_tokens=2, cache="off")
    for step in range(3 * 2):
        run.step()
        assert run.scheduler.num_running <= 1
        assert run.scheduler.num_waiting == 2 - step // 2, "no slot is waited for by a last token"
    while run.pending:
        run.settle()
    for request, prompt in prompts.items():
        assert run.tokens[request, 0] == expected(prompt, 2)
    run.finish(steps=0)


def _with_96_slots() -> Run:
    return Run(limits(max_sequences=96, num_blocks=3000, max_sequence_tokens=120, max_step_tokens=400))


def _admitted(run: Run, steps: int) -> list[int]:
    """Return the number of sequences that each of the next steps admits."""
    found = []
    for _ in range(steps):
        before = run.scheduler.num_waiting
        run.step()
        found.append(before - run.scheduler.num_waiting)
    return found


def test_a_long_queue_fills_several_slots_at_a_time() -> None:
    """HELD_SHARE 32: a slot becomes free in each step, and three are filled at once."""
    assert HELD_SHARE == 32
    run = _with_96_slots()
    for request in range(126):
        run.submit(request, [request % 50], max_tokens=min(request + 1, 96))
    assert _admitted(run, 13) == [96, *[0, 0, 3] * 4]
    run.finish()
    for request in range(126):
        assert run.tokens[request, 0] == expected([request % 50], min(request + 1, 96))


def test_a_slot_is_not_held_back_for_long_nor_from_a_short_queue() -> None:
    run = _with_96_slots()
    for request in range(99):  # one of the 96 that fit ends at once; three wait
        run.submit(request, [1], max_tokens=1 if request == 0 else 60)
    assert _admitted(run, 3 + HELD_STEPS) == [96, *[0] * HELD_STEPS, 1, 0]
    for request in (1, 2):  # as many slots as sequences that wait
        run.scheduler.cancel(DOOR, request)
    assert _admitted(run, 1) == [2]
    run.finish()


def test_a_long_prompt_is_cut_into_chunks_and_does_not_stop_the_others() -> None:
    run = Run(limits(max_step_tokens=8))
    run.submit(1, [1, 2], max_tokens=20)
    run.step()
    run.submit(2, list(range(30)), max_tokens=1)
    for step in range(4):  # 30 tokens, 7 a step next to the decoding row
        assert not run.tokens[2, 0]
        run.step()
        assert len(run.tokens[1, 0]) == 2 + step
    run.step()
    assert run.tokens[2, 0] == expected(list(range(30)), 1)


def test_the_last_comer_is_preempted_and_still_gets_the_right_tokens() -> None:
    run = Run(limits(num_blocks=6, max_sequence_tokens=24))
    run.submit(1, [1, 2, 3], max_tokens=18)
    run.submit(2, [4, 5, 6], max_tokens=18)
    run.finish()
    assert run.scheduler.counters.preemptions > 0
    assert run.tokens[1, 0] == expected([1, 2, 3], 18) and run.tokens[2, 0] == expected([4, 5, 6], 18)


def test_a_smaller_priority_goes_first() -> None:
    run = Run(limits(max_sequences=1, max_step_tokens=8))
    order = []
    for request, priority in ((1, 5), (2, 5), (3, 0)):
        prompt = SequenceRequest(np.array([request], np.int32).tobytes(), SamplingParams(max_tokens=1))
        run.scheduler.submit(DOOR, Submit(request, [prompt], priority=priority))
    while run.scheduler.has_work:
        run.step()
        order += [key[0] for key, ends in run.ends.items() if ends and key[0] not in order]
    assert order == [3, 1, 2]


def test_a_cancelled_request_frees_its_blocks_at_once() -> None:
    run = Run(limits())
    run.submit(1, list(range(20)), max_tokens=10)
    run.step()
    assert run.scheduler.cache.index.num_available < 12
    run.scheduler.cancel(DOOR, 1)
    assert run.scheduler.cache.index.num_available == 12
    run.step()
    assert [event.finish for event in run.ends[1, 0]] == ["cancelled"]


def test_a_deadline_ends_a_running_and_a_waiting_request() -> None:
    run = Run(limits(max_sequences=1, max_step_tokens=8, request_timeout_s=5.0))
    run.submit(1, [1], max_tokens=30)
    run.submit(2, [2], max_tokens=30)
    run.step()
    run.now = 5.1
    run.step()
    assert [run.ends[key, 0][0].finish for key in (1, 2)] == ["deadline", "deadline"]
    assert run.ends[1, 0][0].code == "CANCELLED" and "1 of 30 tokens" in run.ends[1, 0][0].error
    assert run.scheduler.cache.index.num_available == 12


def test_a_full_queue_is_answered_with_unavailable() -> None:
    run = Run(limits(max_queued_requests=2))  # next to four slots
    run.submit(1, [1], max_tokens=1)
    run.submit(2, [1], [2], [3], max_tokens=1)
    with pytest.raises(
        CapacityError, match="4 sequences are waiting already and the request has 3 more; 2 may"
    ):
        run.submit(3, [1], [2], [3], max_tokens=1)
    run.submit(4, [1], [2], max_tokens=1)
    with pytest.raises(CapacityError, match="max_queued_requests in config.pbtxt"):
        run.submit(5, [1], max_tokens=1)
    run.finish()
    assert set(run.ends) == {(1, 0), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1)}
    assert run.scheduler.num_waiting == 0


def test_each_row_of_a_request_counts_in_the_queue() -> None:
    run = Run(limits(max_queued_requests=8))
    with pytest.raises(RequestError, match="the request has 13 sequences; this model accepts 12"):
        run.submit(1, *[[1]] * 13, max_tokens=1)
    run.submit(2, *[[1]] * 12, max_tokens=1)
    with pytest.raises(CapacityError):
        run.submit(3, [1], max_tokens=1)
    run.finish()
    assert len(run.ends) == 12


def test_requests_that_end_in_the_queue_leave_nothing_there() -> None:
    """A sequence that waits for blocks keeps the others from being taken out at the queue's head."""
    run = Run(limits(num_blocks=1, max_sequence_tokens=4))
    run.submit(1, [1, 2], max_tokens=2)
    run.step()
    run.submit(2, [1], max_tokens=1)
    for request in range(3, 10_003):
        run.submit(request, [1], max_tokens=1)
        run.scheduler.cancel(DOOR, request)
        run.take(run.scheduler.take_events())
        assert run.scheduler.num_waiting == 1
    assert len(run.scheduler.planner.waiting._heap._entries) < 2048
    run.finish()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_queue_is_counted_right_whatever_happens(data: st.DataObject) -> None:
    run = Run(limits(num_blocks=6, max_sequence_tokens=20, max_queued_requests=10))
    for request in range(1, 40):
        what = data.draw(st.sampled_from(["submit", "submit", "cancel", "step"]))
        if what == "submit":
            prompts = [[1] * data.draw(st.integers(1, 6)) for _ in range(data.draw(st.integers(1, 4)))]
            with contextlib.suppress(CapacityError):
                run.submit(request, *prompts, max_tokens=data.draw(st.integers(0, 9)))
        elif what == "cancel":
            run.scheduler.cancel(DOOR, data.draw(st.integers(1, request)))
            run.take(run.scheduler.take_events())
        else:
            run.step()
        waiting = [s for _, s in run.scheduler.planner.waiting._heap._entries if s.stage is Stage.WAITING]
        assert run.scheduler.num_waiting == len(waiting)
    run.finish()


def test_a_stop_word_may_begin_in_the_prompt_and_stays_in_the_output() -> None:
    first, second = expected([1, 2, 3], 2)
    run = Run(limits())
    run.submit(1, [1, 2, 3], max_tokens=10, stop_words=[[40, 41, 42, 43, 44], [3, first, second]])
    run.finish()
    assert run.tokens[1, 0] == [first, second] and run.ends[1, 0][0].finish == "stop_word"


@pytest.mark.parametrize(
    "prompt, params, text",
    [
        ([], {}, "the prompt has no tokens"),
        ([1, VOCAB], {}, f"token id {VOCAB}; this model has ids 0 to {VOCAB - 1}"),
        ([-1], {}, "token id -1"),
        ([1] * 30, {"max_tokens": 11}, "30 tokens and 11 are wanted, 41 together; this model accepts 40"),
        ([1], {"temperature": float("nan")}, "temperature is nan; wanted a number from 0"),
        ([1], {"top_p": 0.0}, "top_p is 0.0; wanted a number in"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ([1], {"bad_words": [[1] * 257]}, "the bad words have 257 tokens; this model accepts 256"),
        ([1], {"stop_words": [[VOCAB]]}, "a stop word has a token id outside"),
        ([1], {"bad_words": [[]]}, "a bad word has no tokens"),
    ],
)
def test_a_wrong_request_is_refused_whole_and_by_name(prompt: list[int], params: dict, text: str) -> None:
    run = Run(limits())
    with pytest.raises(RequestError, match=text):
        run.submit(1, prompt, **params)
    assert not run.scheduler.has_work and not run.scheduler.take_events()
    assert run.scheduler.counters.refused == 1


def test_one_wrong_sequence_refuses_its_request_and_is_named() -> None:
    run = Run(limits())
    with pytest.raises(RequestError, match="sequence 1: the prompt has token id 99"):
        run.submit(1, [1], [99], max_tokens=3)
    assert not run.scheduler.has_work


def test_a_sequence_larger_than_the_cache_is_refused() -> None:
    run = Run(limits(num_blocks=3))
    with pytest.raises(RequestError, match="need 4 cache blocks; the cache has 3"):
        run.submit(1, [1] * 10, max_tokens=6)


def test_a_step_without_memory_fails_its_prompts_only() -> None:
    run = Run(limits())
    run.submit(1, [1, 2], max_tokens=6)
    run.step()
    run.submit(2, [3, 4], max_tokens=6)
    plan = run.scheduler.plan()
    assert plan is not None and plan.num_rows == 2
    run.scheduler.abandon(plan, CapacityError("no memory"))
    run.finish()
    assert run.ends[2, 0][0].finish == "error" and run.ends[2, 0][0].code == "UNAVAILABLE"
    assert run.tokens[1, 0] == expected([1, 2], 6)
