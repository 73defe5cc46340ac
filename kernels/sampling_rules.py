"""The sampling rules in plain torch: one table row per parameter, or group of parameters, that changes the
logits or limits the candidate ids.

LOGIT_RULES change the logits, KEEP_RULES then drop the ids below a bound; both apply in the order of the
tables. Reference.sample, the sampler over a shared vocabulary and the candidates of beams all use them.
csrc/sampling/sampling_row.cuh and sampling_draw.cuh are the other implementation; ops.py (sample) is the
contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tridecode.kernels.sampling_state import MOST_COUNTED, SlotRows

# ------------------------------------------------------------ which rows a rule acts on
#
# These read (n,) SLOT records, or one of them, on the host. A rule changes nothing in the other rows.


def greedy(records: np.ndarray) -> np.ndarray:
    """Return which rows take the largest logit."""
    return (records["top_k"] == 1) | (records["temperature"] == 0)


def is_penalised(records: np.ndarray) -> np.ndarray:
    return (
        (records["repetition_penalty"] != 1)
        | (records["presence_penalty"] != 0)
        | (records["frequency_penalty"] != 0)
    )


def needs_history(records: np.ndarray) -> np.ndarray:
    """Return which rows need the history of their sequence."""
    return (records["num_bad_words"] > 0) | (records["no_repeat_ngram_size"] > 0)


def _is_divided(records: np.ndarray) -> np.ndarray:
    return (records["temperature"] != 0) & (records["temperature"] != 1)


# ------------------------------------------------------------ rules that change logits


def _add_biases(x: Tensor, rows: SlotRows) -> None:
    ids, bits = rows.state.biases[rows.slots].unbind(-1)
    columns = ids.long() - rows.first_id
    is_here = torch.arange(ids.shape[1], device=x.device) < rows.column("num_biases")
    is_here &= (columns >= 0) & (columns < x.shape[1])
    values = bits.contiguous().view(torch.float32)
    x.scatter_add_(1, torch.where(is_here, columns, 0), torch.where(is_here, values, 0.0))


def _mask(x: Tensor, rows: SlotRows) -> None:
    """Exclude the ids whose bits are 0 in the mask of a slot that is masked."""
    own = rows.column("masked")[:, 0].long()
    masks = rows.state.masks[torch.where(own > 1, own, rows.slots)]
    ids = torch.arange(rows.first_id, rows.first_id + x.shape[1], device=x.device)
    words = masks[:, (ids // 32).clamp(max=masks.shape[1] - 1)]  # columns that pad a share have no bits
    is_possible = (words >> (ids % 32).int() & 1).bool() | (rows.column("masked") == 0)
    x.masked_fill_(~is_possible, -torch.inf)


def _ban_words(x: Tensor, rows: SlotRows) -> None:
    """Exclude the last id of each bad word whose other ids end the history."""
    ids, ends = rows.state.bad_ids[rows.slots].long(), rows.state.bad_ends[rows.slots].long()
    count, size = rows.column("num_bad_words").long(), ids.shape[1]
    length, history = rows.column("history_length").long(), rows.state.history
    places = torch.arange(size, device=x.device).expand_as(ids).contiguous()
    ends = torch.where(places < count, ends, size + 1)
    word = torch.searchsorted(ends, places, right=True).clamp(max=size - 1)  # the word of each position
    following = ends.gather(1, word) - 1 - places  # ids of the word after this one
    is_used, is_last = word < count, following == 0
    at = (length - following).clamp(0, history.shape[1] - 1)
    is_met = is_last | ((following <= length) & (history[rows.slots[:, None], at] == ids))
    misses = torch.zeros_like(ids).scatter_add_(1, word, (is_used & ~is_met).long())
    _exclude(x, ids, is_used & is_last & (misses.gather(1, word) == 0), rows)


def _ban_repeats(x: Tensor, rows: SlotRows) -> None:
    """Exclude the last id of each n-gram of the history whose other ids end the history."""
    history, size = rows.state.history[rows.slots], rows.column("no_repeat_ngram_size").long()
    length, most = rows.column("history_length").long(), history.shape[1]
    begins = torch.arange(most, device=x.device)[None]
    is_met = (size > 0) & (begins + size <= length)

    def at(places: Tensor) -> Tensor:
        return history.gather(1, places.clamp(0, most - 1).expand(len(x), -1))

    for place in range(int(rows.records["no_repeat_ngram_size"].max()) - 1):
        is_met &= (place >= size - 1) | (at(begins + place) == at(length - size + 1 + place))
    _exclude(x, at(begins + size - 1).long(), is_met, rows)


def _divide(x: Tensor, rows: SlotRows) -> None:
    temperature = rows.column("temperature")
    x /= torch.where(temperature == 0, 1.0, temperature)


def _penalise(x: Tensor, rows: SlotRows) -> None:
    counts, factor = rows.state.counts[rows.slots], rows.column("repetition_penalty")
    after = torch.where(x < 0, x * factor, x / factor)
    after -= rows.column("presence_penalty") + rows.column("frequency_penalty") * counts.float()
    torch.where(counts > 0, after, x, out=x)


def _hold_back_ends(x: Tensor, rows: SlotRows) -> None:
    ends = rows.column("end_ids").long()
    is_early = rows.column("generated") < rows.column("min_tokens")
    _exclude(x, ends, is_early & (ends >= 0), rows)


def _exclude(x: Tensor, ids: Tensor, is_excluded: Tensor, rows: SlotRows) -> None:
    """Set x (n, C) to minus infinity at the excluded ids (n, k) int64 that are among its columns."""
    columns = ids - rows.first_id
    is_here = is_excluded & (columns >= 0) & (columns < x.shape[1])
    mask = torch.zeros(len(x), x.shape[1] + 1, dtype=torch.bool, device=x.device)
    mask.scatter_(1, torch.where(is_here, columns, x.shape[1]), True)
    x.masked_fill_(mask[:, :-1], -torch.inf)


@dataclass(frozen=True)
class LogitRule:
    """acts(records): (n,) bool, the rows that it may change. change(x, rows): changes logits x (n, C) float32
    of the ids of a rank in place.
    """

    acts: Callable[[np.ndarray], np.ndarray]
    change: Callable[[Tensor, SlotRows], None]


LOGIT_RULES = {
    "biases": LogitRule(lambda records: records["num_biases"] > 0, _add_biases),
    "mask": LogitRule(lambda records: records["masked"] != 0, _mask),
    "bad words": LogitRule(lambda records: records["num_bad_words"] > 0, _ban_words),
    "n-grams": LogitRule(lambda records: records["no_repeat_ngram_size"] > 0, _ban_repeats),
    "temperature": LogitRule(_is_divided, _divide),
    "penalties": LogitRule(is_penalised, _penalise),
    "min_tokens": LogitRule(lambda records: records["min_tokens"] > 0, _hold_back_ends),
}


def process(x: Tensor, rows: SlotRows) -> None:
    """Apply LOGIT_RULES to x (n, C) float32, in place. Does not wait for the device."""
    for rule in LOGIT_RULES.values():
        acting = rule.acts(rows.records)
        if not acting.any():
            continue
        # the rule is neutral in the other rows; indexing rows would cost a copy
        if x.is_cuda or acting.all():
            rule.change(x, rows)
            continue
        some = np.flatnonzero(acting)
        index = torch.from_numpy(some)
        part = x[index]
        rule.change(part, rows.part(some))
        x[index] = part


def unchanged(records: np.ndarray) -> bool:
    """Return whether no rule changes a logit of these rows."""
    return not any(rule.acts(records).any() for rule in LOGIT_RULES.values())


# ------------------------------------------------------------ rules that drop ids


class Search(Protocol):
    """Searches in rows x (n, C) float32 over the columns of all ranks; the results are (n,) of x's dtype."""

    vocab_size: int

    def kth_largest(self, x: Tensor, counts: np.ndarray) -> Tensor:
        """Return the counts[row]-th largest value of each row; counts: (n,) int64 in 1 .. vocab_size - 1."""
        ...

    def nucleus(self, x: Tensor, weights: Tensor, shares: np.ndarray) -> Tensor:
        """Return the largest value v of each row such that the weights of the values from the largest down to
        v reach shares[row] of the row's weights, or the smallest value with a weight.

        weights: (n, C) float64, 0 for values that are not considered. shares: (n,) float32.
        """
        ...

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of (n,) float64."""
        ...


@dataclass(frozen=True)
class Choice:
    """Rows x (n, C), the mask of the ids that are kept, and the inputs of the rules."""

    x: Tensor
    kept: Tensor  # (n, C) bool
    largest: Tensor  # (n,)
    records: np.ndarray  # (n,)
    search: Search

    def weights(self) -> Tensor:
        """Return (n, C) float64: the kept ids' probabilities, times a factor of the row; 0 for the others."""
        weights = (self.x.double() - self.largest.double()[:, None]).exp_()
        return weights.masked_fill_(~self.kept, 0.0).nan_to_num_(0.0)


