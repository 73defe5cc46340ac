"""Who is named when an epoch ends: ranks whose processes only answer, and a clock of the test's own."""

from __future__ import annotations

import signal

import pytest

from tridecode.backend.supervisor.blame import (
    ASLEEP_S,
    EXIT_GRACE_S,
    LOST_GRACE_S,
    Failure,
    describe_start,
    find_cause,
)
from tridecode.backend.supervisor.digests import DIGEST_GRACE_S, Digests
from tridecode.backend.supervisor.rank import Rank
from tridecode.backend.wire import messages as m

NOW = 1000.0
BROKEN = "the sum over the tensor ranks broke: Connection closed by peer [127.0.0.1]:11137"


class Process:
    """A process whose state the test sets."""

    pid = 4711

    def __init__(self) -> None:
        self.code: int | None = None
        self.letter = "S"

    def poll(self) -> int | None:
        return self.code

    def state(self) -> str:
        return "" if self.code is not None else self.letter

    def kill(self) -> None: ...


class Ranks:
    """Ranks that are ready and well, heard just now."""

    def __init__(self, count: int = 3, ready: bool = True) -> None:
        self.now = NOW
        self.all = [Rank(index, Process(), NOW) for index in range(count)]
        for rank in self.all:
            rank.ready = ready

    def beat(self, index: int, busy_s: float = 0.0, steps: int = 5, waits: str = "", **more) -> None:
        self.all[index].hear(m.EngineBeat(1, index, steps, busy_s, waits=waits, **more), self.now)

    def fail(self, index: int, error: str = BROKEN, cause: str = "peer", exits: bool = True) -> None:
        self.all[index].hear(m.RankFailed(1, index, error, False, cause), self.now)
        if exits:
            self.all[index].process.code = 1

    def after(self, seconds: float, step_timeout_s: float = 60.0) -> str | None:
        """The cause once the seconds have passed in ticks, with beats of all that can."""
        end, cause = self.now + seconds, None
        while cause is None and self.now <= end:
            for rank in self.all:
                if rank.process.code is None and rank.process.letter not in "TD":
                    rank.heard_at = self.now
            cause = find_cause(self.all, self.now, NOW, 900.0, step_timeout_s)
            self.now += 0.1
        return None if cause is None else cause.reason


def test_a_killed_rank_is_named_although_others_reported_its_loss_first():
    ranks = Ranks()
    ranks.fail(0)
    assert ranks.after(1.0) is None
    ranks.fail(2)
    ranks.all[1].process.code = -signal.SIGKILL
    assert ranks.after(0.1) == "rank 1 was killed by signal 9"


def test_a_rank_that_left_without_a_word_is_named_not_those_that_lost_it():
    ranks = Ranks()
    ranks.fail(0)
    ranks.all[1].process.code = 3
    assert ranks.after(EXIT_GRACE_S + 0.2) == "rank 1 ended with exit code 3"


def test_the_fault_of_a_rank_is_named_although_another_reported_its_loss_first():
    ranks = Ranks()
    ranks.fail(0)
    ranks.fail(2, "ValueError: no such layer", cause="self")
    assert ranks.after(0.1) == "rank 2: ValueError: no such layer"


def test_a_stopped_rank_is_named_by_those_that_gave_it_up():
    ranks = Ranks()
    ranks.all[2].process.letter = "T"
    ranks.fail(0)
    assert ranks.after(0.2) == "rank 2 is stopped by a signal; rank 0 lost the connection to it"


def test_a_dying_rank_is_named_while_its_driver_holds_it():
    ranks = Ranks()
    ranks.fail(0)
    ranks.all[1].process.letter = "X"
    assert ranks.after(LOST_GRACE_S + 0.2) is None
    assert ranks.after(2.0) == "rank 1 is ending; rank 0 lost the connection to it"


def test_a_broken_connection_without_a_culprit_is_told_as_it_is():
    ranks = Ranks()
    ranks.fail(0)
    ranks.fail(1, "another text")
    found = ranks.after(2.0)
    assert found == f"ranks 0, 1 lost the connection to another rank: {BROKEN}"


