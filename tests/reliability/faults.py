"""The schedule of kills, freezes, pauses, lost files and full disks, under many streams.

    python -m tests.reliability.faults --list
    python -m tests.reliability.faults --seed 3 --only kill:rank0 --only pause:all:12

Each fault happens at a time that follows from the seed, while every stream is open. Row has the measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tests.reliability.report import table
from tests.reliability.service import CHECKER_WORKER, DOORS, Service, build_repository, end_on_sigterm
from tests.reliability.traffic import CODES, Clients, Crowd, Sent, clean, controls, mixture
from tests.reliability.watch import PROBE_BODIES, Watch

BOUND_S = 5.0  # promised: every request ends, and health is correct, within this time
SLACK_S = 0.5  # measurement error on a machine that is busy with the test itself
RECOVER_S = 60.0  # a server that has not recovered after this time never will
CALM_S = 15.0  # time limit of requests that are open when the test ends
RESTARTED = "tensorrt_llm_bls_plain"  # the door that is killed after a deletion
MAX_USUAL_S = 3.0
#: Triton's own texts for a model whose process has died, and for one between unload and load
RELOADING = ("is not healthy", "has no available versions")
STARTS = 5  # killed starts in a row
#: doors that take no request, since they answer inside execute()
DYING_BODIES = {
    "tridecode_health": b'{"inputs": []}',
    "postprocessing": json.dumps(
        {"inputs": [{"name": "TOKENS_BATCH", "datatype": "UINT32", "shape": [1, 1, 1], "data": [5]}]}
    ).encode(),
}
DISK_BYTES = 1 << 20


@dataclass
class Row:
    """The effects of one fault.

    open: requests in flight when it happened. begun: those of them that had got a response; whole: those of
    `begun` that ended with the answer of an undisturbed run. ends_s: longest time without a response of one
    of them, or of a later one. lost: requests that the client gave up. health_s: longest time for which
    health contradicted the probes. back_s: until a new request and the controls were answered. usual_s:
    longest time without a response before the fault. late_s: scheduling delay of a thread that only sleeps.
    The limits grow by late_s and, up to MAX_USUAL_S, by usual_s.
    """

    fault: str
    open: int = 0
    begun: int = 0
    whole: int = 0
    answers: int = 0
    errors: int = 0
    lost: int = 0
    known_lost: int = 0
    ends_s: float = 0.0
    health_s: float = 0.0
    back_s: float = 0.0
    usual_s: float = 0.0
    late_s: float = 0.0
    controls: str = ""
    left: str = ""
    complaints: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def verdict(self) -> str:
        if self.skipped:
            return "skipped: " + self.skipped
        if self.complaints:
            return "FAIL"
        return "ok, client's own time limit" if self.known_lost else "ok"

    @property
    def good(self) -> bool:
        return not self.complaints


HEADS = [
    "fault",
    "open",
    "whole",
    "answers",
    "errors",
    "lost",
    "silent s",
    "health s",
    "back s",
    "usual s",
    "late s",
]
HEADS += ["controls", "left", "verdict"]


def cells(row: Row) -> list[str]:
    lost = f"{row.lost}" + (f" (+{row.known_lost} known)" if row.known_lost else "")
    numbers = [
        f"{row.ends_s:.1f}",
        f"{row.health_s:.1f}",
        f"{row.back_s:.1f}",
        f"{row.usual_s:.1f}",
        f"{row.late_s:.1f}",
    ]
    counts = [str(row.open), f"{row.whole} of {row.begun}", str(row.answers), str(row.errors), lost]
    return [row.fault, *counts, *numbers, row.controls, row.left or "nothing", row.verdict]


@dataclass(frozen=True)
class Fault:
    """strike(service): causes the fault, and returns a function that ends it after `pause_s`, or None.

    ends_server: the server may end, leaving nothing, and is started again as a platform would. limit_known:
    the door whose open requests Triton never ends when its stub dies; "all": of every door. door: the target
    of the probes. on_disk: the runtime folder is on a small file system of its own. unbroken: the engine dies
    once: a request that had begun pauses until the next one is ready, and ends with an undisturbed answer.
    rebuilds: the engine dies, perhaps more than once, so requests may be silent until it is back.
    """

    name: str
    strike: Callable[[Service], Callable[[], None] | None]
    pause_s: float = 0.0
    ends_server: bool = False
    limit_known: str = ""
    door: str = "fastertransformer"
    on_disk: bool = False
    for_good: bool = False
    unbroken: bool = False
    rebuilds: bool = False


# ---------------------------------------------------------------- kinds of faults


def signal_to(role: str, signum: int) -> Callable[[Service], None]:
    """Send a signal to one process."""

    def strike(service: Service) -> None:
        service.roles()[role].send_signal(signum)

    return strike


def pause(role: str) -> Callable[[Service], Callable[[], None]]:
    """Stop one process, or "all"; returns a function that continues it."""

    def strike(service: Service) -> Callable[[], None]:
        roles = service.roles()
        chosen = list(roles.values()) if role == "all" else [roles[role]]
        for process in chosen:
            process.suspend()

        def resume() -> None:
            for process in chosen:
                with contextlib.suppress(psutil.Error):
                    process.resume()

        return resume

    return strike


def _slow(role: str) -> Callable[[Service], Callable[[], None]]:
    """Let one process run for a third of the time only; returns a function that ends that."""

    def strike(service: Service) -> Callable[[], None]:
        process, ended = service.roles()[role], threading.Event()

        def hinder() -> None:
            with contextlib.suppress(psutil.Error):
                while not ended.wait(0.1):
                    process.suspend()
                    ended.wait(0.2)
                    process.resume()

        thread = threading.Thread(target=hinder, daemon=True)
        thread.start()

        def leave() -> None:
            ended.set()
            thread.join()

        return leave

    return strike


def _kill_together(*roles: str) -> Callable[[Service], None]:
    def strike(service: Service) -> None:
        found = service.roles()
        for role in roles:
            found[role].kill()

    return strike


def _ask_a_dying_door(model: str) -> Callable[[Service], None]:
    """Kill a door that has taken nothing, and send it requests until it is loaded again: Triton answers them.

    No stream of another door may end, so tritonserver stays the same process.
    """

    def strike(service: Service) -> None:
        triton, stub = service.roles()["tritonserver"], service.roles()[f"door:{model}"]
        log = len(service.log())
        stub.kill()
        asked, deadline = 0, time.monotonic() + 10
        while f"door {model} is back" not in service.log()[log:] and time.monotonic() < deadline:
            with contextlib.suppress(OSError), contextlib.closing(_connection(service)) as connection:
                connection.request("POST", f"/v2/models/{model}/infer", DYING_BODIES[model])
                connection.getresponse().read()
                asked += 1
        assert asked, f"no request reached {model}"
        time.sleep(BOUND_S + 1)
        assert service.roles().get("tritonserver") == triton, "tritonserver was started again"

    return strike


def _connection(service: Service) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(service.server.http_url, timeout=BOUND_S)


def _delete(pattern: str) -> Callable[[Service], None]:
    """Remove what matches in the run folder; "" for the folder of this server with all that is in it."""

    def strike(service: Service) -> None:
        found = list(service.run_dir.glob(pattern)) if pattern else list(service.run_dir.glob("serve-*"))
        assert found, f"nothing matches {pattern} in {sorted(service.run_dir.rglob('*'))}"
        for path in found:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    return strike


def _then_kill_a_door(delete: Callable[[Service], None]) -> Callable[[Service], None]:
    """A door that is started again has to find the deleted file again."""

    def strike(service: Service) -> None:
        delete(service)
        service.roles()[f"door:{RESTARTED}"].kill()

    return strike


def _delete_engine_folder(service: Service) -> None:
    folders = service.engine_folders()
    assert folders
    for folder in folders:
        shutil.rmtree(folder)


def _fill_disk(service: Service) -> Callable[[], None]:
    """Write zeros until the file system of the run folder is full, then kill the engine: it has to come back
    on a full disk."""
    path = service.run_dir / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0")
    return path.unlink


def _kill_starts(service: Service) -> None:
    """Kill rank 0, and each rank 0 that comes after it, STARTS times in all."""
    last, killed = -1, 0
    deadline = time.monotonic() + 90
    while killed < STARTS and time.monotonic() < deadline:
        rank = service.roles().get("rank0")
        if rank is not None and rank.pid != last:
            last, killed = rank.pid, killed + 1
            with contextlib.suppress(psutil.Error):
                rank.kill()
        time.sleep(0.05)
    assert killed == STARTS, f"the engine was started {killed} times; it was killed each time"


def _kill_the_checker(role: str) -> Callable[[Service], None]:
    """Kill a process that compiles grammars; an answer in a form that no request had before follows."""

    def strike(service: Service) -> None:
        found = [process for name, process in service.roles().items() if name.startswith(role)]
        assert found, f"no process is a {role}"
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        form = f"[ab]{{4}}{found[0].pid}"
        body = {"text_input": "a b", "max_tokens": 64, "exclude_input_in_output": True}
        body.update(guided_decoding_guide_type="regex", guided_decoding_guide=form)
        with contextlib.closing(_connection(service)) as connection:
            path = f"/v2/models/{RESTARTED}/generate"
            connection.request("POST", path, json.dumps(body))
            answer = json.loads(connection.getresponse().read())
        assert re.fullmatch(form, answer.get("text_output", "")), answer

    return strike


def _vanishing_clients(service: Service) -> Callable[[], None]:
    """A second crowd in a process of its own, which is killed."""
    command = [sys.executable, "-m", "tests.reliability.traffic", "--streams", "40", "--seed", "5"]
    command += ["--grpc", service.grpc, "--http", service.server.http_url]
    crowd = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert crowd.stdout is not None
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and "40" not in crowd.stdout.readline().split():
        pass
    time.sleep(1.0)
    crowd.kill()
    crowd.wait()
    return lambda: None


def schedule(ranks: int = 1) -> list[Fault]:
    """Every fault that there is."""
    doors = [f"door:{name}" for name in DOORS]
    engine_doors = {"door:fastertransformer", "door:fastertransformer_streaming"}
    engine_doors |= {"door:tensorrt_llm_bls", "door:tensorrt_llm_bls_plain"}
    rank_roles = [f"rank{rank}" for rank in range(ranks)]
    roles = ["serve", "guard", "tritonserver", *doors, "supervisor", *rank_roles]
    faults = []
    for role in roles:
        model = role.partition(":")[2]
        options: dict = {"limit_known": model} if role in engine_doors else {}
        if model in PROBE_BODIES:
            options["door"] = model
        ends = role in ("serve", "guard", "tritonserver")
        if role == "supervisor" or role in rank_roles:
            options.update(rebuilds=True, unbroken=True)
        faults.append(Fault(f"kill:{role}", signal_to(role, signal.SIGKILL), ends_server=ends, **options))
        faults.append(
            Fault(
                f"freeze:{role}",
                signal_to(role, signal.SIGSTOP),
                for_good=True,
                ends_server=role == "tritonserver",
                **options,
            )
        )
        options["unbroken"] = False  # a pause ends the engine, or does not
        for seconds in (1, 6, 12):
            faults.append(
                Fault(
                    f"pause:{role}:{seconds}",
                    pause(role),
                    seconds,
                    ends_server=role == "tritonserver" or model in DOORS,
                    **options,
                )
            )
    faults += [Fault(f"slow:{role}", _slow(role), 6, rebuilds=True) for role in rank_roles]
    faults += [Fault(f"pause:all:{seconds}", pause("all"), seconds) for seconds in (6, 12, 60)]
    faults += [
        Fault("delete:engine-socket", _delete("*/*/engine-*.sock")),
        Fault("delete:control-socket", _delete("*/*/control.sock")),
        Fault("delete:engine-folder", _delete_engine_folder),
        Fault("delete:serve-folder", _delete("")),
        *_deleted_before_a_door_starts(),
        Fault("fill:disk", _fill_disk, 8.0, on_disk=True),
        Fault("fill:disk+kill:rank0", _fill_and_kill, 20.0, on_disk=True, rebuilds=True, unbroken=True),
        Fault("kill:starts", _kill_starts, rebuilds=True),
        Fault("stop:supervisor", signal_to("supervisor", signal.SIGTERM), rebuilds=True, unbroken=True),
        Fault("kill:serve+guard", _kill_together("serve", "guard"), ends_server=True),
        *(Fault(f"ask:dying:{model}", _ask_a_dying_door(model)) for model in DYING_BODIES),
        Fault("vanish:clients", _vanishing_clients),
        Fault("kill:checker", _kill_the_checker("checker")),
        Fault("kill:checker-worker", _kill_the_checker(CHECKER_WORKER)),
    ]
    return faults


def _deleted_before_a_door_starts() -> list[Fault]:
    deletes = {
        "engine-socket": _delete("*/*/engine-*.sock"),
        "control-socket": _delete("*/*/control.sock"),
        "engine-folder": _delete_engine_folder,
    }
    return [
        Fault(f"delete:{name}+kill:door", _then_kill_a_door(delete), limit_known=RESTARTED, door=RESTARTED)
        for name, delete in deletes.items()
    ]


def _fill_and_kill(service: Service) -> Callable[[], None]:
    undo = _fill_disk(service)
    service.roles()["rank0"].kill()
    return undo


def by_name(names: Sequence[str], ranks: int = 1) -> list[Fault]:
    known = {fault.name: fault for fault in schedule(ranks)}
    return [known[name] for name in names]


# ---------------------------------------------------------------- striking


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of DISK_BYTES. OSError where this user may not mount one."""
    folder = Path(tempfile.mkdtemp(prefix="tddisk"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip() or "mount failed")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=False)
    finally:
        folder.rmdir()