@dataclass(frozen=True)
class KeepRule:
    """acts(records, vocab_size): (n,) bool. keeps(choice): (n, C) bool, the ids that it keeps."""

    acts: Callable[[np.ndarray, int], np.ndarray]
    keeps: Callable[[Choice], Tensor]


def _at_least(bound: Callable[[Choice], Tensor]) -> Callable[[Choice], Tensor]:
    """Return the rule that keeps the logits from a bound (n,) on."""
    return lambda choice: choice.x >= bound(choice)[:, None]


def _typical(choice: Choice) -> Tensor:
    """Keep the ids whose information content, -log p, is nearest to the entropy, until their probability
    reaches typical_p. The difference of the two is the distance of a logit from the mean logit.

    Source: Meister et al. 2022; agrees with transformers' TypicalLogitsWarper.
    """
    weights, search = choice.weights(), choice.search
    depth = (choice.largest.float()[:, None] - choice.x).masked_fill(
        ~choice.kept, 0.0
    )  # float32, of kept ids
    mean = search.total((weights * depth.double()).sum(1)) / search.total(weights.sum(1))
    nearness = -(depth - mean.float()[:, None]).abs()
    return nearness >= search.nucleus(nearness, weights, choice.records["typical_p"])[:, None]


KEEP_RULES = {
    "min_p": KeepRule(
        lambda records, size: records["min_p"] > 0,
        _at_least(
            lambda choice: (
                choice.largest.float() + torch.from_numpy(np.log(choice.records["min_p"])).to(choice.x.device)
            )
        ),
    ),
    "top_k": KeepRule(
        lambda records, size: (records["top_k"] > 0) & (records["top_k"] < size),
        _at_least(
            lambda choice: choice.search.kth_largest(choice.x, choice.records["top_k"].astype(np.int64))
        ),
    ),
    "top_p": KeepRule(
        lambda records, size: records["top_p_now"] < 1,
        _at_least(
            lambda choice: choice.search.nucleus(choice.x, choice.weights(), choice.records["top_p_now"])
        ),
    ),
    "typical_p": KeepRule(lambda records, size: records["typical_p"] < 1, _typical),
}


