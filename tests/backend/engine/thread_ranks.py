"""Tensor and pipeline ranks as threads of one process: any degree without the start of a process each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Queue
from typing import TypeVar

import torch
from torch import Tensor

from tests.backend.engine.step_watch import WatchedEngine
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.loading import load_engine
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.backend.engine.loop import follow
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.models import read_model_config
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.prompt_learning import LearnedPrompt
from tridecode.kernels.reference import Reference

_WAIT_S = 60
Result = TypeVar("Result")


class Meeting:
    """State shared by the ranks of one engine."""

    def __init__(self, tensor_size: int, num_stages: int):
        self.tensor_size, self.num_stages = tensor_size, num_stages
        self.world = tensor_size * num_stages
        #: all of them from the start: a rank that made one on its first use could replace another rank's
        self.queues = {
            "to first": Queue(),
            **{(kind, rank): Queue() for kind in ("activations", "plans") for rank in range(self.world)},
            **{("half", half, rank): Queue() for half in (0, 1) for rank in range(self.world)},
        }
        self.held: dict[object, list] = {"all": [None] * self.world}
        self.barriers = {"all": threading.Barrier(self.world)}
        for stage in range(num_stages):
            self.held[stage] = [None] * tensor_size
            self.barriers[stage] = threading.Barrier(tensor_size)

    def gather(self, group: object, index: int, value) -> list:
        """Everybody's values, in the order of the group."""
        self.held[group][index] = value
        self.barriers[group].wait(_WAIT_S)
        found = list(self.held[group])
        self.barriers[group].wait(_WAIT_S)
        return found


class Arrival:
    """A result that rank 0 has not received yet; those of a queue are waited for in order."""

    def __init__(self, queue: Queue, x: Tensor):
        self.queue, self.x = queue, x

    @torch.inference_mode()
    def wait(self) -> None:
        self.x.copy_(self.queue.get(timeout=_WAIT_S))


class ThreadSums:
    """The interface of kernels.peer_sums.PeerSums. launched: sums with a norm, and without."""

    chain_fields = None

    def __init__(self, ranks: ThreadRanks):
        self.ranks, self.launched = ranks, {True: 0, False: 0}

    def sent_fields(self, partial) -> None:
        return None

    def add_rows(
        self,
        partial,
        biases=(),
        residual=None,
        norm=None,
        *,
        out,
        normed=None,
        follows_product=False,
        sent=False,
    ) -> None:
        meeting = self.ranks.meeting
        parts = meeting.gather(self.ranks.stage, self.ranks.tensor_rank, partial.clone())
        terms = [*parts, *biases, *(() if residual is None else (residual,))]
        total = sum(term.float() for term in terms).to(partial.dtype)
        self.launched[norm is not None] += 1
        if out is not None:
            out.copy_(total)
        if norm is not None:
            Reference().norm(total, norm, out=normed)


class ThreadHalves:
    """The interface of kernels.peer_sums.PeerCopies, of two ranks. rows: those of each summed half."""

    def __init__(self, ranks: ThreadRanks):
        self.ranks, self.rows = ranks, []
        self.mine: list[Tensor | None] = [None, None]

    def send(self, half: int, partial: Tensor) -> None:
        self.mine[half] = partial
        self.ranks.meeting.queues["half", half, 1 - self.ranks.rank].put(partial.clone())

    def add_rows(self, half: int, partial, biases, residual, norm, *, normed) -> None:
        assert self.mine[half] is not None and self.mine[half].data_ptr() == partial.data_ptr()
        theirs = self.ranks.meeting.queues["half", half, self.ranks.rank].get(timeout=_WAIT_S)
        parts = [theirs, partial] if self.ranks.rank else [partial, theirs]
        residual.copy_(sum(term.float() for term in [*parts, *biases, residual]).to(residual.dtype))
        self.rows.append(len(partial))
        if norm is not None:
            Reference().norm(residual, norm, out=normed)


