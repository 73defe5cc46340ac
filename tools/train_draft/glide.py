"""Trains a GLIDE layer, a decoder layer that also attends to the KV cache of one layer of its target.

Du et al., arXiv 2402.02082: self-attention, cross-attention to the target's cache, MLP. The layer runs
between the target's embedding and its final norm and head. While it drafts, the target's cache lacks the
newest token and the drafts, so the j-th of these tokens attends to the target's cache without the last j
tokens. In training a text is cut into blocks of `depth` positions at a random offset, and j is the index in
the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, silu

from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.models.context import Context
from tridecode.backend.weights.draft_files import DraftInfo
from tridecode.kernels.formats.kv_rounding import expanded
from tridecode.kernels.operands import Heads, Norm, Rope
from tridecode.tools.train_draft.hidden import Source, hidden_source, read_states
from tridecode.tools.train_draft.texts import Text
from tridecode.tools.train_draft.training import (
    DECAY,
    Plan,
    Vocabulary,
    autocast,
    backward_rows,
    train_in_groups,
)

EPS = 1e-5
_ROWS = 256  # positions whose logits are computed together


@dataclass(frozen=True)
class Seen:
    """The target's states of one text of L tokens, on the CPU.

    hidden: (L, C), inputs of the target's head. embedded: (L, C), inputs of its first layer. cache: (L, 2, K,
    D), the cached keys and values of the layer that the GLIDE layer reads.
    """

    hidden: Tensor
    embedded: Tensor
    cache: Tensor


def read_seen(engine: OfflineEngine, texts: Sequence[Text], layer: int) -> list[Seen]:
    """Return the target's states of each text. layer: index of the target's layer whose cache is read."""
    state = engine.engine.state
    heads = state.model.heads[layer]
    cache = Source(2 * heads.num_kv_heads * heads.head_size, lambda plan: _cached(engine, plan, layer))
    embedded = Source(state.model_config.hidden_size, lambda plan: _embedded(engine, plan))
    found = read_states(engine, texts, [hidden_source(engine), embedded, cache])
    shape = 2, heads.num_kv_heads, heads.head_size
    return [Seen(hidden, x, held.unflatten(1, shape)) for hidden, x, held in zip(*found)]


def _cached(engine: OfflineEngine, plan: StepPlan, layer: int) -> Tensor:
    """Return (num_tokens, 2 * K * D), the keys and values that a step has written."""
    state = engine.engine.state
    cache = state.caches[layer]
    places = torch.from_numpy(plan.kv_slots.astype(np.int64)).to(state.device)
    blocks, offsets = places // cache.block_tokens, places % cache.block_tokens
    held = [tensor[blocks, :, :, offsets] for tensor in cache.tensors]
    if cache.scales is not None:
        return expanded(held[0].view(cache.blocks.dtype), held[1], state.dtype).flatten(1)
    return held[0].flatten(1)


def _embedded(engine: OfflineEngine, plan: StepPlan) -> Tensor:
    """Return (num_tokens, C), the inputs of the first layer in a step that has been launched."""
    state, batch = engine.engine.state, engine.engine.buffers.latest
    x = torch.zeros(batch.num_tokens, state.model_config.hidden_size, dtype=state.dtype, device=state.device)
    state.model.embed(Context(state.ops, state.ranks, state.work, batch), x)
    return x[: plan.num_tokens]


class Glide(nn.Module):
    """The layer, followed by the target's final norm. Parameters have the tensor names of the file.

    heads: of the target's layer, for both attentions. norm: the target's final norm; None: it has none.
    """

    def __init__(self, info: DraftInfo, heads: Heads, norm: Norm | None):
        super().__init__()
        hidden, queries = info.hidden_size, info.num_heads * info.head_size
        keys = info.num_kv_heads * info.head_size
        self.input_layernorm = _RmsNorm(hidden)
        self.self_attn = _linears(
            q_proj=(hidden, queries), k_proj=(hidden, keys), v_proj=(hidden, keys), o_proj=(queries, hidden)
        )
        self.cross_attn_layernorm = _RmsNorm(hidden)
        self.cross_attn = _linears(q_proj=(hidden, queries), o_proj=(queries, hidden))
        self.post_attention_layernorm = _RmsNorm(hidden)
        inner = info.width
        self.mlp = _linears(gate_proj=(hidden, inner), up_proj=(hidden, inner), down_proj=(inner, hidden))
        self._heads, self._norm = heads, norm

    def forward(self, x: Tensor, cache: Tensor, sees: Tensor) -> Tensor:
        """Return (B, L, C), inputs of the target's head.

        x: (B, L, C), embedded tokens. cache: (B, L, 2, K, D) of the target. sees: (B, L), number of leading
        tokens of the cache to which each position attends, at least 1.
        """
        places = torch.arange(x.shape[1], device=x.device)
        h = self.input_layernorm(x)
        q, k, v = (self._split(self.self_attn[name](h)) for name in ("q_proj", "k_proj", "v_proj"))
        own = (places + 1).expand_as(sees)
        attended = self._attend(self._rotate(q), self._rotate(k), v, own)
        x = x + self.self_attn["o_proj"](attended)
        q = self._rotate(self._split(self.cross_attn["q_proj"](self.cross_attn_layernorm(x))))
        keys, values = cache.permute(2, 0, 3, 1, 4).to(q.dtype)  # (B, K, L, D)
        x = x + self.cross_attn["o_proj"](self._attend(q, keys, values, sees))
        h = self.post_attention_layernorm(x)
        x = x + self.mlp["down_proj"](silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))
        return self._finish(x)

    def _split(self, x: Tensor) -> Tensor:
        """Reshape (B, L, n * D) to (B, n, L, D)."""
        return x.unflatten(-1, (-1, self._heads.head_size)).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate (B, n, L, D) at positions 0 ... L - 1, if the target has rotary positions."""
        return x if self._heads.rope is None else _rotated(x, self._heads.rope)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
        """Return (B, L, H * D), attention of each position to the first `sees` (B, L) tokens, within the
        window if the layer has one."""
        heads, length = self._heads, q.shape[2]
        if heads.num_heads > heads.num_kv_heads:
            k, v = (x.repeat_interleave(heads.num_heads // heads.num_kv_heads, 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() * heads.scale
        if heads.softcap:
            scores = heads.softcap * (scores / heads.softcap).tanh()
        keys = torch.arange(length, device=q.device)
        if heads.key_bias is not None:
            scores = scores + heads.key_bias[:, None, keys.clamp(max=heads.key_bias.shape[1] - 1)]
        elif heads.slopes is not None:
            scores = scores + heads.slopes[:, None, None] * (keys - keys[:, None])
        hidden = keys >= sees[:, :, None]
        if heads.window:
            hidden = hidden | (keys < sees[:, :, None] - heads.window)
        shares = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        return (shares.to(v.dtype) @ v).transpose(1, 2).flatten(2)

    def _finish(self, x: Tensor) -> Tensor:
        norm = self._norm
        if norm is None:
            return x
        weight, x32 = norm.weight.float(), x.float()
        if norm.bias is None:
            return _unit(x32, norm.eps) * weight
        return layer_norm(x32, weight.shape, weight, norm.bias.float(), norm.eps)


class _RmsNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (_unit(x.float(), EPS) * self.weight.float()).to(self.weight.dtype)


def _unit(x: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


def _rotated(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = (table[: x.shape[-2]] for table in (rope.cos, rope.sin))
    first, rest = x[..., : rope.size].float(), x[..., rope.size :]
    if rope.interleaved:
        a, b = first[..., ::2], first[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = first.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def train_glide(
    glide: Glide,
    texts: Sequence[Text],
    seen: Sequence[Seen],
    head: Tensor,
    bias: Tensor | None,
    plan: Plan,
) -> None:
    """Train a layer in place on the answers of the texts. head: (V, C), bias: (V,), on its device."""
    vocabulary = Vocabulary(torch.cat([torch.from_numpy(text.ids).long() for text in texts]), head, bias)
    starts = np.random.default_rng(plan.seed)

    def backward(group: list[int]) -> None:
        _step(glide, [(texts[index], seen[index]) for index in group], vocabulary, plan.depth, starts)

    train_in_groups(glide.parameters(), [len(text.ids) for text in texts], plan, backward)


def _step(
    glide: Glide,
    texts: Sequence[tuple[Text, Seen]],
    vocabulary: Vocabulary,
    depth: int,
    starts: np.random.Generator,
) -> None:
    """Accumulate the gradients of a batch of texts, over the tokens of the answers except the first."""
    longest, device = max(len(text.ids) for text, _ in texts), next(glide.parameters()).device
    x = _padded([one.embedded for _, one in texts], longest)
    cache = _padded([one.cache for _, one in texts], longest)
    sees, places, drafts = torch.ones(len(texts), longest, dtype=torch.long), [], []
    for row, (text, _) in enumerate(texts):
        mine = np.arange(text.prompt, len(text.ids) - 1)
        behind = mine - text.prompt  # the newest token of the first block is the first of the answer
        number = np.minimum((behind + starts.integers(depth)) % depth, behind)
        sees[row, mine] = torch.from_numpy(mine - number)
        places.append(row * longest + mine)
        drafts.append(number)
    target = torch.cat([one.hidden[text.prompt : len(text.ids) - 1] for text, one in texts])
    with autocast(device):
        hidden = glide(x.to(device, torch.float32), cache.to(device), sees.to(device))
    weights = torch.from_numpy(DECAY ** np.concatenate(drafts)).to(device, torch.float32)
    rows = torch.from_numpy(np.concatenate(places)).to(device)
    backward_rows(hidden, rows, target.to(device), vocabulary, weights)


def _padded(parts: Sequence[Tensor], longest: int) -> Tensor:
    """Return (B, longest, ...) of tensors (L, ...), with zeros at the end."""
    out = parts[0].new_zeros(len(parts), longest, *parts[0].shape[1:])
    for row, part in zip(out, parts):
        row[: len(part)] = part
    return out


@torch.no_grad()
def glide_drafts(
    glide: Glide, text: Text, seen: Seen, depth: int, head: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the drafts after each newest token of a text's answer, (n, depth).

    Draft j is predicted from the text up to draft j - 1, not from earlier drafts. Both agree as long as all
    earlier drafts equal the text, and drafts after a wrong one do not count.
    """
    length, dtype = len(text.ids), glide.input_layernorm.weight.dtype
    x, cache = (part[None].to(head.device, dtype) for part in (seen.embedded, seen.cache))
    places, best = torch.arange(length, device=head.device), []
    for number in range(depth):
        hidden = glide(x, cache, (places - number).clamp(min=1)[None])[0].to(head.dtype)
        best.append(torch.cat([linear(part, head, bias).argmax(-1) for part in hidden.split(_ROWS)]))
    newest = torch.arange(text.prompt, length - 1)[:, None]
    at = (newest + torch.arange(depth)).clamp(max=length - 1)
    return torch.stack(best).cpu()[torch.arange(depth), at]
