"""GPT-2: learned positions, pre-LayerNorm, fused QKV, GELU. Radford et al. 2019."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from tridecode.backend.config import ModelConfig
from tridecode.backend.models import Family
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.gpt_section import GPT2_FLAGS, gpt_section_keys, has_flags, read_gpt_section
from tridecode.backend.models.layers import Context, Ranks, Weights, make_heads
from tridecode.backend.models.specs import Layout
from tridecode.kernels.ops import CacheLayer

LAYOUT = Layout(positions=True)


class Model(Decoder):
    """GPT-2 on one rank."""

    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks, num_positions: int):
        super().__init__(config, weights, ranks, LAYOUT)
        self.positions = weights.tensor("model.wpe")
        self.heads = [make_heads(config, ranks)] * len(self.layers)

    def embed(self, context: Context, x: Tensor) -> None:
        batch = context.batch
        context.ops.embed(
            batch.token_ids, self.embedding, positions=batch.positions, position_table=self.positions, out=x
        )

    def forward(self, context: Context, x: Tensor, caches: list[CacheLayer]) -> None:
        self.sequential(context, x, self.config.activation, caches)


FAMILY = Family(
    name="gpt",
    title="GPT-2 (learned positions)",
    section="gpt",
    model_type="GPT",
    recognises=partial(has_flags, flags=GPT2_FLAGS),
    read=partial(read_gpt_section, "gpt"),
    keys=partial(gpt_section_keys, flags=GPT2_FLAGS),
    weight_specs=LAYOUT.specs,
    model=Model,
)
