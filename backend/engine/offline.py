"""Runs the engine without a server, with scheduler and one rank in this process, for tests and benchmarks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.base.errors import BY_CODE, DeadlineError, TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.loading import load_engine
from tridecode.backend.engine.device.pending import Pending
from tridecode.backend.engine.device.resolved_settings import choose_device, resolve
from tridecode.backend.engine.parts.table import BACKGROUND
from tridecode.backend.engine.ranks.parallel import SingleRank
from tridecode.backend.engine.scheduler_factory import make_scheduler
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.models import read_model_config
from tridecode.backend.wire.beam_tree import BeamTree
from tridecode.backend.wire.messages import (
    Event,
    Perf,
    SamplingParams,
    SequenceRequest,
    SessionRound,
    Submit,
    TopLogProbs,
)
from tridecode.backend.wire.prompt_learning import LearnedPrompt
from tridecode.backend.wire.structured_output import StructuredOutput

_DOOR = b"offline"


class Generation:
    """The result of one request with one prompt: its first sequence.

    sequences: all samples or beams, best first; the first one is this object.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.top_log_probs: list[TopLogProbs] = []
        self.finish = ""
        self.sequences: list[Generation] = [self]
        self._beams = BeamTree()
        self.embedding: np.ndarray | None = None
        self.logits: list[np.ndarray] = []  # (V,) float32 per generated token, with keep_logits
        self.context_logits = self.generation_logits = b""  # float32, if the request wants it
        self.context_log_prob = 0.0
        self.perf: Perf | None = None

    @property
    def cum_log_prob(self) -> float:
        return sum(self.log_probs)

    def take(self, event: Event) -> None:
        self._take(event)
        if event.beams is not None:
            beams = self._beams.take(event.beams)
            self._resize(len(beams))
            for one, beam in zip(self.sequences, beams):
                one.tokens, one.log_probs, one.finish = beam.tokens, beam.log_probs, event.finish

    def take_of(self, index: int, event: Event) -> None:
        """Add an event of the sequence with this index."""
        if index >= len(self.sequences):
            self._resize(index + 1)
        self.sequences[index].take(event)

    def _resize(self, count: int) -> None:
        self.sequences += [Generation() for _ in range(count - len(self.sequences))]

    def _take(self, event: Event) -> None:
        self.tokens += event.tokens
        self.log_probs += event.log_probs
        self.top_log_probs += event.top_log_probs
        if event.context_embedding:
            self.embedding = np.frombuffer(event.context_embedding, np.float32)
        if event.extra is not None:
            self.context_logits += event.extra.context_logits
            self.generation_logits += event.extra.generation_logits
            self.context_log_prob += event.extra.context_log_prob
            self.perf = event.extra.perf or self.perf
        if event.finish == "error":
            raise BY_CODE.get(event.code, TridecodeError)(event.error)
        if event.finish == "deadline":
            raise DeadlineError(event.error)
        self.finish = event.finish


