"""Compiles grammars and computes masks on threads of their own. No torch.

The loop's thread calls everything except the bodies of jobs. A group waits outside the planner's queue while
its grammar is compiled (compile_threads.py), as it does for an adapter. Another thread starts answers whose
grammar is cached.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.grammars.cache import GrammarCache
from tridecode.backend.engine.grammars.checker import GrammarChecker
from tridecode.backend.engine.grammars.compile_threads import CompileThreads, Turn
from tridecode.backend.engine.grammars.constraint import Constraint
from tridecode.backend.engine.grammars.counts import GrammarCounts
from tridecode.backend.engine.grammars.matcher import GrammarCompiler, GrammarFault, TokenMatcher
from tridecode.backend.engine.grammars.schemas import prepare
from tridecode.backend.wire.structured_output import StructuredOutput

log = logging.getLogger("tridecode.engine")

#: a sequence with a constraint, its newest tokens, and drafts behind them
_Job = tuple[Any, list[int], Items[int]]

#: time after which others no longer wait for a grammar: wall-clock time, or CPU time if it is given up
QUICK_MS = 20.0
#: masks that the library computes in one call, so that the first of many do not wait for the last
MOST_TOGETHER = 64
#: masks of a sequence that are computed alone, and timed, after a call that took longer than one mask may
TIMED_MASKS = 8
#: the first mask of a grammar builds most of its lexer
_FIRST_MASK_S = 1.0


@dataclass(frozen=True)
class Start:
    """A sequence whose grammar is wanted. ends: ids that end it. output: its tokens so far. allowed: the only
    ids that its request allows; []: all. most_drafts: forced tokens that a step may verify."""

    sequence: Any
    ends: list[int]
    output: list[int]
    allowed: list[int]
    most_drafts: int = 0


@dataclass
class _Compilation:
    """A group that waits for its grammar. matcher: the cached grammar, if there is one. error, constraints:
    the result; constraints are in the order of `starts`.
    """

    group: Any
    output: StructuredOutput
    starts: list[Start]
    matcher: TokenMatcher | None = None
    error: TridecodeError | None = None
    constraints: list[Constraint] | None = None


class Grammars:
    """Grammars of one engine. fault: the reason why it cannot compile any; "" if it can.

    mask_cpu_s: limit of the thread CPU time for one mask. checker: compiles each grammar first, with a
    connection for each of compile_threads (at least 2); None: grammars are trusted. on_ready: called by a
    worker when a grammar is compiled.
    """

    def __init__(
        self,
        compiler: GrammarCompiler | None = None,
        vocab_size: int = 0,
        end_ids: Items[int] = (),
        mask_cpu_s: float = 0.02,
        mask_threads: int = 1,
        fault: str = "this engine has no tokenizer",
        checker: GrammarChecker | None = None,
        compile_threads: int = 2,
    ):
        self._compiler, self.fault = compiler, "" if compiler is not None else fault
        self._words, self._end_ids = -(-vocab_size // 32), list(end_ids)
        self._mask_cpu_s = mask_cpu_s
        self.on_ready: Callable[[], None] = lambda: None
        self.counts = GrammarCounts()
        self._checker, self._cache = checker, GrammarCache()
        self._waiting: dict[int, _Compilation] = {}  # by id() of the group
        self._compiled: SimpleQueue[_Compilation] = SimpleQueue()
        self._known: SimpleQueue[_Compilation | None] = SimpleQueue()
        self._new = CompileThreads(self._compile)
        self._new_jobs: list[_Job] = []  # since the last `flush`
        self._jobs: SimpleQueue[list[_Job] | None] = SimpleQueue()
        self._timed_jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: SimpleQueue[list[Any]] = SimpleQueue()
        self._outstanding = 0
        self._mask_threads, self._compile_threads = min(mask_threads, 2), compile_threads
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------ grammars

    @property
    def num_waiting(self) -> int:
        """Return the groups whose grammar is not compiled yet."""
        return len(self._waiting)

    @property
    def has_news(self) -> bool:
        """Return whether `take_ready` has something to return."""
        return not self._compiled.empty()

    def want(self, group: Any, output: StructuredOutput, starts: list[Start]) -> None:
        """Begin to compile the grammar of a group; `take_ready` returns the group."""
        self._start_threads()
        found = self._waiting[id(group)] = _Compilation(group, output, starts)
        try:
            found.matcher = self._cache.get(self._cache.key(output))
        except GrammarFault as fault:
            found.error = fault
            self._compiled.put(found)
            return
        self.counts.hits += found.matcher is not None
        if found.matcher is None:
            self._new.put(found)
        else:
            self._known.put(found)

    def release(self, group: Any) -> None:
        """Forget a group that has ended."""
        self._waiting.pop(id(group), None)

    def take_ready(self) -> list[tuple[Any, TridecodeError | None]]:
        """Return the groups whose grammar was compiled since the last call, or is refused (with the reason),
        and give each sequence its constraint.
        """
        ready: list[tuple[Any, TridecodeError | None]] = []
        while True:
            try:
                found = self._compiled.get_nowait()
            except Empty:
                return ready
            if self._waiting.get(id(found.group)) is not found:
                continue  # it has ended
            del self._waiting[id(found.group)]
            for start, constraint in zip(found.starts, found.constraints or ()):
                start.sequence.constraint = constraint
            if found.error is not None:
                self.counts.fail(found.error)
            ready.append((found.group, found.error))

    # ------------------------------------------------------------ masks

    @property
    def outstanding(self) -> int:
        """Return how many sequences wait for a mask, or for `settle` to report it."""
        return self._outstanding

    def advance(self, sequence: Any, tokens: list[int], proposed: Items[int] = ()) -> None:
        """Compute the mask behind new tokens of a sequence with a constraint, from the next `flush` on.

        proposed: drafts of a drafter behind the tokens, for where the grammar forces none.
        """
        constraint: Constraint = sequence.constraint
        constraint.ready = False
        self._outstanding += 1
        if constraint.timed:
            self._timed_jobs.put((sequence, tokens, proposed))
            return
        self._new_jobs.append((sequence, tokens, proposed))
        if len(self._new_jobs) == MOST_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Let a thread compute the masks that `advance` has collected.

        One entry of the queue for many sequences: with one each, the thread would wake for each, compete with
        this one for the interpreter, and call the library for a few masks at a time.
        """
        if self._new_jobs:
            self._jobs.put(self._new_jobs)
            self._new_jobs = []

    def settle(self, seconds: float) -> list[Any]:
        """Return the sequences whose masks are ready, or failed; wait up to `seconds` for the others."""
        found: list[Any] = []
        until = time.monotonic() + seconds
        self.flush()
        while self._outstanding:
            try:
                left = until - time.monotonic()
                sequences = self._done.get(timeout=left) if left > 0 else self._done.get_nowait()
            except Empty:
                break
            self._outstanding -= len(sequences)
            self.counts.masks += len(sequences)
            for sequence in sequences:
                sequence.constraint.ready = True
            found += sequences
        return found

    def close(self) -> None:
        """End the threads, after their current jobs, and the processes of the checker."""
        self._new.close()
        self._new = CompileThreads(self._compile)  # the threads of a later start
        for one in (self._known, self._jobs):
            one.put(None)
        for _ in self._threads:
            self._timed_jobs.put(None)
        self._threads = []
        if self._checker is not None:
            self._checker.close()

    # ------------------------------------------------------------ threads

    def _start_threads(self) -> None:
        if self._threads:
            return
        work: list[Callable[[], None]] = [self._begin_known, self._fill_together]
        work += [self._fill_timed] * self._mask_threads
        work += [functools.partial(self._new.run, i) for i in range(self._compile_threads)]
        for i, body in enumerate(work):
            self._threads.append(threading.Thread(target=body, name=f"grammar_{i}", daemon=True))
        for thread in self._threads:
            thread.start()

    def _fill_together(self) -> None:
        """Compute the masks of all sequences that wait, in one call of the library.

        If one took long, each of them is computed alone for a while, so that the culprit is found.
        """
        assert self._compiler is not None
        while (batch := self._jobs.get()) is not None:
            constraints = [sequence.constraint for sequence, _, _ in batch]
            masks = np.empty((len(batch), self._words), np.int32)
            begun = time.monotonic()
            faults: list[Any]
            try:
                for constraint, (_, tokens, _) in zip(constraints, batch):
                    if len(tokens) > 1:
                        constraint.accept(tokens[:-1])
                matchers = [constraint.matcher for constraint in constraints]
                newest = [tokens[-1] for _, tokens, _ in batch]
                faults = list(self._compiler.advance(matchers, newest, masks))
            except BaseException as error:  # also a panic of the library: it ends only these requests
                log.exception("masks could not be computed")
                faults = [TridecodeError(f"structured_output: {type(error).__name__}")] * len(batch)
            is_slow = time.monotonic() - begun > self._mask_cpu_s
            for job, constraint, mask, fault in zip(batch, constraints, masks, faults):
                sequence, tokens, proposed = job
                constraint.take(tokens, mask, fault, self._mask_cpu_s, proposed)
                constraint.timed = TIMED_MASKS if is_slow else 0
            self._done.put([sequence for sequence, _, _ in batch])

    def _fill_timed(self) -> None:
        while (job := self._timed_jobs.get()) is not None:
            sequence, tokens, proposed = job
            constraint: Constraint = sequence.constraint
            constraint.advance(tokens, self._mask_cpu_s, proposed)
            constraint.timed -= 1
            self._done.put([sequence])

    def _begin_known(self) -> None:
        while (found := self._known.get()) is not None:
            self._work(found, lambda known: known.matcher)

    def _compile(self, found: _Compilation, turn: Turn) -> bool:
        """Compile a grammar; the `work` of CompileThreads."""
        return self._work(found, lambda wanted: self._matcher(wanted.output, turn))

    def _work(self, found: _Compilation, matcher_of: Callable[[_Compilation], TokenMatcher | None]) -> bool:
        """Store the result of a compilation. Do nothing and return False if matcher_of returns None."""
        if self._waiting.get(id(found.group)) is not found:
            return True  # cancelled
        try:
            matcher = matcher_of(found)
            if matcher is None:
                return False
            found.constraints = [self._started(matcher, start) for start in found.starts]
            found.error = next((one.error for one in found.constraints if one.error is not None), None)
        except TridecodeError as error:
            found.error = error
        except BaseException as error:  # a panic of the library, too, ends only this request
            log.exception("a grammar could not be compiled")
            found.error = TridecodeError(f"the grammar could not be compiled: {type(error).__name__}")
        self._compiled.put(found)
        self.on_ready()
        return True

    def _started(self, matcher: TokenMatcher, start: Start) -> Constraint:
        constraint = Constraint(
            matcher, self._words, self._end_ids, start.ends, start.allowed, start.most_drafts
        )
        constraint.advance(start.output, _FIRST_MASK_S)
        constraint.ready = True
        return constraint

    def _matcher(self, output: StructuredOutput, turn: Turn) -> TokenMatcher | None:
        """Return the compiled grammar, from the cache if possible; None if it takes too long for the turn."""
        assert self._compiler is not None
        key, begun = self._cache.key(output), time.monotonic()
        known = self._cache.get(key)
        if known is not None:
            return known
        try:
            matcher = self._compiler.compile(self._checked(output, turn))
        except GrammarFault as fault:
            if turn.is_short and fault.reason == "time":
                return None
            if fault.reason in ("time", "memory"):
                self._cache.refuse(key, fault)
            raise
        self.counts.add_compiled(time.monotonic() - begun)
        self._cache.put(key, matcher, len(output.text))
        return matcher

    def _checked(self, output: StructuredOutput, turn: Turn) -> StructuredOutput:
        """Return what the engine has to compile; the checker has compiled it within the limits."""
        if self._checker is None:
            return prepare(output)
        check = self._checker.begin(output, turn.number, QUICK_MS if turn.is_short else None)
        if not check.wait(QUICK_MS / 1e3):
            turn.give_way()
        return check.result()
