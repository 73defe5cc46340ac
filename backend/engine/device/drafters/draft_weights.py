"""A draft model on one rank: its decoder and the buffers of its activations."""

from __future__ import annotations

from dataclasses import replace

from tridecode.backend import models
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.ranks.parallel import Ranks
from tridecode.backend.models.context import Workspace
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import share_size

#: tokens of a row of a forward that draws the first draft, and of the others
FIRST, NEXT = 2, 1


def draft_tokens(config: EngineConfig) -> int:
    """Return the tokens of the largest forward of a drafter that draws one token after the other."""
    assert config.max_step_tokens is not None
    return max(config.max_step_tokens, FIRST * config.slots)


class DraftModel:
    """A model of any family with the target's vocabulary, on the target's ranks: no pipeline stages.

    config: resolved. work: the target's workspace, whose logits both use, one after the other.
    """

    def __init__(
        self, model: ModelConfig, weights: Weights, ranks: Ranks, config: EngineConfig, work: Workspace
    ):
        assert config.max_sequence_tokens is not None
        self.config = model
        self.model = models.family(model.family).model(model, weights, ranks, config.max_sequence_tokens)
        dtype, device, size = work.hidden.dtype, work.hidden.device, ranks.tensor_size
        own = Workspace.allocate(model, draft_tokens(config), config.slots, size, dtype, device, 1)
        self.work = replace(own, logits=work.logits)

    def block_shapes(self, block_tokens: int, tensor_size: int) -> list[tuple[int, int, int, int]]:
        """Return (2, kv heads, tokens, head size) of a block, for each layer."""
        layers = [self.config.of_layer(layer) for layer in range(self.config.num_layers)]
        return [
            (2, share_size(layer.num_kv_heads, tensor_size), block_tokens, layer.head_size)
            for layer in layers
        ]
