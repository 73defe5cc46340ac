"""Resumes requests of a lost engine: their sequences continue after the tokens that were sent.

A resumed sequence is admitted with output, like a preempted one. Its draws depend on its seed and its number
of tokens; its penalties and stop words depend on the tokens. It therefore continues with the tokens that the
lost engine would have chosen. Host only: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.engine.schedule.extra_outputs import ExtraOutputs
from tridecode.backend.engine.schedule.sequence import Finish, Search, Sequence, SequenceGroup, Stage
from tridecode.backend.wire.beam_tree import BeamTree
from tridecode.backend.wire.messages import BeamStep, Sent, Submit
from tridecode.backend.wire.sampling_params import SamplingParams


def check(submit: Submit, vocab_size: int) -> None:
    """Raise RequestError if `submit.sent` does not match the request's sequences.

    The caller has checked the params.
    """
    params = [one.params for one in submit.sequences for _ in range(one.params.num_sequences)]
    if len(submit.sent) != len(params):
        raise RequestError(
            f"{len(submit.sent)} sequences were sent before; the request has {len(params)} sequences"
        )
    for index, (sent, one) in enumerate(zip(submit.sent, params)):
        fault = "" if sent.ended else _fault_of(sent, one, vocab_size)
        if fault:
            raise RequestError(f"sequence {index}: {fault}")


def _fault_of(sent: Sent, params: SamplingParams, vocab_size: int) -> str:
    if len(sent.tokens) % 4:
        return f"{len(sent.tokens)} bytes of tokens were sent before; wanted int32"
    tokens = _tokens(sent)
    if len(tokens) > params.max_tokens or len(sent.steps) > params.max_tokens:
        found = max(len(tokens), len(sent.steps))
        return f"{found} tokens were sent before; max_tokens is {params.max_tokens}"
    if params.beam_width > 1 and len(tokens) or ((tokens < 0) | (tokens >= vocab_size)).any():
        return "the tokens that were sent before are not those of a sequence of this model"
    if sent.steps and not _are_steps(sent.steps, params, vocab_size):
        return "the steps that were sent before are not those of a beam search of this model"
    return ""


def _are_steps(steps: list[BeamStep], params: SamplingParams, vocab_size: int) -> bool:
    before, least = 1, 0  # no beam has ended before the first step
    for step in steps:
        count = len(step.parents)
        if not 0 < count == len(step.tokens) == len(step.log_probs) <= params.beam_width:
            return False
        if not all(0 <= parent < before for parent in step.parents):
            return False
        if not all(least <= token < vocab_size for token in step.tokens):
            return False
        before, least = count, -1
    return params.beam_width > 1 and not params.beam_pool


def by_prompt(submit: Submit) -> list[list[Sent]]:
    """Return Submit.sent of each prompt; [] for each prompt of a new request."""
    found, first = [], 0
    for wanted in submit.sequences:
        found.append(submit.sent[first : first + wanted.params.num_sequences])
        first += wanted.params.num_sequences
    return found


def restore(group: SequenceGroup, sent: Items[Sent], vocab_size: int) -> None:
    """Restore what was sent for the sequences of a new group. Ended sequences leave the group."""
    if group.search is not None:
        if all(one.ended for one in sent):
            group.sequences.clear()
        else:
            _restore_beams(group.search, sent[0], vocab_size)
        return
    for sequence, one in zip(list(group.sequences), sent):
        if one.ended:
            sequence.stage = Stage.ENDED
            group.sequences.remove(sequence)
        else:
            sequence.output = _tokens(one).tolist()
            if sequence.output:  # the event of its first token had the prompt's vector
                sequence.embedding = None
            _restore_extra_outputs(sequence, one, vocab_size)


def end_of(sequence: Sequence) -> Finish | None:
    """Return why a resumed sequence has already ended, if only its last event was lost."""
    if not sequence.output:
        return None
    last = sequence.output.pop()
    return sequence.append(last)


def _restore_beams(search: Search, sent: Sent, vocab_size: int) -> None:
    tree = BeamTree()
    _restore_extra_outputs(search.first, sent, vocab_size)
    if sent.steps:
        for step in sent.steps:
            tree.take(step)
        search.first.embedding = None
        search.restore(tree.beams)


def _restore_extra_outputs(sequence: Sequence, sent: Sent, vocab_size: int) -> None:
    extra = sequence.extra_outputs
    if extra is None:
        return
    if sequence.output or sent.steps:
        extra.planned = len(sequence.prompt)
    elif sent.context_rows:
        extra.planned = max(extra.planned, _position(sequence.prompt, sent.context_rows, vocab_size))
    if sent.perf is not None:
        _restore_perf(extra, sent)


def _restore_perf(extra: ExtraOutputs, sent: Sent) -> None:
    assert sent.perf is not None
    extra.arrived_ns, extra.scheduled_ns = sent.perf.arrival_ns, sent.perf.first_scheduled_ns
    extra.first_ns, extra.last_ns = sent.perf.first_token_ns, sent.perf.last_token_ns
    extra.blocks, extra.reused = sent.perf.new_blocks + sent.perf.reused_blocks, sent.perf.reused_blocks
    extra.missed = sent.perf.missed_blocks
    extra.drafted, extra.accepted = sent.perf.draft_tokens, sent.perf.accepted_draft_tokens


def _position(prompt: np.ndarray, rows: int, vocab_size: int) -> int:
    """Return the first prompt position whose logits were not among the `rows` that were sent; virtual tokens
    have no logits.
    """
    ordinary = np.flatnonzero(prompt < vocab_size)
    return int(ordinary[min(rows, len(ordinary)) - 1]) + 1 if len(ordinary) else 0


def _tokens(sent: Sent) -> np.ndarray:
    return np.frombuffer(sent.tokens, "<i4")