class Range:
    """Strikes one fault after the other at one server, and a new server where the last one is gone."""

    def __init__(
        self, repository: Path, seed: int, streams: int = 80, mix: int = 12, tokens: int = 96
    ) -> None:
        self.repository, self.seed, self.streams = repository, seed, streams
        self.asks = mixture(seed, mix, 48, tokens)
        self.answers: dict[str, str] = {}
        self.reference: dict[str, str] = {}
        self.service: Service | None = None
        self.clients: Clients | None = None
        self.rows: list[Row] = []
        self.last_log = ""  # of the server of the last row that failed

    def strike(self, fault: Fault) -> Row:
        """One row; OSError and AssertionError of the harness are complaints of it."""
        row = Row(fault.name)
        self.rows.append(row)
        try:
            if fault.on_disk:
                self._drop()
                try:
                    with small_disk() as folder:
                        self._start(folder)
                        self._strike(fault, row)
                        row.left = self.stop()
                        if row.left:
                            row.complaints.append(f"left behind: {row.left}")
                except OSError as error:
                    row.skipped = f"no small file system: {error}"
            else:
                self._start()
                self._strike(fault, row)
                if fault.for_good:
                    row.left = self.stop()
                    if row.left:
                        row.complaints.append(f"left behind: {row.left}")
        except (AssertionError, KeyError, psutil.Error) as error:
            row.complaints.append(f"{type(error).__name__}: {error}")
        if row.complaints:
            self.last_log = self.service.log() if self.service is not None else ""
            self._drop()
        return row

    def _start(self, run_dir: Path | None = None) -> None:
        if self.service is not None and not self.service.ended():
            return
        self._drop()
        self.service = Service(self.repository, run_dir)
        self._connect()
        assert self.clients is not None
        self.answers = self.answers or self.clients.digests(self.asks)
        reference = self.clients.digests(controls())
        self.reference = self.reference or reference
        assert reference == self.reference, "a new server answers the controls otherwise"

    def _connect(self) -> None:
        assert self.service is not None
        if self.clients is not None:
            self.clients.close()
        self.clients = Clients(self.service.grpc, self.service.http)

    def _strike(self, fault: Fault, row: Row) -> None:
        assert self.service is not None and self.clients is not None
        draw = random.Random(f"{self.seed} {fault.name}")
        watch = Watch(self.service.server.http_url, fault.door)
        crowd = Crowd(self.clients, self.asks, self.streams, self.seed, self.answers)
        restarted = False
        try:
            self._wait_open(crowd)
            time.sleep(draw.uniform(0.0, 2.0))
            struck = time.monotonic()
            row.usual_s = _usual_silence(crowd, struck)
            engine = self.service.pids().get("rank0", 0)
            undo = fault.strike(self.service)
            if undo is not None:
                time.sleep(fault.pause_s)
                undo()
                if fault.name.startswith(("pause", "slow", "vanish")):
                    struck = time.monotonic()
            elif fault.name == "kill:starts":
                struck = time.monotonic()
            all_sent = [*crowd.open.values(), *crowd.sent]
            under_way = {id(sent.outcome) for sent in all_sent if _open_at(sent, struck)}
            begun = {id(sent.outcome) for sent in all_sent if sent.outcome.progress} & under_way
            settle = self._next_engine(engine) if fault.unbroken else struck
            back, restarted = self._wait_back(fault, watch, settle, row, crowd)
            if not restarted and back is not None:
                time.sleep(2.0)  # health and the streams are looked at a little longer
        finally:
            ended = time.monotonic()
            crowd.stop(CALM_S)
            watch.close()
        row.back_s = (back or ended) - struck
        row.late_s = watch.lateness(struck, ended)
        self._judge_requests(fault, row, crowd, struck, under_way)
        self._judge_begun(fault, row, crowd, begun)
        if not restarted:
            row.health_s, way = watch.disagreement(struck, ended)
            if row.health_s > BOUND_S + SLACK_S + row.late_s + min(row.usual_s, MAX_USUAL_S):
                row.complaints.append(f"health {way} for {row.health_s:.1f} s")
        if back is None:
            row.complaints.append(f"not back after {RECOVER_S:g} s")
            return
        self._check_controls(row)

    def _wait_open(self, crowd: Crowd) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            begun = sum(bool(sent.outcome.progress) for sent in list(crowd.open.values())) + len(crowd.sent)
            if begun >= self.streams // 2 and crowd.open_now() > self.streams // 2:
                return
            time.sleep(0.05)
        raise AssertionError(f"the streams did not open: {crowd.open_now()} open, {len(crowd.sent)} sent")

    def _next_engine(self, before: int) -> float:
        """Wait until rank 0 is a process other than `before`, or RECOVER_S; return the time."""
        deadline = time.monotonic() + RECOVER_S
        assert self.service is not None
        while self.service.pids().get("rank0", before) == before and time.monotonic() < deadline:
            time.sleep(0.1)
        return time.monotonic()

    def _wait_back(
        self, fault: Fault, watch: Watch, settle: float, row: Row, crowd: Crowd
    ) -> tuple[float | None, bool]:
        """When a probe sent a second after `settle` was answered with health true; and whether a new server
        had to be started."""
        deadline = time.monotonic() + RECOVER_S
        settle += 1.0  # a fault takes a moment to be felt: the first answers may be older
        while time.monotonic() < deadline:
            assert self.service is not None
            if self.service.ended():
                crowd.stop(BOUND_S + SLACK_S)
                return self._restart(fault, row), True
            back = watch.answers_since(settle)
            if back is not None and watch.healthy_now():
                if fault.name in ("kill:serve", "kill:serve+guard"):  # the guard is at its work
                    time.sleep(0.2)
                    continue
                if self._steady(watch, back):
                    return back, False
            time.sleep(0.05)
        return None, False

    def _steady(self, watch: Watch, back: float) -> bool:
        """Return whether all answers have succeeded for a second and a half."""
        recent = [s for s in watch.of("probe") if s.end > time.monotonic() - 1.5]
        return time.monotonic() - back > 1.5 and bool(recent) and all(s.good for s in recent)

    def _restart(self, fault: Fault, row: Row) -> float | None:
        """Start `serve` again, as a platform does."""
        assert self.service is not None
        left = self.service.wait_nothing_left()
        if left:
            row.left = left
            row.complaints.append(f"left behind: {left}")
        if not fault.ends_server:
            row.complaints.append(f"serve ended: {self.service.log().splitlines()[-1]}")
        self._drop()
        with contextlib.suppress(Exception):
            self._start()
            return time.monotonic()
        return None

    def _judge_requests(
        self, fault: Fault, row: Row, crowd: Crowd, struck: float, under_way: set[int]
    ) -> None:
        worst: dict[str, str] = {}
        bound = BOUND_S + SLACK_S + row.late_s + min(row.usual_s, MAX_USUAL_S)
        if fault.rebuilds:
            bound += row.back_s
        for sent in crowd.sent:
            outcome = sent.outcome
            if outcome.end and outcome.end < struck:
                continue
            was_open = id(outcome) in under_way
            row.open += was_open
            silent = outcome.silence_after(max(struck, outcome.start))
            known = fault.limit_known in (sent.ask.model, "all") and bool(fault.limit_known)
            known = known or (sent.ask.model == "ensemble" and fault.limit_known == "fastertransformer")
            if silent > bound:
                if known and was_open:
                    row.known_lost += 1
                    continue
                row.lost += 1
                state = "open at the fault" if was_open else "sent after it"
                what = f"{outcome.kind} {outcome.text[:80]}".strip()
                worst.setdefault(f"{sent.ask.name}, {state}: silent for {silent:.1f} s ({what})", "")
            row.ends_s = max(row.ends_s, silent)
            row.answers += outcome.kind == "answer"
            row.errors += outcome.kind == "error"
            reloading = outcome.kind == "error" and any(text in outcome.text for text in RELOADING)
            complaint = "" if outcome.kind == "hang" or reloading else clean(outcome, CODES)
            if complaint:
                worst.setdefault(f"{complaint}", "")
        row.complaints += sorted(worst)[:4] + ([f"… {len(worst) - 4} more"] if len(worst) > 4 else [])
        if crowd.wrong:
            row.complaints.append(f"{len(crowd.wrong)} answers with wrong tokens, e.g. {crowd.wrong[0]}")

    def _judge_begun(self, fault: Fault, row: Row, crowd: Crowd, begun: set[int]) -> None:
        """The requests that had got a response when the fault happened, by how they ended."""
        sent = [one for one in crowd.sent if id(one.outcome) in begun]
        row.begun = len(sent)
        row.whole = sum(one.ask.digest(one.outcome) == self.answers[one.ask.name] for one in sent)
        if not fault.unbroken:
            return
        broken = [one for one in sent if one.outcome.kind != "answer"]
        row.complaints += [f"{one.ask.name} was broken: {one.outcome.text[:100]}" for one in broken[:2]]
        assert self.service is not None
        if sent and "another engine continues" not in self.service.log():
            row.complaints.append("no door logs that its requests were continued")

    def _check_controls(self, row: Row) -> None:
        self._connect()
        assert self.clients is not None
        now = self.clients.digests(controls())
        wrong = [name for name, digest in now.items() if digest != self.reference[name]]
        row.controls = f"{len(now) - len(wrong)} of {len(now)}"
        if wrong:
            row.complaints.append(f"controls changed: {', '.join(wrong)}")

    def stop(self) -> str:
        """Stop the server as an operator does; returns what remains of it."""
        if self.service is None:
            return ""
        if self.clients is not None:
            self.clients.close()
            self.clients = None
        left = self.service.stop()
        self.service.close()
        self.service = None
        return left

    def _drop(self) -> None:
        if self.clients is not None:
            self.clients.close()
            self.clients = None
        if self.service is not None:
            self.service.close()
            self.service = None

    def table(self) -> str:
        return table(HEADS, [cells(row) for row in self.rows]) + complaints_of(self.rows)

    def close(self) -> None:
        self._drop()


