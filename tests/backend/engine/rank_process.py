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
from tridecode.backend.messages import SamplingParams
from tridecode.backend.models import read_model_config
from tridecode.backend.supervisor.rank_link import RankStatus

NEW_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, return_context_embedding=True)


class RankPool:
    """`size` processes, of which a run takes as many as it has ranks. After a failure it starts new ones."""

    def __init__(self, size: int):
        self._size, self._workers = size, []  # type: ignore[var-annotated]

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
        **settings,
    ) -> list[tuple[list[int], Any]]:
        """Rank 0's (tokens, context embedding) of every prompt; with other params than GREEDY its
        Generations. Raises AssertionError if a rank fails.

        names: of each prompt's adapter. params: of all prompts, or of each. pipelined: with a plan in
        flight for each stage. settings: of EngineConfig.
        """
        if not self._workers:
            self._workers = self._start()
        ranks = self._workers[: tensor * stages]
        for rank, (_, jobs, _) in enumerate(ranks):
            place = (rank, tensor, stages, directory, f"file://{meeting}", pipelined)
            jobs.put((*place, prompts, names, params, settings))
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


def shared_vocabulary(directory: Path, meeting: Path, rank: int, world: int, exchange) -> str:
    """Load a rank on a GPU; what is wrong with its share of a vocabulary of 397 ids, "" for nothing."""
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = ProcessRanks(rank, world, 1, f"file://{meeting}", device)
    try:
        model = read_model_config(directory)
        sizes = dict(max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=4 << 20)
        config = resolve(EngineConfig(**sizes, device="cuda", data_type="fp32"), model, device)
        engine = Engine.load(directory, model, config, ranks, device)
        share, graphs = engine.vocab, engine.graphs
        rows = engine.model.embedding.shape[0], engine.model.head.weight.shape[0]
        columns = engine.work.logits.shape[1], engine.state.counts.shape[1]
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
    settings: dict[str, Any],
) -> list[Any]:
    device = torch.device("cpu")
    if settings.get("device") == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = ProcessRanks(rank, tensor, stages, meeting, device, pipeline_devices={"cpu"} if pipelined else ())
    try:
        model = read_model_config(directory)
        sizes = dict(max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=4 << 20)
        config = resolve(EngineConfig(**{**sizes, **settings}), model, device)
        engine = Engine.load(directory, model, config, ranks, device)
        if rank > 0:
            follow(engine, RankStatus())
            engine.close()
            return []
        offline = OfflineEngine(engine)
        of_each = params if isinstance(params, list) else [params] * len(prompts)
        numbers = [
            offline.submit(prompt, one, name)
            for prompt, one, name in zip(prompts, of_each, names or [""] * len(prompts))
        ]
        offline.run()
        done = [offline.generations[number] for number in numbers]
        ranks.broadcast_plan(None)
        engine.close()
        return [(one.tokens, one.embedding) for one in done] if params == GREEDY else done
    finally:
        ranks.close()
