"""Trains one-pass heads on the target's hidden states; contains the parts that all drafters share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from tridecode.backend.weights.draft_files import usual_width
from tridecode.tools.progress import counter
from tridecode.tools.train_draft.heads import Heads
from tridecode.tools.train_draft.texts import Text

#: loss weight of a draft relative to the draft before it: behind a wrong draft, a right one is worth nothing
DECAY = 0.8
_WARM_UP = 0.05  # share of the steps with a rising learning rate
_CLIP = 1.0  # largest gradient norm
_ROWS = 512  # positions whose logits are computed together


@dataclass(frozen=True)
class Plan:
    """The training options. width: size of the inner layer; None: width_of. batch: positions per training
    step. rate: peak learning rate. seed: determines initial weights and the order of positions."""

    depth: int
    width: int | None = None
    epochs: int = 6
    batch: int = 1024
    rate: float = 1e-3
    seed: int = 0

    def width_of(self, hidden: int) -> int:
        """Return the size of the inner layer for a hidden size."""
        return self.width or usual_width(hidden)


@dataclass(frozen=True)
class States:
    """The concatenated texts, one row per token.

    hidden: (T, C) on the CPU. ids: (T,) int64. ends: (T,) int64, first row after each row's text. places:
    rows to learn from.
    """

    hidden: Tensor
    ids: Tensor
    ends: Tensor
    places: np.ndarray

    def following(self, rows: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return the rows whose states predict the `depth` tokens after each row's next token, and whether
        they belong to its text; both (B, depth)."""
        found = rows[:, None] + torch.arange(1, depth + 1)
        return found.clamp(max=len(self.ids) - 1), found < self.ends[rows][:, None]


def states_of(texts: Sequence[Text], hidden: Sequence[Tensor]) -> States:
    """Concatenate texts and their hidden states, (tokens, C) each.

    The next token of a row is the newest one when drafts are made. A drafter learns from rows whose next
    token belongs to the answer and is not its last.
    """
    lengths = np.array([len(text.ids) for text in texts])
    firsts = lengths.cumsum() - lengths
    places = [
        np.arange(first + text.prompt - 1, first + len(text.ids) - 2) for first, text in zip(firsts, texts)
    ]
    return States(
        torch.cat(list(hidden)),
        torch.from_numpy(np.concatenate([text.ids for text in texts])).long(),
        torch.from_numpy(np.repeat(lengths.cumsum(), lengths)),
        np.concatenate(places),
    )


