"""The schedule of accidents of single ranks: each kind, in each phase of an engine of several ranks.

    python -m tests.reliability.rank_faults --degree 2x1 --only step:kill --only joining

Each accident happens in the real engine process, on the CPU, in one rank chosen by the schedule. Measured is
the time until the supervisor has named a rank, whether it is the right one, that open requests end with that
cause, and that the next engine gives the tokens of the first.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.rank_service import ADAPTER, Answer, RankService, write_model
from tests.reliability.report import table
from tests.waiting import wait_until
from tridecode.backend.engine.ranks.agreement import CHECK_STEPS
from tridecode.backend.supervisor import processes

NAMED_S = 5.0  # promised: a rank that dies, is stopped or disagrees is named within this time
SLACK_S = 0.5
PROMPT = [5, 7, 9]
TOKENS = 40
STARTING = ("python", "joining", "verify", "loading", "cache")
SERVING = ("idle", "plan", "step", "adapter")
COPYING = ("copy-out", "copy-in")
#: tokens for engines that copy: several full blocks
LONG_PROMPT, COPY_SETTINGS = PROMPT * 14, {"host_cache_bytes": 8 << 20, "block_tokens": 8}
#: kind of accident -> name of the culprit
WORDS = {
    "kill": r"rank {rank} was killed by signal 9",
    "stop": r"rank {rank} (has been silent for [\d.]+ s \(stopped by a signal\)|is stopped by a signal)",
    "fail": r"rank {rank}: ValueError: an accident of this test",
    "leave": r"rank {rank} ended with exit code 3",
    "hang": r"rank {rank} has been asleep in a step for [\d.]+ s, in faulty_rank\.py line \d+ \(_hang\)",
    "spin": r"rank {rank} has been in one step for",
    "torch": r"the ranks disagree: torch is another on rank {rank}",
    "flip": r"rank \d sampled other tokens|rank \d and rank \d disagree",
}


@dataclass(frozen=True)
class Accident:
    """rank: that has it. point, kind: of faulty_rank.py; "idle" and "stop" strike from outside."""

    rank: int
    point: str
    kind: str

    def __str__(self) -> str:
        return f"{self.point}:{self.kind}:rank{self.rank}"


@dataclass
class Row:
    """named_s: from the accident until the epoch's end was seen. back_s: from then until the next engine was
    ready."""

    degree: str
    accident: str
    named_s: float = 0.0
    cause: str = ""
    requests: str = ""
    back_s: float = 0.0
    complaint: str = ""


HEADS = ["ranks", "accident", "named s", "cause", "open requests", "back s", "verdict"]


def cells(row: Row) -> list[str]:
    verdict = f"FAIL: {row.complaint}" if row.complaint else "ok"
    return [
        row.degree,
        row.accident,
        f"{row.named_s:.2f}",
        row.cause,
        row.requests,
        f"{row.back_s:.1f}",
        verdict,
    ]


def schedule(tensor: int, stages: int) -> list[Accident]:
    """Rank 0 and the last one, turn about; of four ranks also those between."""
    found, world = [], tensor * stages
    for number, point in enumerate([*STARTING, *SERVING]):
        for kind in ("kill", "stop"):
            rank = (world - 1) * (number % 2 == (kind == "kill"))
            found.append(Accident(rank, point, kind))
    last = world - 1
    found += [Accident(rank, point, "kill") for point in COPYING for rank in (0, last)]
    found += [
        Accident(0, "step", "stop"),
        Accident(last, "step", "fail"),
        Accident(last, "step", "leave"),
        Accident(last, "step", "hang"),
        Accident(last, "step", "spin"),
        Accident(last, "adapter", "fail"),
        Accident(last, "loading", "leave"),
        Accident(last, "disagree", "torch"),
        Accident(last, "end", "stop"),
        Accident(0, "end", "kill"),
    ]
    if tensor > 1:  # else no other rank holds the same state
        found.append(Accident(last, "disagree", "flip"))
    if world > 2:
        found += [Accident(1, "step", "stop"), Accident(2, "step", "kill")]
    return list(dict.fromkeys(found))


class Strikes:
    """Results of the accidents, one row each, and the checks that all accidents share."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.tokens: list[int] = []  # of the first answer of any engine

    def check_ends(self, answers: Sequence[Answer], cause: str, row: Row) -> None:
        for answer in answers:
            if not answer.done.wait(2.0):
                row.complaint = "an open request has not ended"
            elif answer.ends != 1:
                row.complaint = f"a request ended {answer.ends} times"
            elif answer.finish == "error" and cause not in answer.error:
                row.complaint = f"a request ended with {answer.error!r}"
        row.requests = ", ".join(sorted({answer.finish or "open" for answer in answers})) or "none"

    def check_answer(self, service: RankService, row: Row) -> None:
        answer = service.submit(PROMPT, 8)
        assert answer.done.wait(60) and not answer.error, f"no answer: {answer.error}"
        self.tokens = self.tokens or answer.tokens
        if answer.tokens != self.tokens:
            row.complaint = f"tokens {answer.tokens}, wanted {self.tokens}"

    def table(self) -> str:
        return table(HEADS, [cells(row) for row in self.rows])


