"""One rank of a test: a module of its own, so that its processes start without transformers."""

from __future__ import annotations

import time
from pathlib import Path

import torch

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


def run_rank(rank: int, tensor: int, stages: int, directory: Path, meeting: str, prompts, queue) -> None:
    """One rank's process; rank 0 puts (tokens, context embedding) of every prompt into the queue."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ranks = ProcessRanks(rank, tensor, stages, meeting, cpu)
    model = read_model_config(directory)
    settings = EngineConfig(max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=4 << 20)
    engine = Engine.load(directory, model, resolve(settings, model, cpu), ranks, cpu)
    if rank > 0:
        follow(engine, RankStatus())
    else:
        offline = OfflineEngine(engine)
        done = offline.generate(prompts, SamplingParams(max_tokens=8, return_context_embedding=True))
        ranks.broadcast_plan(None)
        queue.put([(generation.tokens, generation.embedding) for generation in done])
        time.sleep(0.2)
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
