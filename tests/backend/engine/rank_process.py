"""Ranks of a test, in processes that live as long as their pool: without transformers, so they start fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tridecode.backend.config import EngineConfig
from tridecode.backend.engine.engine import Engine
from tridecode.backend.engine.loop import follow
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parallel import ProcessRanks
from tridecode.backend.engine.settings import resolve
from tridecode.backend.errors import TridecodeError
from tridecode.backend.messages import SamplingParams
from tridecode.backend.models import read_model_config
from tridecode.backend.supervisor.rank_link import RankStatus

NEW_TOKENS = 8


class RankPool:
    """`size` processes, of which a run takes as many as it has ranks. After a failure it starts new ones."""

    def __init__(self, size: int):
        self._size, self._workers = size, []  # type: ignore[var-annotated]

    def run(
        self, directory: Path, tensor: int, stages: int, meeting: Path, prompts: list[list[int]]
    ) -> list[tuple[list[int], Any]]:
        """Rank 0's (tokens, context embedding) of every prompt. Raises AssertionError if a rank fails."""
        if not self._workers:
            self._workers = self._start()
        ranks = self._workers[: tensor * stages]
        for rank, (_, jobs, _) in enumerate(ranks):
            jobs.put((rank, tensor, stages, directory, f"file://{meeting}", prompts))
        try:
            answers = [answer.get(timeout=120) for _, _, answer in ranks]
        except BaseException:
            self.close()
            raise
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return answers[0]

    def _start(self) -> list[tuple[Any, Any, Any]]:
        context, workers = mp.get_context("spawn"), []
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


def _work(jobs, answers) -> None:
    torch.set_num_threads(1)
    while True:
        job = jobs.get()
        try:
            answers.put(_run_rank(*job))
        except Exception as error:
            answers.put(f"rank {job[0]}: {type(error).__name__}: {error}")


def _run_rank(
    rank: int, tensor: int, stages: int, directory: Path, meeting: str, prompts: list[list[int]]
) -> list[tuple[list[int], Any]]:
    cpu = torch.device("cpu")
    ranks = ProcessRanks(rank, tensor, stages, meeting, cpu)
    try:
        model = read_model_config(directory)
        settings = EngineConfig(max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=4 << 20)
        engine = Engine.load(directory, model, resolve(settings, model, cpu), ranks, cpu)
        if rank > 0:
            follow(engine, RankStatus())
            return []
        offline = OfflineEngine(engine)
        params = SamplingParams(max_tokens=NEW_TOKENS, return_context_embedding=True)
        done = offline.generate(prompts, params)
        ranks.broadcast_plan(None)
        return [(generation.tokens, generation.embedding) for generation in done]
    finally:
        ranks.close()


def run_adapter_rank(
    rank: int, tensor: int, stages: int, directory: Path, folder: Path, meeting: str, asked, queue
) -> None:
    """One rank with adapters; rank 0 puts the tokens of each (prompt, name) and the names of errors."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ranks = ProcessRanks(rank, tensor, stages, meeting, cpu)
    model = read_model_config(directory)
    settings = EngineConfig(
        max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=4 << 20, lora_path=str(folder)
    )
    engine = Engine.load(directory, model, resolve(settings, model, cpu), ranks, cpu)
    if rank > 0:
        follow(engine, RankStatus())
    else:
        offline, errors = OfflineEngine(engine), []
        params = SamplingParams(max_tokens=6)
        numbers = [offline.submit(prompt, params, name) for prompt, name in asked]
        offline.run()
        offline.submit([1], params, "unknown")
        try:
            offline.run()
        except TridecodeError as error:
            errors.append(type(error).__name__)
        numbers.append(offline.submit(*asked[-1][:1], params, asked[-1][1]))
        offline.run()
        ranks.broadcast_plan(None)
        queue.put(([offline.generations[number].tokens for number in numbers], errors))
    engine.close()
    ranks.close()
