"""The results of a step: new tokens go to their sequences, and those that end are ended. No torch."""

from __future__ import annotations

import numpy as np

from tridecode.backend.base.errors import RequestError, TridecodeError
from tridecode.backend.engine.grammars.service import Grammars
from tridecode.backend.engine.parts.beams import BeamRows
from tridecode.backend.engine.schedule.admission import Counters
from tridecode.backend.engine.schedule.planner import Planner
from tridecode.backend.engine.schedule.request_table import RequestTable
from tridecode.backend.engine.schedule.sequence import (
    Finish,
    Search,
    Sequence,
    SequenceGroup,
    Stage,
    no_token_error,
)
from tridecode.backend.engine.step.plan import NO_TOKEN, Commit, Handler, StepPart, StepPlan, StepResult


class OutputProcessor:
    """Commits and abandons steps. Rows of sequences that ended in the meantime are dropped."""

    def __init__(
        self,
        requests: RequestTable,
        planner: Planner,
        counters: Counters,
        micro_batches: int,
        grammars: Grammars,
    ):
        self._requests, self._planner, self._counters = requests, planner, counters
        self._grammars = grammars
        self._micro_batches = micro_batches
        self._handlers: dict[type[StepPart], Handler] = {BeamRows: self._take_candidates}

    def handle(self, kind: type[StepPart], handler: Handler) -> None:
        """Pass the results of the parts of a class to a handler."""
        self._handlers[kind] = handler

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Append a step's tokens and end the sequences they end."""
        sampled = plan.sequences
        if self._planner.drafts is not None and self._planner.drafts.learning is not None:
            self._planner.drafts.learning.end_step(plan, result)
        if plan.queries:
            sampled = [one for one, count in zip(sampled, plan.samples.tolist()) for _ in range(count)]
        elif not plan.samples.all():
            sampled = [sequence for sequence, count in zip(sampled, plan.samples) if count]
        tokens, all_log_probs = result.tokens.tolist(), result.log_probs.tolist()
        step: Commit | None = None
        taken = plan.missed  # a late row is a decode row, and these have one sample each
        if plan.parts:
            step = Commit(plan, sampled, self._handlers, accepted=result.accepted)
            for part, found in zip(plan.parts, result.parts):
                if found is not None:
                    part.commit(step, found)
            taken = [*step.taken, *taken]
        if taken and not plan.queries:
            others = np.delete(np.arange(len(sampled)), taken).tolist()
            sampled = [sampled[i] for i in others]
            tokens, all_log_probs = [tokens[i] for i in others], [all_log_probs[i] for i in others]
        if plan.queries:
            sampled = self._commit_rows(plan, result, set() if step is None else set(step.taken))
        else:
            self._commit_tokens(sampled, tokens, all_log_probs)
        if self._micro_batches > 1 or self._planner.drafts is not None:
            self._planner.resume(sampled)
        if step is not None:
            self._report(step)

    def abandon(self, plan: StepPlan, error: TridecodeError) -> None:
        """End the prompts of a step that ran out of memory with the error; compute its decode rows again."""
        if self._planner.drafts is not None:
            self._planner.drafts.abandon(plan)
        for row, sequence in enumerate(plan.sequences):
            if sequence.stage is Stage.ENDED:
                continue
            sequence.in_flight -= int(plan.samples[row])
            if plan.queries and row < plan.num_decodes:
                self._planner.settle(plan, row, int(plan.samples[row]))
            if row >= plan.num_decodes:
                if sequence.group.search is None and not sequence.group.followers:
                    self._requests.end(sequence, Finish.ERROR, error)
                else:  # samples that wait for this prompt end with it
                    self._requests.end_group(sequence.group, Finish.ERROR, error)
            elif sequence.stage is not Stage.WAITING:  # a beam whose group has been preempted already
                self._planner.preempt(sequence, abandoned=True)

    def _report(self, step: Commit) -> None:
        """Emit what a step has given to sequences besides tokens; end those that it completes."""
        for sequence in step.news:
            if sequence.stage is not Stage.ENDED and sequence.has_news:
                self._requests.emit(sequence, [], [])
        for sequence, error in step.ended:
            if sequence.stage is not Stage.ENDED:
                self._requests.end(sequence, Finish.LENGTH if error is None else Finish.ERROR, error)

    def _commit_tokens(self, sampled: list[Sequence], tokens: list[int], log_probs: list[float]) -> None:
        """Commit a step with one token for each of these sequences."""
        requests, counters = self._requests, self._counters
        for sequence, token, log_prob in zip(sampled, tokens, log_probs):
            sequence.in_flight -= 1
            if sequence.stage is Stage.ENDED:  # while this step was on the device
                continue
            if token < 0:
                requests.end(sequence, Finish.ERROR, _token_error(sequence, token))
                continue
            if sequence.params.max_tokens == 0:  # the request returns results of its prompt
                requests.end(sequence, Finish.LENGTH)
                continue
            finish = sequence.append(token)
            counters.output_tokens += 1
            wanted = [log_prob] if sequence.params.return_log_probs else []
            if finish is not None:
                requests.end(sequence, finish, None, [token], wanted)
            else:
                requests.emit(sequence, [token], wanted)
                if sequence.constraint is not None:
                    self._advance_grammar(sequence, [token])
        self._grammars.flush()

    def _commit_rows(self, plan: StepPlan, result: StepResult, taken: set[int]) -> list[Sequence]:
        """Commit a step that verifies, without the samples that parts have taken; return the sequences of its
        rows."""
        assert result.accepted is not None
        tokens, log_probs = result.tokens.tolist(), result.log_probs.tolist()
        accepted, committed, first = result.accepted.tolist(), [], 0
        for row, (sequence, count) in enumerate(zip(plan.sequences, plan.samples.tolist())):
            start, first = first, first + count
            if count == 0 or start in taken:
                continue
            num_accepted = accepted[row] if row < plan.num_decodes else 1
            committed.append(sequence)
            sequence.in_flight -= count
            if row < plan.num_decodes:
                self._planner.settle(plan, row, num_accepted)
            if sequence.stage is not Stage.ENDED:  # while this step was on the device
                end = start + num_accepted
                self._take_tokens(sequence, tokens[start:end], log_probs[start:end])
        self._grammars.flush()
        return committed

    def _take_tokens(self, sequence: Sequence, tokens: list[int], log_probs: list[float]) -> None:
        """Append the tokens that a row keeps, and end the sequence where one of them ends it."""
        finish, log_probs = None, log_probs if sequence.params.return_log_probs else []
        for count, token in enumerate(tokens, 1):
            if token < 0:
                if count > 1:
                    self._requests.emit(sequence, tokens[: count - 1], log_probs[: count - 1])
                self._requests.end(sequence, Finish.ERROR, _token_error(sequence, token))
                return
            if sequence.params.max_tokens == 0:  # the request returns results of its prompt
                self._requests.end(sequence, Finish.LENGTH)
                return
            finish = sequence.append(token)
            self._counters.output_tokens += 1
            if finish is not None:
                break
        if finish is not None:
            self._discard(sequence, len(tokens) - 1 - count)
            self._requests.end(sequence, finish, None, tokens[:count], log_probs[:count])
        else:
            self._requests.emit(sequence, tokens, log_probs)
            if sequence.constraint is not None:
                self._advance_grammar(sequence, tokens)

    def _discard(self, sequence: Sequence, count: int) -> None:
        """Note that a row has kept `count` drafts behind the end of the answer; none if it is below 1."""
        drafts = self._planner.drafts
        if count > 0 and drafts is not None and drafts.learning is not None:
            drafts.learning.discard(sequence, count)

    def _advance_grammar(self, sequence: Sequence, tokens: list[int]) -> None:
        """Begin to compute the next mask of a sequence, and those of its drafts."""
        drafts = self._planner.drafts
        learning = None if drafts is None else drafts.learning
        proposed = [] if learning is None else learning.take_proposed(sequence)
        self._grammars.advance(sequence, tokens, proposed)

    # ------------------------------------------------------------ beams

    def _take_candidates(self, beams: list[Sequence], found: tuple[np.ndarray, np.ndarray]) -> None:
        """Hand each beam of a step its candidates, a row of ids and of log_probs (n, W), most likely first; a
        group whose beams all have theirs advances."""
        for sequence, mine, likely in zip(beams, *found):
            sequence.in_flight -= 1
            search, most = sequence.group.search, 2 * sequence.params.beam_width
            if sequence.stage is not Stage.AWAITED or search is None:  # ended or preempted since
                continue
            if sequence.params.max_tokens == 0:  # the request wants the context embedding alone
                self._requests.end_beams(sequence.group, Finish.LENGTH)
            elif search.take(sequence, mine[:most], likely[:most]):
                self._advance(sequence.group, search)

    def _advance(self, group: SequenceGroup, search: Search) -> None:
        """Advance a beam search by one step; emit its event or end it."""
        try:
            step = search.advance()
        except ArithmeticError as error:
            self._requests.end_beams(group, Finish.ERROR, TridecodeError(str(error)))
            return
        except RequestError as error:
            self._requests.end_beams(group, Finish.ERROR, error)
            return
        self._counters.output_tokens += sum(token >= 0 for token in step.tokens)
        for sequence in group.sequences:
            sequence.stage = Stage.DECODE
        if search.is_over:
            self._requests.end_beams(group, None, None, step)
        elif not search.params.beam_pool:
            self._requests.emit_beams(group, step)


def _token_error(sequence: Sequence, token: int) -> TridecodeError:
    """Return the error for a sequence whose sampler returned NO_TOKEN or BROKEN_LOGITS."""
    if token == NO_TOKEN:
        return no_token_error(sequence)
    return TridecodeError(
        f"the model's logits are not numbers (NaN or infinite) after {len(sequence.prompt)} tokens of prompt "
        f"and {len(sequence.output)} of output; weights may be damaged, or overflow in data_type fp16"
    )