class RankRange(Strikes):
    """Strikes one accident after the other, each at an engine of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        _, self.weights, self._adapters = write_model(folder)

    def strike(self, tensor: int, stages: int, accident: Accident, **settings: object) -> Row:
        row = Row(f"tp {tensor} x pp {stages}", str(accident))
        self.rows.append(row)
        if accident.kind == "spin":  # no sign but its duration
            settings["step_timeout_s"] = 2
        if accident.point in COPYING:
            settings = {**COPY_SETTINGS, **settings}
        service = RankService(self.weights, tensor, stages, self._adapters, **settings)
        try:
            self._strike(service, accident, row)
        except AssertionError as error:
            row.complaint = row.complaint or str(error)[:300]
        finally:
            service.close()
        return row

    def _strike(self, service: RankService, accident: Accident, row: Row) -> None:
        outside = accident.point == "idle"
        service.start("" if outside else f"{accident.rank}:{accident.point}:{accident.kind}")
        if accident.point == "end":
            return self._strike_at_the_end(service, accident, row)
        if accident.point in COPYING:
            return self._strike_while_copying(service, accident, row)
        answers: list[Answer] = []
        if accident.point in SERVING or accident.kind == "flip":
            service.wait("ready")
            if outside:
                self.check_answer(service, row)
                struck = time.monotonic()
                os.kill(
                    service.pids()[accident.rank],
                    signal.SIGKILL if accident.kind == "kill" else signal.SIGSTOP,
                )
            else:
                adapter = ADAPTER if accident.point == "adapter" else ""
                began = time.monotonic()
                answers = [service.submit(PROMPT, TOKENS, adapter) for _ in range(2)]
                while accident.kind == "flip" and len(answers) < 2 * CHECK_STEPS // TOKENS + 4:
                    if not answers[-1].done.wait(5) or answers[-1].error:
                        break  # found: by the digest of the state, which is taken once in CHECK_STEPS
                    answers.append(service.submit(PROMPT, TOKENS))
        if not outside:
            struck = began if accident.kind == "flip" else service.struck_at()
        limit = NAMED_S + SLACK_S + (2.0 if accident.kind == "spin" else 0.0)
        if accident.kind == "torch":
            limit += 20  # the others are still starting python
        at, state = service.wait("down", "failed", timeout_s=limit + 20)
        row.named_s, row.cause = at - struck, state.detail
        if row.named_s > limit:
            row.complaint = f"named after {row.named_s:.1f} s"
        if not re.match(WORDS[accident.kind].format(rank=accident.rank), state.detail):
            row.complaint = "another is named"
        self.check_ends(answers, state.detail, row)
        if state.phase == "failed":  # for as long as the settings stay
            service.configure(max_sequences=5)
        back, _ = service.wait("ready", epoch=state.epoch + 1)
        row.back_s = back - at
        self.check_answer(service, row)

    def _strike_while_copying(self, service: RankService, accident: Accident, row: Row) -> None:
        """Kill a rank in the middle of a copy. The next engine finds only whole blocks and gives the same
        tokens.

        Copies from the tier occur in the second engine, after the first one was killed between steps.
        """

        def ask() -> list[int]:
            answer = service.submit(LONG_PROMPT, 8)
            assert answer.done.wait(20) and not answer.error, f"no answer: {answer.error}"
            return answer.tokens

        service.wait("ready")
        wanted, epoch = ask(), 1
        if accident.point == "copy-in":
            wait_until(lambda: self._blocks_in_tier(service) >= len(LONG_PROMPT) // 8, what="copies out")
            os.kill(service.pids()[0], signal.SIGKILL)
            service.wait("ready", epoch=2)
            answers, epoch = [service.submit(LONG_PROMPT, 8)], 2
        else:
            answers = []
        struck = service.struck_at()
        at, state = service.wait("down", epoch=epoch)
        row.named_s, row.cause = at - struck, state.detail
        if row.named_s > NAMED_S + SLACK_S:
            row.complaint = f"named after {row.named_s:.1f} s"
        if not re.match(WORDS[accident.kind].format(rank=accident.rank), state.detail):
            row.complaint = "another is named"
        self.check_ends(answers, state.detail, row)
        back, _ = service.wait("ready", epoch=epoch + 1)
        row.back_s = back - at
        if ask() != wanted or ask() != wanted:
            row.complaint = "other tokens after it"
        time.sleep(1.5)  # a heartbeat later
        metrics = service.metrics()
        if metrics["host_faults"]:
            row.complaint = "a block that was half written is found"
        if accident.point == "copy-in" and not metrics['cached_prompt_tokens{tier="host"}']:
            row.complaint = "no block came from the host tier"

    @staticmethod
    def _blocks_in_tier(service: RankService) -> float:
        beat = service.link.beat() if service.link is not None else None  # None before the first heartbeat
        return 0 if beat is None else beat.metrics.get('host_blocks{state="cached"}', 0)

    def _strike_at_the_end(self, service: RankService, accident: Accident, row: Row) -> None:
        """The supervisor is asked to end; it does, with all ranks, although one of them cannot."""
        service.wait("ready")
        self.check_answer(service, row)
        supervisor, began = service.supervisor(), time.monotonic()
        os.kill(supervisor, signal.SIGTERM)
        service.struck_at(5)
        while service.pids() or processes.state(supervisor) not in ("", "Z"):
            assert time.monotonic() - began < NAMED_S + SLACK_S, f"still there: {service.pids()}"
            time.sleep(0.02)
        row.named_s, row.cause, row.requests = time.monotonic() - began, "the engine has ended", "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--degree", action="append", default=[], help="TENSORxSTAGES, e.g. 2x1")
    parser.add_argument("--only", action="append", default=[], help="accidents that begin so, e.g. step:kill")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    degrees = [tuple(map(int, text.split("x"))) for text in arguments.degree or ["2x1", "1x2", "2x2"]]
    with tempfile.TemporaryDirectory(prefix="tdrankfaults") as folder:
        strikes = None if arguments.list else RankRange(Path(folder))
        for tensor, stages in degrees:
            for accident in schedule(tensor, stages):
                name = str(accident)
                if arguments.only and not any(name.startswith(only) for only in arguments.only):
                    continue
                if strikes is None:
                    print(f"tp {tensor} x pp {stages} {name}")
                else:
                    print(" | ".join(cells(strikes.strike(tensor, stages, accident))), flush=True)
        if strikes is None:
            return 0
        print(strikes.table())
        return 1 if any(row.complaint for row in strikes.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
