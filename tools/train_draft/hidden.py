"""The target's hidden states of texts, read from its engine in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.progress import counter
from tridecode.tools.train_draft.texts import Text


@torch.inference_mode()
def read_hidden(engine: OfflineEngine, texts: Sequence[Text]) -> list[Tensor]:
    """Return the target's last hidden states of each text, (tokens, C) on the CPU, in the engine's dtype.

    These are the inputs of its head: behind the final norm, if the model has one.
    """
    config, work = engine.engine.config, engine.engine.state.work
    assert config.max_sequence_tokens is not None
    found = [torch.empty(len(text.ids), work.hidden.shape[1], dtype=work.hidden.dtype) for text in texts]
    held = [_bytes(states) for states in found]
    first = len(engine.generations)
    launch = engine.engine.launch

    def launch_and_read(plan: StepPlan):
        pending = launch(plan)
        states = _bytes(_normed(engine, work.hidden[: plan.num_tokens]).cpu())
        for row, sequence in enumerate(plan.sequences):
            start, stop = plan.query_starts[row], plan.query_starts[row + 1]
            place = plan.positions[start] % config.max_sequence_tokens
            held[sequence.group.request - first][place : place + stop - start] = states[start:stop]
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
    """Return a view of rows on the CPU. numpy copies small parts in one thread; on a machine with other work,
    torch's threads take longer to meet than to copy."""
    return states.view(torch.uint8).numpy()


def _normed(engine: OfflineEngine, x: Tensor) -> Tensor:
    state = engine.engine.state
    norm = state.model.final_norm
    if norm is None:
        return x
    out = torch.empty_like(x)
    state.ops.norm(x, norm, out=out)
    return out
