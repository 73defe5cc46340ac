"""The engine without a server: the scheduler and one rank in this process. For parity checks, tests and
benchmarks."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.config import EngineConfig, ModelConfig
from tridecode.backend.engine.adapters import Adapters
from tridecode.backend.engine.admission import SchedulerLimits
from tridecode.backend.engine.engine import Engine
from tridecode.backend.engine.parallel import SingleRank
from tridecode.backend.engine.plan import StepPlan
from tridecode.backend.engine.scheduler import Scheduler
from tridecode.backend.engine.settings import choose_device, resolve
from tridecode.backend.errors import BY_CODE, TridecodeError
from tridecode.backend.messages import Event, SamplingParams, SequenceRequest, Submit
from tridecode.backend.models import read_model_config

_DOOR = b"offline"


def limits_of(engine: Engine) -> SchedulerLimits:
    """The scheduler's limits for an engine."""
    config = engine.config
    assert config.max_sequence_tokens is not None and config.max_step_tokens is not None
    return SchedulerLimits(
        num_blocks=engine.num_blocks,
        block_tokens=config.block_tokens,
        max_sequences=config.max_sequences,
        max_sequence_tokens=config.max_sequence_tokens,
        max_step_tokens=config.max_step_tokens,
        max_queued_requests=config.max_queued_requests,
        vocab_size=engine.model_config.vocab_size,
        request_timeout_s=config.request_timeout_s,
        max_bad_word_tokens=config.max_bad_word_tokens,
        max_stop_word_tokens=config.max_stop_word_tokens,
        long_prompt_tokens=engine.model_config.long_prompt_tokens,
        recompute_long=engine.model_config.recomputes_long,
    )


class Generation:
    """The result of one request of one sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.finish = ""
        self.embedding: np.ndarray | None = None
        self.logits: list[np.ndarray] = []  # (V,) float32 per generated token, with keep_logits

    def take(self, event: Event) -> None:
        self.tokens += event.tokens
        self.log_probs += event.log_probs
        if event.context_embedding:
            self.embedding = np.frombuffer(event.context_embedding, np.float32)
        if event.finish == "error":
            raise BY_CODE.get(event.code, TridecodeError)(event.error)
        self.finish = event.finish


class OfflineEngine:
    """Submit sequences, step, read `generations`."""

    def __init__(self, engine: Engine, keep_logits: bool = False):
        self.engine = engine
        self.scheduler = Scheduler(limits_of(engine), time.monotonic, Adapters(engine.loader))
        self.generations: list[Generation] = []
        if keep_logits:
            engine.on_logits = self._keep_logits

    @classmethod
    def load(
        cls, directory: str | Path, config: EngineConfig | None = None, keep_logits: bool = False
    ) -> OfflineEngine:
        """Over a weight directory; `config` as in config.pbtxt, default: fp32 on a GPU if there is one."""
        model = read_model_config(Path(directory))
        config = config or EngineConfig()
        device = choose_device(config)
        engine = Engine.load(Path(directory), model, resolve(config, model, device), SingleRank(), device)
        return cls(engine, keep_logits)

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model_config

    def _keep_logits(self, plan: StepPlan, logits: Tensor) -> None:
        rows = [sequence for sequence, count in zip(plan.sequences, plan.samples) if count]
        for sequence, row in zip(rows, logits.float().cpu().numpy().copy()):
            self.generations[sequence.group.request].logits.append(row)

    def submit(self, prompt: list[int], params: SamplingParams, lora_name: str = "") -> int:
        """The number of the new request, an index of `generations`. lora_name: of its adapter."""
        number = len(self.generations)
        self.generations.append(Generation())
        request = SequenceRequest(np.asarray(prompt, np.int32).tobytes(), params, lora_name)
        self.scheduler.submit(_DOOR, Submit(number, [request]))
        return number

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._take(self.scheduler.commit(plan, self.engine.launch(plan).wait()))
        else:
            self._take(self.scheduler.take_events())
            if not self.scheduler.can_step:  # adapters are being loaded
                time.sleep(0.001)
        return plan is not None

    def _take(self, events: list[tuple[bytes, Event]]) -> None:
        errors = []
        for _, event in events:
            try:
                self.generations[event.request].take(event)
            except TridecodeError as error:
                errors.append(error)
        if errors:  # once the other generations have their events
            raise errors[0]

    def run(self) -> None:
        """Step until every request has ended."""
        while self.scheduler.has_work:
            self.step()

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Generation]:
        """All prompts, together, to their ends."""
        numbers = [self.submit(prompt, params) for prompt in prompts]
        self.run()
        return [self.generations[number] for number in numbers]


def run_greedy(
    directory: str | Path,
    prompts: list[list[int]],
    new_tokens: int,
    config: EngineConfig | None = None,
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Greedy tokens of each prompt, exactly `new_tokens`, and their logits, (new_tokens, V) float32 a
    prompt."""
    config = config or EngineConfig(max_sequences=16)
    offline = OfflineEngine.load(
        directory, replace(config, max_queued_requests=max(len(prompts), 1)), keep_logits=True
    )
    with torch.inference_mode():
        done = offline.generate(prompts, SamplingParams(max_tokens=new_tokens))
    return [generation.tokens for generation in done], [np.stack(generation.logits) for generation in done]
