"""Reads the target's activations of texts, such as the last hidden states, from the steps of its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.progress import counter
from tridecode.tools.train_draft.texts import Text


class Source(NamedTuple):
    """Activations that are read for each token: `read` returns (num_tokens, columns) of a launched plan."""

    columns: int
    read: Callable[[StepPlan], Tensor]


def read_hidden(engine: OfflineEngine, texts: Sequence[Text]) -> list[Tensor]:
    """Return the target's last hidden states of each text, (tokens, C) on the CPU, in the engine's dtype.

    They are the inputs of its head, after the final norm if the model has one.
    """
    (found,) = read_states(engine, texts, [hidden_source(engine)])
    return found


def hidden_source(engine: OfflineEngine) -> Source:
    """Return the source of the inputs of the target's head."""
    x = engine.engine.state.work.hidden
    return Source(x.shape[1], lambda plan: _normed(engine, x[: plan.num_tokens]))


@torch.inference_mode()
def read_states(
    engine: OfflineEngine, texts: Sequence[Text], sources: Sequence[Source]
) -> list[list[Tensor]]:
    """Return, for each source, its values of each text, (tokens, columns) on the CPU, in the engine's
    dtype."""
    config, dtype = engine.engine.config, engine.engine.state.dtype
    assert config.max_sequence_tokens is not None
    found = [[torch.empty(len(text.ids), one.columns, dtype=dtype) for text in texts] for one in sources]
    held = [[_bytes(states) for states in one] for one in found]
    first = len(engine.generations)
    launch = engine.engine.launch

    def launch_and_read(plan: StepPlan):
        pending = launch(plan)
        values = [_bytes(source.read(plan).cpu()) for source in sources]
        for row, sequence in enumerate(plan.sequences):
            start, stop = plan.query_starts[row], plan.query_starts[row + 1]
            place = plan.positions[start] % config.max_sequence_tokens
            for states, kept in zip(values, held):
                kept[sequence.group.request - first][place : place + stop - start] = states[start:stop]
        return pending

    params = SamplingParams(max_tokens=1, cache="off")
    engine.engine.launch = launch_and_read  # type: ignore[method-assign]
    try:
        for text in texts:
            engine.submit(text.ids.tolist(), params)
        with counter("reading hidden states", len(texts)) as show:
            while engine.step():
                show(sum(bool(one.finish) for one in engine.generations[first:]))
    finally:
        engine.engine.launch = launch  # type: ignore[method-assign]
    return found


def _bytes(states: Tensor) -> np.ndarray:
    """Return a byte view of rows on the CPU. numpy copies small parts in one thread; synchronising torch's
    threads would take longer than the copy."""
    return states.view(torch.uint8).numpy()


def _normed(engine: OfflineEngine, x: Tensor) -> Tensor:
    state = engine.engine.state
    norm = state.model.final_norm
    if norm is None:
        return x
    out = torch.empty_like(x)
    state.ops.norm(x, norm, out=out)
    return out