def test_an_abort_after_a_kill_is_not_the_cause():
    """NCCL's watchdog aborts a process whose peer is gone."""
    ranks = Ranks()
    ranks.all[0].process.code = -signal.SIGABRT
    assert ranks.after(0.5) is None
    ranks.all[2].process.code = -signal.SIGSEGV
    assert ranks.after(0.1) == "rank 2 was killed by signal 11 (segmentation fault)"
    alone = Ranks(1)
    alone.all[0].process.code = -signal.SIGABRT
    assert alone.after(0.1) == "rank 0 was killed by signal 6 (abort)"
    ranks = Ranks()
    ranks.all[1].process.code = -signal.SIGABRT
    assert ranks.after(2.0) == "rank 1 was killed by signal 6 (abort)"


def test_of_silent_ranks_the_stopped_one_is_named():
    """The other one is silent because it waits for it with its interpreter held."""
    ranks = Ranks()
    ranks.all[0].heard_at = NOW - 1.0
    ranks.all[0].process.letter = "D"
    ranks.all[2].process.letter = "T"
    found = ranks.after(4.0)
    assert found == "rank 0 has been silent for 3.0 s (waiting for the disk or a driver)"
    ranks = Ranks()
    ranks.all[0].heard_at = ranks.all[2].heard_at = NOW - 3.0
    ranks.all[0].process.letter, ranks.all[2].process.letter = "D", "T"
    assert ranks.after(0.1) == "rank 2 has been silent for 3.0 s (stopped by a signal)"


def test_a_stuck_step_is_the_fault_of_the_rank_that_does_not_wait():
    ranks = Ranks()
    for index, waits in enumerate(["the sum over the tensor ranks", "", "the sum over the tensor ranks"]):
        ranks.beat(index, 61.0, waits=waits)
    wanted = "rank 1 has been in one step for 61 s; step_timeout_s is 60; "
    assert ranks.after(0.1) == wanted + "ranks 0, 2 wait in the sum over the tensor ranks"


def test_a_stuck_step_is_the_fault_of_the_rank_that_is_behind():
    ranks = Ranks()
    for index, steps in enumerate([9, 9, 8]):
        ranks.beat(index, 61.0, steps)
    assert ranks.after(0.1) == "rank 2 has been in one step for 61 s; step_timeout_s is 60"


def test_a_short_step_timeout_names_the_stopped_rank_before_its_silence_would():
    ranks = Ranks()
    ranks.beat(0, 1.2, waits="the sum over the tensor ranks")
    ranks.all[1].process.letter, ranks.all[1].heard_at = "T", NOW - 1.2
    found = ranks.after(0.1, step_timeout_s=1.0)
    assert found is not None and found.startswith("rank 1 has been silent for 1.2 s (stopped by a signal)")
    assert found.endswith("rank 0 waits in the sum over the tensor ranks")


ASLEEP = {"asleep_s": ASLEEP_S + 0.1, "asleep_in": "lock.py line 7 (acquire)"}


def test_a_rank_that_sleeps_in_a_step_is_named_before_the_step_s_limit():
    ranks = Ranks()
    for index in (0, 2):
        ranks.beat(index, 3.0, waits="the sum over the tensor ranks")
    ranks.beat(1, 3.0, asleep_s=ASLEEP_S - 0.1)
    assert ranks.after(0.2) is None
    ranks.beat(1, 3.0, **ASLEEP)
    assert ranks.after(0.1) == (
        "rank 1 has been asleep in a step for 2.6 s, in lock.py line 7 (acquire), and waits for no other "
        "rank nor its GPU; ranks 0, 2 wait in the sum over the tensor ranks"
    )


def test_a_loop_that_sleeps_between_steps_is_named():
    alone = Ranks(1)
    alone.beat(0, 0.0, **ASLEEP)
    found = alone.after(0.1)
    assert found is not None and found.startswith(
        "rank 0 has been asleep in its loop between two steps for 2.6 s"
    )