class Vocabulary:
    """The token ids over which a drafter learns, and their rows of the target's head.

    A drafter learns the target's distribution of each token, which the head computes from the target's hidden
    state. Training on the tokens alone needs more texts. A GPU uses all ids. A CPU uses the ids that occur in
    the texts, a tenth of the vocabulary or less; the logits of the others stay untrained and are rarely the
    largest.

    ids: of the texts. head: (V, C) on the device; bias: (V,) or None.
    """

    def __init__(self, ids: Tensor, head: Tensor, bias: Tensor | None):
        if head.device.type == "cpu":
            chosen = ids.unique()
            head, bias = head[chosen], None if bias is None else bias[chosen]
        dtype = torch.bfloat16 if uses_bf16(head.device) else torch.float32
        self._head, self._bias = head.to(dtype), None if bias is None else bias.to(dtype)

    def loss(self, hidden: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the summed cross entropy between the target's distributions and the drafter's.

        hidden, target: (B, C), inputs of the head. weights: (B,), loss weights; None: 1.
        """
        with torch.no_grad():
            wanted = self._logits(target).softmax(-1)
        if weights is None:
            return cross_entropy(self._logits(hidden), wanted, reduction="sum")
        return cross_entropy(self._logits(hidden), wanted, reduction="none") @ weights

    def _logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden.to(self._head.dtype), self._head, self._bias).float()


def train_heads(
    states: States, embedding: Tensor, head: Tensor, bias: Tensor | None, plan: Plan, device: torch.device
) -> Heads:
    """Return trained heads in float32 on `device`. embedding, head: (V, C) on it; bias: (V,) or None.

    Equal seeds give equal heads on one machine.
    """
    torch.manual_seed(plan.seed)
    hidden = states.hidden.shape[1]
    heads = Heads(hidden, plan.width_of(hidden), plan.depth).to(device)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=plan.rate, weight_decay=0.01)
    order = np.random.default_rng(plan.seed)
    per_epoch = -(-len(states.places) // plan.batch)
    steps = per_epoch * plan.epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    half, vocabulary = autocast(device), Vocabulary(states.ids, head, bias)
    with counter("training, steps", steps) as show:
        for step in range(steps):
            if step % per_epoch == 0:
                shuffled = order.permutation(states.places)
            start = step % per_epoch * plan.batch
            rows = torch.from_numpy(shuffled[start : start + plan.batch])
            after, inside = states.following(rows, plan.depth)
            target = states.hidden[after].to(device)
            z = states.hidden[rows].to(device, torch.float32)
            e = embedding[states.ids[rows + 1].to(device)].float()
            with half:
                guesses = heads(z, e)
            _backward(guesses, target, inside.to(device), vocabulary)
            torch.nn.utils.clip_grad_norm_(heads.parameters(), _CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            show(step + 1)
    return heads


def _backward(guesses: Tensor, target: Tensor, inside: Tensor, vocabulary: Vocabulary) -> None:
    """Accumulate the gradients of one head after the other: all heads' logits together would be large.

    guesses, target: (B, depth, C). inside: (B, depth), mask of the positions with a target.
    """
    leaf = guesses.detach().float().requires_grad_()
    for number in range(guesses.shape[1]):
        rows = inside[:, number].nonzero().squeeze(1)
        if len(rows):
            loss = vocabulary.loss(leaf[rows, number], target[rows, number]) / len(rows)
            (loss * DECAY**number).backward()
    assert leaf.grad is not None
    guesses.backward(leaf.grad.to(guesses.dtype))


def train_in_groups(
    parameters: Iterable[torch.nn.Parameter],
    lengths: Sequence[int],
    plan: Plan,
    backward: Callable[[list[int]], None],
) -> None:
    """Train parameters in place on whole texts, about plan.batch positions per step.

    lengths: tokens of each text. backward: accumulates the gradients of the texts with these indices.
    """
    held = list(parameters)
    optimizer = torch.optim.AdamW(held, lr=plan.rate, weight_decay=0.01)
    groups = _groups(lengths, plan.batch)
    steps, order = len(groups) * plan.epochs, np.random.default_rng(plan.seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    with counter("training, steps", steps) as show:
        for step in range(steps):
            if step % len(groups) == 0:
                shuffled = order.permutation(len(groups))
            backward(groups[shuffled[step % len(groups)]])
            torch.nn.utils.clip_grad_norm_(held, _CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            show(step + 1)


def _groups(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Group texts of similar length into batches of about `tokens` tokens; return the indices."""
    groups: list[list[int]] = [[]]
    for index in np.argsort(lengths, kind="stable").tolist():
        if groups[-1] and lengths[index] * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(index)
    return groups


def backward_rows(
    hidden: Tensor, places: Tensor, target: Tensor, vocabulary: Vocabulary, weights: Tensor | None = None
) -> None:
    """Accumulate the gradients of the mean loss over some positions of a batch, in chunks of _ROWS logits.

    hidden: (B, L, C), states of the drafter. places: (n,), flattened positions. target: (n, C), the target's
    states at these positions. weights: (n,), loss weights; None: 1.
    """
    leaf = hidden.detach().flatten(0, 1).float().requires_grad_()
    for first in range(0, len(places), _ROWS):
        part = slice(first, first + _ROWS)
        factors = None if weights is None else weights[part]
        (vocabulary.loss(leaf[places[part]], target[part], factors) / len(places)).backward()
    assert leaf.grad is not None
    hidden.backward(leaf.grad.view_as(hidden).to(hidden.dtype))


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate of a step relative to its peak: linear warm-up, then cosine decay to 0."""
    rise = max(1, int(steps * _WARM_UP))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def autocast(device: torch.device) -> torch.autocast:
    """Return a context that computes matrix products in bfloat16 on devices where this is faster."""
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(device))


def uses_bf16(device: torch.device) -> bool:
    """Return whether products in bfloat16 are faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
