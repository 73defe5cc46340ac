"""Ranks of a test, in processes that live as long as their pool."""

from __future__ import annotations

import os
import queue
import signal
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tests import forkserver
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.loading import load_engine
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.backend.engine.loop import follow
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.ranks.parallel import PIPELINE_DEVICES, ProcessRanks
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.models import read_model_config
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.wire.messages import SamplingParams

NEW_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, return_context_embedding=True)


class RankPool:
    """`size` processes; a run uses one per rank. After a failure it starts new ones.

    notes: of each rank of the last run: {"in_flight": most plans in flight, counted on rank 0, "replays" and
    "prompt_replays": of CUDA graphs of decode steps and of steps with prompts, "halved": sums of halves of
    steps}.
    """

    def __init__(self, size: int):
        self._size, self._workers = size, []  # type: ignore[var-annotated]
        self.notes: list[dict[str, int]] = []

    def run(
        self,
        directory: Path,
        tensor: int,
        stages: int,
        meeting: Path,
        prompts: list[list[int]],
        names: list[str] | None = None,
        params: SamplingParams | list[SamplingParams] = GREEDY,
        pipelined: bool = False,
        dies: tuple[int, int] | None = None,
        **settings,
    ) -> list[tuple[list[int], Any]]:
        """Rank 0's (tokens, context embedding) of every prompt; with other params than GREEDY its
        Generations. Raises AssertionError if a rank fails.

        names: of each prompt's adapter. params: of all prompts, or of each. pipelined: with a plan in
        flight for each stage, which is the default on a GPU. dies: (rank, step): the process that kills
        itself there. settings: of EngineConfig, and of _run_rank: peers.
        """
        if not self._workers:
            self._workers = self._start()
        ranks = self._workers[: tensor * stages]
        for rank, (_, jobs, _) in enumerate(ranks):
            place = (rank, tensor, stages, directory, f"file://{meeting}", pipelined)
            last = dies[1] if dies is not None and dies[0] == rank else 0
            jobs.put((*place, prompts, names, params, last, settings))
        try:
            answers = [_answer(rank, *worker) for rank, worker in enumerate(ranks)]
        except BaseException:
            self.close()
            raise
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        self.notes = [notes for _, notes in answers]
        return answers[0][0]

    def _start(self) -> list[tuple[Any, Any, Any]]:
        # a process that begins CUDA must not have inherited a part of it
        context = mp.get_context("spawn") if torch.cuda.is_available() else forkserver.context()
        workers = []
        for _ in range(self._size):
            jobs, answers = context.Queue(), context.Queue()
            process = context.Process(target=_work, args=(jobs, answers), daemon=True)
            process.start()
            workers.append((process, jobs, answers))
        return workers

    def close(self) -> None:
        for process, _, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []


def _answer(rank: int, process, _, answers) -> Any:
    for _ in range(120):
        try:
            return answers.get(timeout=1)
        except queue.Empty:
            if not process.is_alive():
                return f"rank {rank} died"
    raise TimeoutError(f"rank {rank} does not answer")


def _watch(engine: Engine, notes: dict[str, int], last: int) -> None:
    """Count replays of graphs; kill this process in step `last`, if it is not 0."""
    if engine.graphs is not None:
        replay = engine.graphs.replay

        def counted(plan: StepPlan) -> int | None:
            size = replay(plan)
            notes["replays"] += size is not None
            return size

        engine.graphs.replay = counted  # type: ignore[method-assign]
    launch, steps = engine.launch, [0]

    def launched(plan: StepPlan) -> Any:
        steps[0] += 1
        if steps[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(plan)

    engine.launch = launched  # type: ignore[method-assign]


def shared_vocabulary(directory: Path, meeting: Path, rank: int, world: int, exchange) -> str:
    """Load a rank on a GPU; what is wrong with its share of a vocabulary of 397 ids, "" for nothing."""
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = ProcessRanks(rank, world, 1, f"file://{meeting}", device)
    try:
        model = read_model_config(directory)
        sizes = dict(max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=4 << 20)
        config = resolve(EngineConfig(**sizes, device="cuda", data_type="fp32"), model, device)
        engine = load_engine(directory, model, config, ranks, device)
        share, graphs = engine.state.vocab, engine.graphs
        rows = engine.state.model.embedding.shape[0], engine.state.model.head.weight.shape[0]
        columns = engine.state.work.logits.shape[1], engine.state.sampling.counts.shape[1]
        wanted = (0, 200) if rank == 0 else (200, 397)
        is_right = share is not None and (share.first, share.stop) == wanted and graphs is not None
        is_right = is_right and rows == columns == (200, 200)
        return "" if is_right else f"{share}, {graphs}, rows {rows}, columns {columns}"
    finally:
        exchange(b"done")
        ranks.close()


def _work(jobs, answers) -> None:
    torch.set_num_threads(1)
    while True:
        job = jobs.get()
        try:
            answers.put(_run_rank(*job))
        except Exception as error:
            answers.put(f"rank {job[0]}: {type(error).__name__}: {error}")
            answers.close()
            answers.join_thread()
            os._exit(1)  # as a rank of an engine does: others may wait for this one


def _run_rank(
    rank: int,
    tensor: int,
    stages: int,
    directory: Path,
    meeting: str,
    pipelined: bool,
    prompts: list[list[int]],
    names: list[str] | None,
    params: SamplingParams | list[SamplingParams],
    last: int,
    settings: dict[str, Any],
) -> tuple[list[Any], dict[str, int]]:
    """peers: whether the ranks are to sum through peer memory, checked."""
    peers = settings.pop("peers", None)
    device = torch.device("cpu")
    if settings.get("device") == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    pipelines = PIPELINE_DEVICES | ({"cpu"} if pipelined else set())
    ranks = ProcessRanks(rank, tensor, stages, meeting, device, pipeline_devices=pipelines)
    model = read_model_config(directory)
    sizes = dict(max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=4 << 20)
    config = resolve(EngineConfig(**{**sizes, **settings}), model, device)
    engine, notes = load_engine(directory, model, config, ranks, device), {"in_flight": 0, "replays": 0}
    if peers is not None:
        assert (ranks.peers is not None) == peers, "the ranks sum otherwise"
    _watch(engine, notes, last)
    done: list[Any] = []
    if rank > 0:
        follow(engine, RankStatus())
    else:
        done = _generate(engine, notes, prompts, names, params)
        ranks.broadcast_plan(None)
    copies = None if ranks.peers is None else ranks.peers.copies
    notes["halved"] = 0 if copies is None else sum(copies.turns)
    notes["prompt_replays"] = 0 if engine.prompt_graphs is None else engine.prompt_graphs.replayed
    engine.close()
    ranks.close()
    return done, notes


def _generate(
    engine: Engine,
    notes: dict[str, int],
    prompts: list[list[int]],
    names: list[str] | None,
    params: SamplingParams | list[SamplingParams],
) -> list[Any]:
    offline = OfflineEngine(engine)
    of_each = params if isinstance(params, list) else [params] * len(prompts)
    numbers = [
        offline.submit(prompt, one, name)
        for prompt, one, name in zip(prompts, of_each, names or [""] * len(prompts))
    ]
    launch = engine.launch

    def launched(plan: StepPlan) -> Any:
        notes["in_flight"] = max(notes["in_flight"], len(offline._pending) + 1)
        return launch(plan)

    engine.launch = launched  # type: ignore[method-assign]
    offline.run()
    done = [offline.generations[number] for number in numbers]
    return [(one.tokens, one.embedding) for one in done] if params == GREEDY else done
