"""The requests that have not ended: their groups, deadlines and events. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tridecode.backend.base.errors import DeadlineError, TridecodeError
from tridecode.backend.engine.adapters.table import Adapters
from tridecode.backend.engine.cache.cache_manager import CacheManager
from tridecode.backend.engine.cache.sessions import SessionRow, SessionStore
from tridecode.backend.engine.prompt_tables.book import PromptBook
from tridecode.backend.engine.schedule.admission import LazyHeap
from tridecode.backend.engine.schedule.planner import Planner
from tridecode.backend.engine.schedule.sequence import Finish, Sequence, SequenceGroup, Stage
from tridecode.backend.engine.schedule.sequence_outputs import LogitsBudget
from tridecode.backend.wire.messages import BeamStep, Event

Key = tuple[bytes, int]  # door, number of the request within the door


class RequestTable:
    """Ends sequences, beam searches and requests: frees all that they hold, and emits their last events.

    num_groups: groups that have not ended. num_sequences: sequences and beams that have not ended.
    num_extra_outputs: sequences that have not ended and have extra_outputs.
    """

    def __init__(
        self,
        planner: Planner,
        cache: CacheManager,
        sessions: SessionStore,
        adapters: Adapters,
        prompts: PromptBook,
        logits: LogitsBudget,
    ):
        self._planner, self._cache, self._sessions = planner, cache, sessions
        self._adapters, self._prompts, self._logits = adapters, prompts, logits
        self._groups: dict[Key, list[SequenceGroup]] = {}
        self.num_groups = self.num_sequences = self.num_extra_outputs = 0
        self._deadlines: LazyHeap[SequenceGroup] = LazyHeap(lambda group: bool(group.sequences))
        self._events: list[tuple[bytes, Event]] = []
        self.on_remove: Callable[[SequenceGroup], None] = lambda group: None  # for each group that ends
        #: callbacks for each sequence that ends, and the first of each beam search; None: the search is over
        self.on_end: list[Callable[[Sequence, Finish | None], None]] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, key: Key) -> bool:
        return key in self._groups

    def groups(self) -> Iterator[SequenceGroup]:
        """Return the groups that have not ended."""
        return (group for groups in self._groups.values() for group in groups)

    def of_request(self, key: Key) -> list[SequenceGroup]:
        """Return the groups of a request; [] for an unknown one."""
        return list(self._groups.get(key, ()))

    def of_door(self, door: bytes) -> list[Key]:
        """Return the requests of a door."""
        return [key for key in self._groups if key[0] == door]

    # ------------------------------------------------------------ begin

    def add(self, key: Key, groups: list[SequenceGroup]) -> None:
        """Add the groups of a new request, which have no sequences yet."""
        self._groups[key] = groups.copy()
        self.num_groups += len(groups)

    def add_sequences(self, group: SequenceGroup) -> None:
        """Count the sequences of a group that was added."""
        if group.sequences:
            self.num_sequences += len(group.sequences) if group.search is None else group.search.width
        self.num_extra_outputs += sum(one.extra_outputs is not None for one in group.sequences)

    def add_fork(self, child: Sequence) -> None:
        """Count a sequence that has joined its group."""
        self.num_sequences += 1
        self.num_extra_outputs += child.extra_outputs is not None

    def watch_deadline(self, group: SequenceGroup) -> None:
        self._deadlines.push((group.deadline, group.arrival), group)

    # ------------------------------------------------------------ events

    def take_events(self) -> list[tuple[bytes, Event]]:
        """Return the events since the last call, in order, each with its door."""
        events, self._events = self._events, []
        return events

    def emit_beams(self, group: SequenceGroup, step: BeamStep) -> None:
        """Add the event of a step of a beam search that continues."""
        assert group.search is not None
        self._events.append((group.door, group.search.event(step)))

    def emit(
        self,
        sequence: Sequence,
        tokens: list[int],
        log_probs: list[float],
        finish: str = "",
        error: str = "",
        code: str = "",
    ) -> None:
        """Add an event of a sequence, with all results that no event has carried yet."""
        group, embedding, extra = sequence.group, b"", None
        if sequence.embedding is not None and (tokens or finish):  # else a chunk of the prompt may be missing
            embedding = sequence.take_embedding()
        if sequence.extra_outputs is not None:
            extra = sequence.extra_outputs.take(
                sequence.params, len(tokens), bool(finish), sequence.draft_counts
            )
        tops = sequence.take_tops(len(tokens)) if sequence.tops else []
        event = Event(
            group.request, sequence.index, tokens, log_probs, finish, error, code, embedding, tops, extra,
            queued_s=group.take_queued(), cached_tokens=group.take_cached(),
        )  # fmt: skip
        self._events.append((group.door, event))

    # ------------------------------------------------------------ end

    def end_overdue(self, now: float) -> None:
        """End the groups whose deadline has passed. now: monotonic seconds."""
        while (group := self._deadlines.first()) is not None and group.deadline <= now:
            self._deadlines.pop()
            if group.search is not None:
                self.end_beams(group, Finish.DEADLINE, _overdue(group.sequences[0]))
                continue
            for sequence in list(group.sequences):
                self.end(sequence, Finish.DEADLINE, _overdue(sequence))

    def end_group(self, group: SequenceGroup, finish: Finish, error: TridecodeError | None = None) -> None:
        """End all sequences of a group."""
        if group.search is not None:
            self.end_beams(group, finish, error)
        for sequence in list(group.sequences):
            self.end(sequence, finish, error)

    def end(
        self,
        sequence: Sequence,
        finish: Finish,
        error: TridecodeError | None = None,
        tokens: list[int] | None = None,
        log_probs: list[float] | None = None,
    ) -> None:
        """Free the sequence's slot and blocks and emit its last event."""
        for callback in self.on_end:
            callback(sequence, finish)
        if sequence.group.row is not None:
            self._store_in_session(sequence, sequence.group.row, finish)
        self._planner.leave(sequence, damaged=finish is Finish.ERROR)
        sequence.stage = Stage.ENDED
        self.num_sequences -= 1
        self.num_extra_outputs -= sequence.extra_outputs is not None
        group = sequence.group
        group.sequences.remove(sequence)
        if not group.sequences:
            self.remove(group)
        text, code = (str(error), error.code) if error else ("", "")
        self.emit(sequence, tokens or [], log_probs or [], finish.value, text, code)

    def end_beams(
        self,
        group: SequenceGroup,
        finish: Finish | None,
        error: TridecodeError | None = None,
        step: BeamStep | None = None,
    ) -> None:
        """Free all that the group holds and emit its last events. finish: None if the search is over."""
        search = group.search
        assert search is not None
        for callback in self.on_end:
            callback(search.first, finish)
        self._planner.leave_beams(group, damaged=finish is Finish.ERROR)
        for sequence in group.sequences:
            sequence.stage = Stage.ENDED
        group.sequences.clear()
        self.num_sequences -= search.width
        self.num_extra_outputs -= search.first.extra_outputs is not None
        self.remove(group)
        self._events += [(group.door, event) for event in search.last_events(finish, error, step)]

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group without sequences, and its request with the last of its groups."""
        self.num_groups -= 1
        self._adapters.release(group)
        self.on_remove(group)
        self._prompts.release(group)
        key = (group.door, group.request)
        self._groups[key].remove(group)
        if not self._groups[key]:
            del self._groups[key]
            self._logits.release(key)

    def _store_in_session(self, sequence: Sequence, row: SessionRow, finish: Finish) -> None:
        """Index the sequence's blocks for its session, unless an error may have left them unwritten."""
        held = None
        if sequence.slot >= 0:
            held = self._cache.held(sequence)
            if finish is Finish.ERROR:
                held = held._replace(written=0)
        group = sequence.group
        self._sessions.store(group.door, group.session, row, sequence.known_tokens(), held)


def _overdue(sequence: Sequence) -> DeadlineError:
    done = f"{len(sequence.output)} of {sequence.params.max_tokens} tokens"
    text = f"the request's deadline passed when it had {done}"
    if sequence.group.lora_name and sequence.group.adapter < 0:
        text += f"; it was waiting for the adapter {sequence.group.lora_name!r}"
    return DeadlineError(text)