def kept_ids(x: Tensor, largest: Tensor, records: np.ndarray, search: Search) -> Tensor:
    """Return (n, C) bool: the possible ids of rows x that every rule keeps.

    largest: (n,), over all ranks. Collective if `search` is.
    """
    kept = x > -torch.inf
    for rule in KEEP_RULES.values():
        some = np.flatnonzero(rule.acts(records, search.vocab_size))
        if len(some):
            index = torch.from_numpy(some).to(x.device)
            part = Choice(x[index], kept[index], largest[index], records[some], search)
            kept[index] = part.kept & rule.keeps(part)
    return kept


class WholeRows:
    """Search for columns that cover the whole vocabulary."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def kth_largest(self, x: Tensor, counts: np.ndarray) -> Tensor:
        index = torch.from_numpy(counts).to(x.device)[:, None] - 1
        return x.topk(int(counts.max()), dim=-1).values.gather(1, index)[:, 0]

    def nucleus(self, x: Tensor, weights: Tensor, shares: np.ndarray) -> Tensor:
        found = []
        for row, mass, share in zip(x, weights, shares.tolist()):
            order = row.masked_fill(mass == 0, -torch.inf).argsort(descending=True)
            reached = mass[order].cumsum(0)
            most = int((mass > 0).sum()) - 1
            found.append(row[order[min(int((reached < share * reached[-1]).sum()), most)]])
        return torch.stack(found)

    def total(self, values: Tensor) -> Tensor:
        return values


# ------------------------------------------------------------ the state after a token


def remember(rows: SlotRows, tokens: Tensor) -> None:
    """Update the slots of the rows for their tokens (n,) int64, ids of the whole vocabulary.

    Does not wait for the device.
    """
    state, slots, records = rows.state, rows.slots, rows.records
    state.last_tokens[slots] = tokens.to(state.last_tokens.dtype)
    state.column("generated")[slots] += 1
    if needs_history(records).any():
        lengths, size = rows.column("history_length")[:, 0], state.history.shape[1]
        grows = (rows.column("num_bad_words") > 0) | (rows.column("no_repeat_ngram_size") > 0)
        grows = grows[:, 0] & (lengths < size)
        at = slots, lengths.long().clamp(max=size - 1)
        state.history[at] = torch.where(grows, tokens.to(state.history.dtype), state.history[at])
        state.column("history_length")[slots] = lengths + grows
    if is_penalised(records).any():
        columns = tokens - rows.first_id
        is_here = (columns >= 0) & (columns < state.counts.shape[1])
        neutral = (rows.column("repetition_penalty") == 1) & (rows.column("presence_penalty") == 0)
        neutral &= rows.column("frequency_penalty") == 0
        at = slots, columns.clamp(0, state.counts.shape[1] - 1)
        counts = state.counts[at].int() + (is_here & ~neutral[:, 0])
        state.counts[at] = counts.clamp_(max=MOST_COUNTED).to(state.counts.dtype)
    if (records["top_p_decay"] < 1).any():
        now, decay = rows.column("top_p_now"), rows.column("top_p_decay")
        decayed = torch.maximum(now * decay, rows.column("top_p_min"))
        reset = tokens[:, None] == rows.column("top_p_reset_id")
        now = torch.where(decay < 1, torch.where(reset, rows.column("top_p"), decayed), now)
        state.column("top_p_now")[slots] = now[:, 0]