def test_no_rank_is_asleep_while_another_one_computes():
    ranks = Ranks()
    ranks.beat(0, 3.0, waits="the sum over the tensor ranks")
    ranks.beat(1, 3.0, **ASLEEP)
    ranks.beat(2, 3.0)
    assert ranks.after(1.0) is None


def test_a_start_in_an_exchange_says_which_and_what_the_others_do():
    ranks = Ranks(ready=False)
    for index, waits in enumerate(["the sum over the tensor ranks", "", "the sum over the tensor ranks"]):
        ranks.all[index].hear(m.RankProgress(1, index, "the warm-up, step 2 of 3"), NOW)
        ranks.beat(index, waits=waits)
    wanted = "ranks 0, 2 wait in the sum over the tensor ranks ('the warm-up, step 2 of 3'); rank 1 is "
    assert describe_start(ranks.all, NOW) == wanted + "'the warm-up, step 2 of 3'"
    ranks.beat(1, waits="the synchronisation with its GPU")
    assert describe_start(ranks.all, NOW).endswith(
        "; rank 1 waits in the synchronisation with its GPU ('the warm-up, step 2 of 3')"
    )


def test_a_start_that_takes_too_long_says_who_waits_for_whom_and_what_that_one_does():
    ranks = Ranks(ready=False)
    for index in (0, 1):
        ranks.all[index].hear(m.RankProgress(1, index, "joining", [2]), NOW + 900)
    ranks.all[2].hear(m.RankProgress(1, 2, "loading weights: model.layers.2 (40 %)"), NOW + 888)
    ranks.all[2].process.letter = "T"
    wanted = "ranks 0, 1 wait in 'joining' for rank 2, which is 'loading weights: model.layers.2 (40 %)' and "
    assert describe_start(ranks.all, NOW + 900) == wanted + "has been silent for 12 s (stopped by a signal)"
    ranks.all[2].process.letter, ranks.all[2].heard_at = "S", NOW + 900
    ranks.now = NOW + 899.95
    cause = find_cause(ranks.all, NOW + 900, NOW, 900.0, 60.0)
    assert cause is not None
    assert cause.reason == f"not ready after 900 s (start_timeout_s): {wanted.removesuffix(' and ')}"


def test_a_start_in_which_nobody_says_whom_he_waits_for_lists_what_all_do():
    ranks = Ranks(2, ready=False)
    ranks.all[1].ready = True
    found = describe_start(ranks.all, NOW)
    assert found == "rank 0 is 'starting python'; rank 1 is ready"


OUTVOTED = "rank 2 sampled other tokens than ranks 0, 1 within 4 steps: digest 00000009, wanted 00000007"
DIVIDED = (
    "rank 1 and rank 0 disagree: they sampled other tokens within 4 steps, digests 00000009 and 00000007"
)


@pytest.mark.parametrize(("tokens", "wanted"), [([7, 7, 9], OUTVOTED), ([7, 9], DIVIDED)])
def test_other_tokens_are_found_once_ranks_have_done_as_many_steps(tokens, wanted):
    digests = Digests()
    for rank in range(len(tokens)):
        digests.hear(m.RankDigest(1, rank, 3, 5))
        digests.hear(m.RankDigest(1, rank, 10 + rank, rank))  # after other steps: no matter
    assert digests.cause(NOW) is None
    for rank, value in reversed(list(enumerate(tokens))):
        digests.hear(m.RankDigest(1, rank, 4, value))
    assert digests.cause(NOW) is None, "others may still say with whom they agree"
    assert digests.cause(NOW + DIGEST_GRACE_S) == Failure(wanted)


def test_the_state_is_compared_within_a_stage():
    digests = Digests()
    for rank in range(4):
        digests.hear(m.RankDigest(1, rank, 256, 5, stage=rank // 2, state=rank // 2))
    assert digests.cause(NOW) is None
    digests.hear(m.RankDigest(1, 2, 512, 5, stage=1, state=8))
    digests.hear(m.RankDigest(1, 3, 512, 5, stage=1, state=9))
    digests.cause(NOW)
    found = digests.cause(NOW + 2.0)
    assert found is not None and "rank 2 and rank 3 disagree" in found.reason
