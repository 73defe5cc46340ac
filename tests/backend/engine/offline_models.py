"""An offline engine over a tiny Hugging Face model, and what transformers says of the same prompts."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from tests.backend.engine.step_watch import WatchedEngine
from tests.backend.hf_models import HfWeights, model_config
from tridecode import kernels
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device import preparation
from tridecode.backend.engine.device.file_weights import DTYPES
from tridecode.backend.engine.device.preparation import build_engine
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.backend.engine.host_tier.opening import open_store
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.ranks.parallel import SingleRank
from tridecode.backend.weights.draft_files import TrainedDraft

#: where offline engines run: the tests of requests hold on a GPU too (TRIDECODE_TEST_DEVICE=cuda)
DEVICE = os.environ.get("TRIDECODE_TEST_DEVICE", "cpu")
#: rounding in fp32 over two tiny layers with logits of the order of 10
FP32_LOGITS = 2e-4


def fp32_bound(logits: np.ndarray) -> float:
    """FP32_LOGITS, or in proportion to larger logits."""
    return max(FP32_LOGITS, 2e-5 * float(np.abs(logits).max()))


def offline_engine(
    model: torch.nn.Module,
    device: str = DEVICE,
    keep_logits: bool = True,
    tokenizer_dir: Path | None = None,
    host_fd: int | None = None,
    draft: torch.nn.Module | None = None,
    trained: TrainedDraft | None = None,
    **settings,
) -> OfflineEngine:
    """Return an engine with small blocks, small steps and few slots, so that chunking, joining and reuse
    occur. host_fd: memory file of a host tier. draft, trained: the draft model, with speculation="draft", or
    a trained drafter."""
    defaults = dict(max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=16 << 20)
    place, config = torch.device(device), model_config(model.config)
    engine_config = resolve(EngineConfig(**{**defaults, **settings}), config, place)
    ops = kernels.select(place, engine_config.batch_invariant)
    weights = HfWeights(model, ops, DTYPES[engine_config.data_type], device)
    host = None if host_fd is None else partial(open_store, directory=Path("no files"), fd=host_fd)
    drafting = None
    if draft is not None:
        drafting = model_config(draft.config), HfWeights(draft, ops, DTYPES[engine_config.data_type], device)
    engine = build_engine(
        config,
        engine_config,
        weights,
        ops,
        SingleRank(),
        place,
        open_host=host,
        draft=drafting,
        trained=trained,
    )
    return WatchedEngine(engine, keep_logits, tokenizer_dir)


def drafting_engine(model: torch.nn.Module, speculation: str, **settings) -> OfflineEngine:
    """An engine whose rows get every draft, because no costs of steps are measured."""
    with mock.patch.object(preparation, "measured_costs", lambda engine, most_queries: None):
        return offline_engine(model, keep_logits=False, speculation=speculation, **settings)


def run_in_flight(offline: OfflineEngine, depth: int, join: Callable[[], bool] = lambda: False) -> None:
    """Run all requests to their ends with up to `depth` steps launched before the oldest is committed.

    join: called before each plan; it may submit requests, and returns whether it will submit more.
    """
    pending: deque = deque()
    more = join()
    while offline.scheduler.has_work or pending or more:
        plan = offline.scheduler.plan()
        if plan is not None:
            pending.append((plan, offline.engine.launch(plan)))
        if pending and (plan is None or len(pending) >= depth):
            oldest, step = pending.popleft()
            offline._take(offline.scheduler.commit(oldest, step.wait()))
        elif plan is None:
            offline._take(offline.scheduler.take_events())
        more = join()


def run_ahead(offline: OfflineEngine) -> None:
    """Run all requests to their ends; each step is launched before the one before it is committed."""
    run_in_flight(offline, 2)


def prompts_of(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


@torch.inference_mode()
def hf_greedy(
    model: torch.nn.Module, prompt: list[int], new_tokens: int, *processors: LogitsProcessor
) -> tuple[list[int], np.ndarray]:
    """Tokens and (new_tokens, V) logits of transformers' generate, greedy, forced to length. The logits are
    those before the processors."""
    ids = torch.tensor([prompt], device=model.device)
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList(processors),
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack([step[0].float() for step in answer.logits])
    return answer.sequences[0, len(prompt) :].tolist(), logits.cpu().numpy()


def first_logits(model: torch.nn.Module, prompts: list[list[int]]) -> np.ndarray:
    """(prompts, V): transformers' logits of the first token after each prompt."""
    return np.stack([hf_greedy(model, prompt, 1)[1][0] for prompt in prompts])


@torch.inference_mode()
def context_embedding(model: torch.nn.Module, prompt: list[int]) -> np.ndarray:
    """(C,): the sum over the prompt of the last layer's output, before the final norm, in transformers."""
    decoder = getattr(model.base_model, "decoder", model.base_model)
    norms = [part for part in decoder.children() if "norm" in type(part).__name__.lower()]
    seen: list[torch.Tensor] = []
    hook = norms[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].sum(0)))
    model(torch.tensor([prompt]))
    hook.remove()
    return seen[0].numpy()


def rounding_bound(
    model: torch.nn.Module, prompts: list[list[int]], data_type: str, device: str = "cpu"
) -> float:
    """Return the largest allowed difference of 16-bit logits from those of transformers in fp32.

    It is twice the largest difference of transformers' own run in that dtype on that device, because the
    effect of rounding depends on the model."""
    half = copy.deepcopy(model).to(device, DTYPES[data_type])
    wanted = first_logits(model, prompts)
    return 2 * float(np.abs(first_logits(half, prompts) - wanted).max()) + 1e-4 * float(wanted.std())