class ThreadRanks:
    """The interface of ProcessRanks. fuses: sums over ranks are fused with what comes after them. halves:
    steps of at least this many tokens are computed in halves; 0: none.
    """

    def __init__(
        self, meeting: Meeting, rank: int, pipelined: bool = False, fuses: bool = False, halves: int = 0
    ):
        self.sums = ThreadSums(self) if fuses else None
        self.halves, self._least = ThreadHalves(self), halves
        self.meeting, self.rank = meeting, rank
        self.tensor_size, self.num_stages = meeting.tensor_size, meeting.num_stages
        self.tensor_rank, self.stage = rank % self.tensor_size, rank // self.tensor_size
        self.is_pipelined = self.num_stages > 1 and pipelined
        self.posted: list[Arrival] = []

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self.meeting.gather(self.stage, self.tensor_rank, x.clone())).sum(0))

    def row_sums(self, x: Tensor) -> ThreadSums | None:
        return self.sums

    def half_sums(self, x: Tensor) -> ThreadHalves | None:
        return self.halves if 0 < self._least <= x.shape[0] else None

    def raise_if_lost(self) -> None: ...

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.gather(self.stage, self.tensor_rank, x.clone()))

    def receive(self, x: Tensor) -> None:
        if self.stage > 0:
            x.copy_(self.meeting.queues["activations", self.rank].get(timeout=_WAIT_S))

    def send(self, x: Tensor) -> None:
        if self.stage < self.num_stages - 1:
            self.meeting.queues["activations", self.rank + self.tensor_size].put(x.clone())

    def to_first(self, x: Tensor | None, host: Tensor | None) -> None:
        if self.num_stages > 1:
            source = (self.num_stages - 1) * self.tensor_size
            if self.rank == source:
                self.meeting.queues["to first"].put(x.clone())
            elif self.rank == 0:
                self.posted.append(Arrival(self.meeting.queues["to first"], host))

    def take_posted(self) -> list[Arrival]:
        posted, self.posted = self.posted, []
        return posted

    def share(self, x: Tensor) -> None:
        last = (self.num_stages - 1) * self.tensor_size
        x.copy_(self.meeting.gather("all", self.rank, x.clone())[last])

    def smallest(self, value: int) -> int:
        return min(self.meeting.gather("all", self.rank, value))

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return self.meeting.gather("all", self.rank, data)

    def all_true(self, values: list[bool]) -> list[bool]:
        return [all(row) for row in zip(*self.meeting.gather("all", self.rank, values))]

    def barrier(self, what: str) -> None: ...

    def broadcast_plan(self, plan: StepPlan | None) -> StepPlan | None:
        if self.rank > 0:
            return self.meeting.queues["plans", self.rank].get(timeout=_WAIT_S)
        for rank in range(1, self.meeting.world):
            self.meeting.queues["plans", rank].put(plan)
        return plan

    def close(self) -> None: ...


def generate_on_ranks(
    directory: Path,
    tensor: int,
    stages: int,
    prompts: list[list[int]],
    new_tokens: int,
    learned: list[LearnedPrompt] | None = None,
    **settings,
) -> tuple[list[list[int]], list[Engine]]:
    """Greedy tokens of each prompt over tensor x stages ranks, and the ranks' engines. learned: the tables of
    the prompts' virtual tokens."""
    params = SamplingParams(max_tokens=new_tokens)
    done, engines = generations_on_ranks(directory, tensor, stages, prompts, params, learned, **settings)
    return [generation.tokens for generation in done], engines


def generations_on_ranks(
    directory: Path,
    tensor: int,
    stages: int,
    prompts: list[list[int]],
    params: SamplingParams,
    learned: list[LearnedPrompt] | None = None,
    **settings,
) -> tuple[list[Generation], list[Engine]]:
    """The generation of each prompt over tensor x stages ranks, and the ranks' engines."""

    def use(engine: OfflineEngine) -> list[Generation]:
        tables = learned or [None] * len(prompts)
        numbers = [engine.submit(prompt, params, "", table) for prompt, table in zip(prompts, tables)]
        engine.run()
        return [engine.generations[number] for number in numbers]

    return on_ranks(directory, tensor, stages, use, **settings)


def on_ranks(
    directory: Path,
    tensor: int,
    stages: int,
    use: Callable[[OfflineEngine], Result],
    pipelined: bool = False,
    fuses: bool = False,
    halves: int = 0,
    host_fds: Sequence[int] = (),
    tokenizer_dir: Path | None = None,
    **settings,
) -> tuple[Result, list[Engine]]:
    """What `use` makes of an engine over tensor x stages ranks, and the ranks' engines.

    pipelined: with a plan in flight for each stage. fuses, halves: see ThreadRanks. host_fds: memory
    files of the ranks' host tiers, where host_cache_bytes is set; new ones by default.
    """
    cpu, meeting = torch.device("cpu"), Meeting(tensor, stages)
    model = read_model_config(directory)
    sizes = dict(
        max_sequences=4, block_tokens=8, max_step_tokens=16, max_sequence_tokens=64, cache_bytes=1 << 20
    )
    config = EngineConfig(**{**sizes, **settings})
    engines: dict[int, Engine] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            ranks = ThreadRanks(meeting, rank, pipelined, fuses, halves)
            named = {"host_fd": host_fds[rank]} if host_fds else {}
            engines[rank] = load_engine(directory, model, resolve(config, model, cpu), ranks, cpu, **named)
            if rank > 0:
                engines[rank].pin_host_memory()
                follow(engines[rank], RankStatus())
        except BaseException as error:  # told to the test's own thread
            errors.append(error)
            for barrier in meeting.barriers.values():
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, meeting.world)]
    for thread in threads:
        thread.start()
    run(0)
    try:
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        result = use(WatchedEngine(engines[0], tokenizer_dir=tokenizer_dir))
    finally:
        ThreadRanks(meeting, 0).broadcast_plan(None)
        for thread in threads:
            thread.join(_WAIT_S)
    return result, [engines[rank] for rank in range(meeting.world)]