class OfflineEngine:
    """Submit sequences, step, read `generations`.

    If requests fail or pass their deadline in a step, the step raises the error of the first one after the
    other generations have received their events.
    """

    def __init__(self, engine: Engine, keep_logits: bool = False, tokenizer_dir: Path | None = None):
        self.engine = engine
        self.scheduler = make_scheduler(engine, tokenizer_dir)
        if engine.state.host is not None:
            engine.state.host.pinning.start()
            engine.state.host.pinning.join()
        self.generations: list[Generation] = []
        self._pending: deque[tuple[StepPlan, Pending]] = deque()
        if keep_logits:
            engine.on_logits = self._keep_logits

    @classmethod
    def load(
        cls,
        directory: str | Path,
        config: EngineConfig | None = None,
        keep_logits: bool = False,
        tokenizer_dir: Path | None = None,
    ) -> OfflineEngine:
        """Load a weight directory. config: as in config.pbtxt; default: fp32, on a GPU if there is one.
        tokenizer_dir: folder of the tokenizer, for requests with a structured output.

        Requests have no deadline, whatever config says, because most of a large batch wait long.
        """
        model = read_model_config(Path(directory))
        # features between steps are off: no loop runs them here
        without: dict[str, Any] = {feature.switch: 0 for feature in BACKGROUND}
        config = replace(config or EngineConfig(), request_timeout_s=math.inf, **without)
        device = choose_device(config)
        engine = load_engine(Path(directory), model, resolve(config, model, device), SingleRank(), device)
        return cls(engine, keep_logits, tokenizer_dir)

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model_config

    def _keep_logits(self, plan: StepPlan, logits: Tensor) -> None:
        rows = [sequence for sequence, count in zip(plan.sequences, plan.samples) if count]
        for sequence, row in zip(rows, logits.float().cpu().numpy().copy()):
            self.generations[sequence.group.request].logits.append(row)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        lora_name: str = "",
        learned: LearnedPrompt | None = None,
        session: SessionRound | None = None,
        structured_output: StructuredOutput | None = None,
    ) -> int:
        """Submit a request and return its index in `generations`.

        lora_name: name of its adapter. learned: the table of its virtual tokens. session: the round, if it
        belongs to a session.
        structured_output: what the answer obeys.
        """
        number = len(self.generations)
        self.generations.append(Generation())
        request = SequenceRequest(
            np.asarray(prompt, np.int32).tobytes(), params, lora_name, learned, structured_output
        )
        self.scheduler.submit(_DOOR, Submit(number, [request], session=session))
        return number

    def step(self) -> bool:
        """Run one step; return False if there was nothing to do.

        With pipeline stages, the oldest step is committed when each stage has one in flight, or when there
        is nothing to launch.
        """
        plan = self.scheduler.plan()
        if plan is not None:
            self._pending.append((plan, self.engine.launch(plan)))
        if self._pending and (plan is None or len(self._pending) >= self.engine.micro_batches):
            oldest, step = self._pending.popleft()
            self._take(self.scheduler.commit(oldest, step.wait()))
        elif plan is None:
            self._take(self.scheduler.take_events())
            if not self.scheduler.can_step:  # adapters are being loaded
                time.sleep(0.001)
            return False
        return True

    def _take(self, events: list[tuple[bytes, Event]]) -> None:
        errors = []
        for _, event in events:
            try:
                self.generations[event.request].take_of(event.sequence, event)
            except TridecodeError as error:
                errors.append(error)
        if errors:  # once the other generations have their events
            raise errors[0]

    def run(self) -> None:
        """Step until every request has ended."""
        while self.scheduler.has_work or self._pending:
            self.step()

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Generation]:
        """Generate from all prompts together, until all have ended."""
        numbers = [self.submit(prompt, params) for prompt in prompts]
        self.run()
        return [self.generations[number] for number in numbers]


def run_greedy(
    directory: str | Path,
    prompts: list[list[int]],
    new_tokens: int,
    config: EngineConfig | None = None,
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Return exactly `new_tokens` greedy tokens for each prompt, and their logits, (new_tokens, V) float32
    per prompt.
    """
    config = config or EngineConfig(max_sequences=16)
    offline = OfflineEngine.load(
        directory, replace(config, max_queued_requests=max(len(prompts), 1)), keep_logits=True
    )
    with torch.inference_mode():
        done = offline.generate(prompts, SamplingParams(max_tokens=new_tokens))
    return [generation.tokens for generation in done], [np.stack(generation.logits) for generation in done]


def read_prompts(
    directory: str | Path, prompts: Iterable[list[int]], config: EngineConfig
) -> Iterator[np.ndarray]:
    """Yield the logits at each token of each prompt, (T, V) float32, one prompt after the other."""
    offline = OfflineEngine.load(directory, config)
    wanted = SamplingParams(max_tokens=1, return_context_logits=True)
    for ids in prompts:
        with torch.inference_mode():
            (done,) = offline.generate([ids], wanted)
        yield np.frombuffer(bytearray(done.context_logits), np.float32).reshape(len(ids), -1)
        done.context_logits = b""  # the engine keeps its generations