def complaints_of(rows: Sequence[Row]) -> str:
    return "".join(f"\n{row.fault}: {complaint}" for row in rows for complaint in row.complaints)


def _usual_silence(crowd: Crowd, moment: float) -> float:
    """The longest time without a response of any request so far."""
    outcomes = [sent.outcome for sent in [*crowd.open.values(), *crowd.sent]]
    times = [[o.start, *o.progress, min(o.end or moment, moment)] for o in outcomes]
    return max((b - a for one in times for a, b in zip(one, one[1:])), default=0.0)


def _open_at(sent: Sent, moment: float) -> bool:
    return sent.outcome.start <= moment and (not sent.outcome.end or sent.outcome.end >= moment)


def as_dict(row: Row) -> dict:
    return {**asdict(row), "verdict": row.verdict}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=80)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--log", action="store_true", help="show the end of the server's log after a failure")
    arguments = parser.parse_args()
    end_on_sigterm()
    faults = schedule(arguments.ranks)
    if arguments.list:
        print("\n".join(fault.name for fault in faults))
        return
    if arguments.only:
        faults = [fault for fault in faults if any(fault.name.startswith(only) for only in arguments.only)]
    with tempfile.TemporaryDirectory(prefix="tdrelrepo") as folder:
        repository = build_repository(Path(folder), arguments.ranks, host_cache_bytes=32 << 20)
        strikes = Range(repository, arguments.seed, arguments.streams)
        try:
            for fault in faults:
                row = strikes.strike(fault)
                print(cells(row), *row.complaints, sep="\n   ", flush=True)
                if row.complaints and arguments.log:
                    print(strikes.last_log[-8000:])
            print("after stop:", strikes.stop() or "nothing left")
        finally:
            strikes.close()
        print(strikes.table())


if __name__ == "__main__":
    main()
