"""Benchmarks of sampling and of whole decode steps, with shapes of BLOOM-7B1 and LLaMA-3-8B."""

# ruff: noqa: B023  every closure below is called within its loop iteration

from __future__ import annotations

from collections.abc import Iterator

import torch

from tridecode.kernels.bench.measure import Result, microseconds, over
from tridecode.kernels.bench.rig import Rig
from tridecode.kernels.bench.shapes import SHAPES, ModelShape
from tridecode.kernels.operands import CacheLayer, DecoderLayer, Heads, Linear, Norm, Rope


def sample(rig: Rig) -> Iterator[Result]:
    vocab = 250880
    kinds: dict[str, dict[str, float]] = {
        "greedy": {"top_k": 1},
        "greedy, log-probs": {"top_k": 1, "return_log_probs": 1},
        "whole vocabulary": {},
        "top-k 50": {"top_k": 50},
        "top-k 50, top-p 0.9": {"top_k": 50, "top_p_now": 0.9},
        "top-p 0.9": {"top_p_now": 0.9},
        "greedy, penalties": {"top_k": 1, "presence_penalty": 1.0},
    }
    for rows in (1, 8, 64, 256):
        slots = rig.ints(range(rows))
        tokens, log_probs = slots.clone(), torch.zeros(rows, device=rig.device)
        # like a language model's logits: a few are far above the rest
        logits = [
            torch.randn(rows, vocab, device=rig.device) * 2 for _ in range(max(2, min(40, 128 // rows)))
        ]
        for each in logits:
            each.scatter_add_(
                1,
                torch.randint(0, vocab, (rows, 64), device=rig.device),
                torch.rand(rows, 64, device=rig.device) * 18,
            )
        peer = microseconds(over(logits, lambda each: each.argmax(-1)), len(logits))
        for name, columns in kinds.items():
            state = rig.state(rows, vocab, **columns)
            mine = microseconds(
                over(
                    logits,
                    lambda each: rig.ops.sample(each, slots, state, tokens=tokens, log_probs=log_probs),
                ),
                len(logits),
            )
            yield Result(
                "sample",
                f"{rows} rows of {vocab}, {name}",
                mine,
                4 * rows * vocab,
                peer=peer if columns == {"top_k": 1} else None,
            )


def step(rig: Rig) -> Iterator[Result]:
    """Time a whole decode step with random weights, sampling included, as replayed by the engine's graphs."""
    for label in ("BLOOM-7B1", "LLaMA-3-8B"):
        yield from _steps(rig, label, SHAPES[label.lower()])


def _steps(rig: Rig, label: str, model: ModelShape) -> Iterator[Result]:
    hidden, heads, kv_heads, inner = model.hidden, model.heads, model.kv_heads, model.inner
    num_layers, vocab, gated, block, context = model.layers, model.vocab, model.gated, 32, 544
    shape = Heads(
        heads, kv_heads, 128, 128**-0.5, None, None if gated else torch.rand(heads, device=rig.device)
    )
    if gated:
        angles = torch.rand(1024, 64, device=rig.device)
        shape = Heads(heads, kv_heads, 128, 128**-0.5, Rope(angles.cos(), angles.sin()))

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear(
            rig.normal(outputs, inputs, scale=0.01), None if gated else rig.normal(outputs, scale=0.1)
        )

    def norm() -> Norm:
        return Norm(rig.normal(hidden), None if gated else rig.normal(hidden), 1e-5)

    layers = [
        DecoderLayer(
            attention_norm=norm(),
            qkv=linear(shape.qkv_size, hidden),
            dense=linear(hidden, hidden),
            mlp_norm=norm(),
            up=linear(inner * (1 + gated), hidden),
            down=linear(hidden, inner),
        )
        for _ in range(num_layers)
    ]
    head, last_norm = Linear(rig.normal(vocab, hidden, scale=0.01)), norm()
    parts = [part for layer in layers for part in (layer.qkv, layer.dense, layer.up, layer.down)]
    layer_bytes = 2 * sum(part.dense.numel() for part in parts)
    activation = "swiglu" if gated else "gelu_tanh"
    for rows in (1, 2, 4, 8, 32, 64, 128, 256):
        columns = context // block + 1
        caches = [CacheLayer(rig.normal(rows * columns, 2, kv_heads, block, 128)) for _ in layers]
        tables = torch.randperm(rows * columns, device=rig.device).to(torch.int32).view(rows, columns)
        batch = rig.batch([context] * rows, [1] * rows, tables, rows)
        batch.kv_slots.copy_(tables[:, (context - 1) // block] * block + (context - 1) % block)
        x, qkv, attended = (
            rig.normal(rows, hidden),
            rig.normal(rows, shape.qkv_size),
            rig.normal(rows, heads * 128),
        )
        mlp, logits = rig.normal(rows, inner), torch.zeros(rows, vocab, device=rig.device)
        state, slots = rig.state(rows, vocab, top_k=1), rig.ints(range(rows))
        tokens, log_probs = slots.clone(), torch.zeros(rows, device=rig.device)

        def one_by_one() -> None:
            for layer, cache in zip(layers, caches):
                rig.ops.project_qkv(x, layer.qkv, layer.attention_norm, shape, batch, cache, out=qkv)
                rig.ops.decode_attention(qkv, shape, batch, cache, out=attended)
                rig.ops.linear(attended, layer.dense, residual=x, out=x)
                rig.ops.linear(x, layer.up, norm=layer.mlp_norm, activation=activation, out=mlp)
                rig.ops.linear(mlp, layer.down, residual=x, out=x)

        def step() -> None:
            one_by_one()
            rig.ops.linear(x, head, norm=last_norm, out=logits)
            rig.ops.sample(logits, slots, state, tokens=tokens, log_probs=log_probs)

        case = f"{label} rows {rows} context {context}"
        moved = layer_bytes + num_layers * rows * context * kv_heads * 512
        moved += 2 * vocab * hidden
        yield Result("step", case, microseconds(step, 1), moved, (layer_bytes + 2.0 * vocab * hidden) * rows)
        caches.clear()
