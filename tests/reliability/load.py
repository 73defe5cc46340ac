"""Clients that do not read, a flood, and a steady mix whose memory is watched.

python -m tests.reliability.load slow | flood | leak [--seconds 300]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.reliability.report import megabytes, table
from tests.reliability.service import QUEUE, SHM, SLOTS, Service, build_repository, end_on_sigterm
from tests.reliability.traffic import CODES, Clients, Crowd, clean, controls, mixture, text_ask, token_ask
from tests.reliability.watch import Watch
from tests.reliability.wire import Outcome, Tensor, grpc_request, http_request
from tridecode.backend.supervisor import state_file

SAMPLE_S = 0.5
ROWS = 20  # of a request whose responses are not read
UNREAD_BYTES = 16 << 20  # most unread bytes of one request in a door (backend/doors/answers/senders.py)
HEALTH_LIMIT_S = 0.1  # for an answer of health under any load


def load_of(service: Service) -> tuple[int, int]:
    """Sequences running and waiting in the engines, as the supervisors last said."""
    states = state_file.read_all(next(iter(service.run_dir.glob("serve-*")), service.run_dir))
    return sum(state.running for state in states), sum(state.waiting for state in states)


# ---------------------------------------------------------------- what processes hold


@dataclass
class Use:
    """Memory of one process at one moment. rss: bytes."""

    at: float
    rss: int
    fds: int
    threads: int


class Meter:
    """Samples every process of a server in a thread of its own, and its shared memory."""

    def __init__(self, service: Service, every_s: float = SAMPLE_S) -> None:
        self.uses: dict[str, list[Use]] = {}
        self.shm: list[tuple[float, int]] = []
        self._service, self._every_s = service, every_s
        self._roles = service.roles()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            now = time.monotonic()
            for role, process in self._roles.items():
                with contextlib.suppress(psutil.Error):
                    with process.oneshot():
                        use = Use(now, process.memory_info().rss, process.num_fds(), process.num_threads())
                    self.uses.setdefault(role, []).append(use)
            sizes = 0
            for name in self._service.regions():
                with contextlib.suppress(OSError):
                    sizes += (SHM / name).stat().st_blocks * 512
            self.shm.append((now, sizes))
            self._stop.wait(self._every_s)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def growth(self, role: str) -> int:
        """The largest resident size less the first, in bytes."""
        sizes = [use.rss for use in self.uses.get(role, [])]
        return max(sizes) - sizes[0] if sizes else 0

    def server_growth(self) -> dict[str, int]:
        return {
            role: self.growth(role)
            for role in self.uses
            if role == "tritonserver" or role.startswith("door:")
        }


# ---------------------------------------------------------------- clients that do not read


@dataclass
class SlowResult:
    clients: int
    growth: dict[str, int]
    shm_growth: int
    freed_s: float
    control_s: float
    ended: Counter
    complaints: list[str] = field(default_factory=list)

    def table(self) -> str:
        rows = [[role, megabytes(count)] for role, count in sorted(self.growth.items())]
        rows.append(["/dev/shm", megabytes(self.shm_growth)])
        head = (
            f"{self.clients} clients stopped reading. Their slots were free {self.freed_s:.1f} s after they "
            f"had begun, and a control request took at most {self.control_s:.1f} s. They ended as "
            f"{dict(self.ended)}.\n\n"
        )
        return head + table(["process", "grew by"], rows) + "".join(f"\n{one}" for one in self.complaints)


def slow_readers(
    service: Service,
    grpc_clients: int = 4,
    http_clients: int = 8,
    new_tokens: int = 300,
    limit_s: float = 90.0,
) -> SlowResult:
    """Streams that nobody reads, over gRPC with ROWS wide rows each, and over SSE.

    All their responses would take some 30 MiB per gRPC stream. A door may leave UNREAD_BYTES of a request in
    the server; the rest it has to merge.
    """
    bound = (grpc_clients + 1) * UNREAD_BYTES
    clients = Clients(service.grpc, service.http, channels=grpc_clients)
    other = Clients(service.grpc, service.http)
    asks = controls()
    reference = other.digests(asks)
    meter = Meter(service)
    request = grpc_request(
        "fastertransformer_streaming",
        [
            Tensor("input_ids", "UINT32", [ROWS, 700], [7] * (700 * ROWS)),
            Tensor("input_lengths", "UINT32", [ROWS, 1], [20] * ROWS),
            Tensor("request_output_len", "UINT32", [ROWS, 1], [new_tokens] * ROWS),
            Tensor("end_id", "UINT32", [ROWS, 1], [50256] * ROWS),
        ],
        parameters={"triton_enable_empty_final_response": True},
    )
    body = text_ask("slow", "tensorrt_llm_bls", "generate_stream", "the city", new_tokens).body
    sse = http_request("/v2/models/tensorrt_llm_bls/generate_stream", body.encode())
    start = time.monotonic()
    stop = asyncio.Event()
    work = [clients.loop.start(_never_reads_grpc(clients, request, stop)) for _ in range(grpc_clients)]
    work += [clients.loop.start(_never_reads_http(service.http, sse, stop)) for _ in range(http_clients)]
    complaints, slowest, number = [], 0.0, 0
    freed_s = limit_s
    while time.monotonic() - start < limit_s:
        ask = asks[number % len(asks)]
        outcome = other.send(ask, 20.0)
        slowest = max(slowest, outcome.end - outcome.start)
        if outcome.kind != "answer" or ask.digest(outcome) != reference[ask.name]:
            complaints.append(f"control {ask.name}: {outcome.kind} {outcome.code} {outcome.text[:200]}")
        number += 1
        if time.monotonic() - start > 3 and load_of(service) == (0, 0):
            freed_s = time.monotonic() - start
            break
        time.sleep(0.1)
    else:
        complaints.append(f"{load_of(service)} sequences still run or wait after {limit_s:g} s")
    meter.close()
    clients.loop.run(_set(stop))
    ended = Counter(future.result(60) for future in work)
    clients.close()
    other.close()
    growth = meter.server_growth()
    total = sum(growth.values())
    if total > bound:
        complaints.append(f"server and doors grew by {megabytes(total)}; wanted at most {megabytes(bound)}")
    shm = max((size for _, size in meter.shm), default=0) - meter.shm[0][1]
    return SlowResult(grpc_clients + http_clients, growth, shm, freed_s, slowest, ended, complaints)


async def _set(event: asyncio.Event) -> None:
    event.set()


async def _never_reads_grpc(clients: Clients, request: bytes, stop: asyncio.Event) -> str:
    """Opens a stream, reads nothing until `stop`, then everything."""
    call = clients.grpc.open_stream()
    await call.write(request)
    await stop.wait()
    outcome = Outcome(time.monotonic())
    await call.done_writing()
    try:
        await asyncio.wait_for(clients.grpc.read_stream(call, outcome), 30.0)
    except asyncio.TimeoutError:
        outcome.finish("hang")
    except Exception as error:  # grpc's own
        outcome.finish("error", type(error).__name__)
    finally:
        call.cancel()
    return f"gRPC {outcome.kind}"


async def _never_reads_http(address: tuple[str, int], request: bytes, stop: asyncio.Event) -> str:
    reader, writer = await asyncio.open_connection(*address, limit=1024)
    writer.write(request)
    await writer.drain()
    await stop.wait()
    try:
        while await asyncio.wait_for(reader.read(65536), 3.0):
            pass
        kind = "closed"
    except asyncio.TimeoutError:
        kind = "kept open"
    except OSError as error:
        kind = type(error).__name__
    writer.close()
    return f"SSE {kind}"


# ---------------------------------------------------------------- a flood


@dataclass
class FloodResult:
    requests: int
    seconds: float
    ended: Counter
    growth: dict[str, int]
    health: list[float]
    health_false: int
    late_s: float
    complaints: list[str] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        return self.health[min(len(self.health) - 1, int(share * len(self.health)))] if self.health else 0.0

    def table(self) -> str:
        rows = [[role, megabytes(count)] for role, count in sorted(self.growth.items())]
        p50, p99 = 1000 * self.quantile(0.5), 1000 * self.quantile(0.99)
        head = (
            f"{self.requests:,} requests arrived at the same time for {SLOTS} slots and a queue of {QUEUE}. "
            f"Within {self.seconds:.1f} s they ended as {dict(self.ended)}. {len(self.health)} health probes "
            f"took {p50:.0f} ms (p50) and {p99:.0f} ms (p99), {self.health_false} were false. "
            f"The machine's scheduling delay was {1000 * self.late_s:.0f} ms.\n\n"
        )
        return head + table(["process", "grew by"], rows) + "".join(f"\n{one}" for one in self.complaints)


def flood(
    service: Service,
    seed: int,
    factor: int = 10,
    bound: int = 256 << 20,
    health_limit_s: float = HEALTH_LIMIT_S,
) -> FloodResult:
    """`factor` times as many requests at once as the server has room for; each is answered or refused."""
    clients = Clients(service.grpc, service.http, channels=16)
    asks = controls()
    reference = clients.digests(asks)
    draw = random.Random(f"flood {seed}")
    meter = Meter(service, 0.2)
    watch = Watch(service.server.http_url, "none")
    time.sleep(1.5)
    shots = [
        token_ask(str(number), "fastertransformer", "grpc", [draw.randrange(3, 330) for _ in range(8)], 16)
        for number in range(factor * (SLOTS + QUEUE))
    ]
    start = time.monotonic()
    outcomes = clients.loop.run(_all_at_once(clients, shots), 180)
    seconds = time.monotonic() - start
    ended_at = time.monotonic()
    meter.close()
    watch.close()
    ended: Counter = Counter()
    complaints = []
    for outcome in outcomes:
        ended[f"{outcome.kind} {outcome.code}".strip()] += 1
        if complaint := clean(outcome, CODES):
            complaints.append(complaint)
    complaints = sorted(set(complaints))[:5]
    if not ended["answer"] or not ended["error UNAVAILABLE"]:
        complaints.append(f"wanted answers and refusals, found {dict(ended)}")
    growth = meter.server_growth() | {"rank0": meter.growth("rank0")}
    if sum(growth.values()) > bound:
        complaints.append(f"grew by {megabytes(sum(growth.values()))}; wanted at most {megabytes(bound)}")
    asked = [sample for sample in watch.of("health") if sample.start >= start - 0.5]
    late = watch.lateness(start, ended_at)
    result = FloodResult(
        len(shots),
        seconds,
        ended,
        growth,
        sorted(sample.end - sample.start for sample in asked),
        sum(not sample.good for sample in asked),
        late,
        complaints,
    )
    if result.health_false:
        text = next(sample.text for sample in asked if not sample.good)
        complaints.append(f"health said false {result.health_false} times: {text}")
    if result.quantile(0.99) > health_limit_s + late:
        complaints.append(
            f"health took {1000 * result.quantile(0.99):.0f} ms; wanted {1000 * health_limit_s:g}"
        )
    now = clients.digests(asks)
    complaints += [f"control changed: {name}" for name in now if now[name] != reference[name]]
    clients.close()
    return result


async def _all_at_once(clients: Clients, shots: Sequence) -> list[Outcome]:
    return await asyncio.gather(*(shot.send(clients.grpc, clients.http, 90.0) for shot in shots))


# ---------------------------------------------------------------- leaks


@dataclass
class Slope:
    role: str
    first: float
    last: float
    per_hour: float
    unit: str
    limit: float  # per hour
    resolution: float  # of the measurement: the jumps of a constant value

    def over(self, hours: float) -> bool:
        return self.per_hour * hours > self.limit * hours + self.resolution


@dataclass
class LeakResult:
    seconds: float
    requests: int
    slopes: list[Slope]
    complaints: list[str] = field(default_factory=list)

    def table(self) -> str:
        rows = [
            [
                slope.role,
                slope.unit,
                f"{slope.first:.1f}",
                f"{slope.last:.1f}",
                f"{slope.per_hour:+.2f}",
                f"{slope.limit:g}",
            ]
            for slope in self.slopes
        ]
        head = f"{self.requests:,} requests in {self.seconds:.0f} s after a warm-up\n\n"
        heads = ["process", "what", "at first", "at last", "slope / hour", "limit / hour"]
        return head + table(heads, rows) + "".join(f"\n{one}" for one in self.complaints)


def theil_sen(times: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between the samples: a jump or an outlier does not move it."""
    step = max(1, len(times) // 200)
    points = list(zip(times, values))[::step]
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for at, earlier in enumerate(points)
        for later in points[at + len(points) // 4 :]
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def leaks(
    service: Service,
    seed: int,
    warm_s: float = 10.0,
    seconds: float = 25.0,
    engine_mib_per_hour: float = 1.0,
    resolution_mib: float = 6.0,
    clients_count: int = 12,
    windows: int = 1,
) -> LeakResult:
    """A steady mix of requests, with refusals and cancellations; returns the memory of each process over
    time.

    resolution_mib: allowed growth of a process in addition to the hourly limit. windows: a process leaks
    if it grows too much in each of this many windows of `seconds`; the first window without such growth
    is the result. A cache fills once (oneDNN keeps code for every number of rows, see kernels/cpu.py), a
    leak continues.
    """
    clients = Clients(service.grpc, service.http)
    asks = mixture(seed, 40, 64, 64)
    asks += [token_ask(f"refused {n}", "fastertransformer", "grpc", [5, 70000 + n], 4) for n in range(4)]
    crowd = Crowd(clients, asks, clients_count, seed, pause_s=0.05)
    stopping = asyncio.Event()
    leaving = clients.loop.start(_leave_all_the_time(clients, seed, stopping))
    time.sleep(warm_s)
    growing: set[tuple[str, str]] | None = None
    for _ in range(windows):
        meter = Meter(service, max(SAMPLE_S, seconds / 2000))
        before = len(crowd.sent)
        time.sleep(seconds)
        meter.close()
        requests = len(crowd.sent) - before
        slopes = _slopes(meter, engine_mib_per_hour, resolution_mib)
        over = {(slope.role, slope.unit) for slope in slopes if slope.over(seconds / 3600)}
        growing = over if growing is None else growing & over
        if not growing:
            break
    clients.loop.run(_set(stopping))
    leaving.result(30)
    crowd.stop(30)
    clients.close()
    complaints = [
        f"{slope.role}: {slope.unit} {slope.first:.1f} to {slope.last:.1f}, {slope.per_hour:+.2f} per hour"
        for slope in slopes
        if growing and (slope.role, slope.unit) in growing
    ]
    lost = service.pids_at_start.items() - service.lasting_pids().items()
    if lost:
        complaints.append(f"processes were replaced: {sorted(role for role, _ in lost)}")
    return LeakResult(seconds, requests, slopes, complaints)


def _slopes(meter: Meter, engine_mib_per_hour: float, resolution_mib: float) -> list[Slope]:
    found = []
    for role, uses in sorted(meter.uses.items()):
        times = [use.at for use in uses]
        for unit, values, limit, resolution in (
            ("RSS MiB", [use.rss / 2**20 for use in uses], engine_mib_per_hour, resolution_mib),
            ("fds", [float(use.fds) for use in uses], 1.0, 8.0),
            ("threads", [float(use.threads) for use in uses], 1.0, 4.0),
        ):
            slope = 3600 * theil_sen(times, values)
            if unit == "RSS MiB" or abs(slope) > 1e-6:
                found.append(Slope(role, values[0], values[-1], slope, unit, limit, resolution))
    times = [at for at, _ in meter.shm]
    sizes = [size / 2**20 for _, size in meter.shm]
    found.append(
        Slope("all", sizes[0], sizes[-1], 3600 * theil_sen(times, sizes), "/dev/shm MiB", 1.0, resolution_mib)
    )
    return found


async def _leave_all_the_time(clients: Clients, seed: int, stop: asyncio.Event) -> None:
    """Streams that their client cancels after a few responses, and connections that it closes."""
    draw = random.Random(f"leaving {seed}")
    ask = token_ask("leaves", "fastertransformer_streaming", "grpc_stream", [5, 6, 7], 60)
    request = grpc_request(ask.model, ask.tensors)
    sse = text_ask("leaves", "tensorrt_llm_bls", "generate_stream", "the", 60)
    while not stop.is_set():
        await clients.grpc.stream(request, 20.0, cancel_after=draw.randint(1, 3))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(sse.send(clients.grpc, clients.http, 20.0), draw.uniform(0.02, 0.3))
        await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["slow", "flood", "leak"], nargs="+")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the leak test")
    parser.add_argument("--warm-seconds", type=float, default=10.0, help="of the same load before it")
    arguments = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="tdrelrepo") as folder:
        service = Service(build_repository(Path(folder)))
        try:
            if "slow" in arguments.what:
                print(slow_readers(service).table())
            if "flood" in arguments.what:
                print(flood(service, arguments.seed).table())
            if "leak" in arguments.what:
                print(leaks(service, arguments.seed, arguments.warm_seconds, arguments.seconds).table())
            print("after stop:", service.stop() or "nothing left")
        finally:
            service.close()


if __name__ == "__main__":
    main()
