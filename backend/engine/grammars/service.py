"""Compiles grammars and computes masks on threads of their own. No torch.

The loop's thread calls everything except the bodies of jobs. A group waits outside the planner's queue while
its grammar is compiled, as it does for an adapter.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.grammars.constraint import Constraint
from tridecode.backend.engine.grammars.matcher import GrammarCompiler, TokenMatcher
from tridecode.backend.wire.structured_output import StructuredOutput

log = logging.getLogger("tridecode.engine")

_Job = tuple[Any, int]  # a sequence with a constraint, and its newest token

#: compiled grammars that are kept, and the bytes of their texts
CACHED_GRAMMARS, CACHED_BYTES = 64, 4 << 20
#: threads that compile; one more grammar waits
COMPILE_THREADS = 2
#: masks that the library computes in one call, so that the first of many do not wait for the last
MOST_TOGETHER = 64
#: masks of a sequence that are computed alone, and timed, after a call that took longer than one mask may
TIMED_MASKS = 8
#: the first mask of a grammar builds most of its lexer
_FIRST_MASK_S = 1.0


@dataclass(frozen=True)
class Start:
    """A sequence whose grammar is wanted. ends: ids that end it. output: its tokens so far. allowed: the only
    ids that its request allows; []: all."""

    sequence: Any
    ends: list[int]
    output: list[int]
    allowed: list[int]


@dataclass
class _Compilation:
    """A group that waits for its grammar. error, constraints: the result, in the order of `starts`."""

    group: Any
    output: StructuredOutput
    starts: list[Start]
    error: TridecodeError | None = None
    constraints: list[Constraint] | None = None


class Grammars:
    """Grammars of one engine. fault: why it cannot compile any; "": it can.

    mask_cpu_s: limit of the thread CPU time of one mask. on_ready: called by a worker when a grammar is
    compiled.
    """

    def __init__(
        self,
        compiler: GrammarCompiler | None = None,
        vocab_size: int = 0,
        end_ids: Items[int] = (),
        mask_cpu_s: float = 0.02,
        mask_threads: int = 1,
        fault: str = "this engine has no tokenizer",
    ):
        self._compiler, self.fault = compiler, "" if compiler is not None else fault
        self._words, self._end_ids = -(-vocab_size // 32), list(end_ids)
        self._mask_cpu_s = mask_cpu_s
        self.on_ready: Callable[[], None] = lambda: None
        self._cache: OrderedDict[bytes, tuple[TokenMatcher, int]] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()  # of the cache
        self._waiting: dict[int, _Compilation] = {}  # by id() of the group
        self._compiled: SimpleQueue[_Compilation] = SimpleQueue()
        self._compilations: SimpleQueue[_Compilation | None] = SimpleQueue()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._timed_jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: SimpleQueue[Any] = SimpleQueue()
        self._outstanding = 0
        self._num_threads = {
            self._compile: COMPILE_THREADS,
            self._fill_timed: min(mask_threads, 2),
            self._fill_together: 1,
        }
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
        self._compilations.put(found)

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
            ready.append((found.group, found.error))

    # ------------------------------------------------------------ masks

    @property
    def outstanding(self) -> int:
        """Return how many sequences wait for a mask, or for `settle` to report it."""
        return self._outstanding

    def advance(self, sequence: Any, token: int) -> None:
        """Begin to compute the mask behind a new token of a sequence with a constraint."""
        constraint: Constraint = sequence.constraint
        constraint.ready = False
        self._outstanding += 1
        (self._timed_jobs if constraint.timed else self._jobs).put((sequence, token))

    def settle(self, seconds: float) -> list[Any]:
        """Return the sequences whose masks are ready, or failed; wait up to `seconds` for the others."""
        found, until = [], time.monotonic() + seconds
        while self._outstanding:
            try:
                left = until - time.monotonic()
                sequence = self._done.get(timeout=left) if left > 0 else self._done.get_nowait()
            except Empty:
                break
            self._outstanding -= 1
            sequence.constraint.ready = True
            found.append(sequence)
        return found

    def close(self) -> None:
        """End the threads, after their current jobs."""
        for _ in self._threads:
            self._compilations.put(None)
            self._timed_jobs.put(None)
        self._jobs.put(None)
        self._threads = []

    # ------------------------------------------------------------ threads

    def _start_threads(self) -> None:
        if self._threads:
            return
        for body, count in self._num_threads.items():
            for i in range(count):
                name = f"grammar{body.__name__}{i}"
                self._threads.append(threading.Thread(target=body, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def _fill_together(self) -> None:
        """Compute the masks of all sequences that wait, in one call of the library.

        If one took long, each of them is computed alone for a while, so that the culprit is found.
        """
        assert self._compiler is not None
        while (job := self._jobs.get()) is not None:
            batch = [job]
            while len(batch) < MOST_TOGETHER and not self._jobs.empty():
                following = self._jobs.get()  # the only reader
                if following is None:
                    return
                batch.append(following)
            constraints = [sequence.constraint for sequence, _ in batch]
            masks = np.empty((len(batch), self._words), np.int32)
            begun = time.monotonic()
            faults: list[Any]
            try:
                matchers = [constraint.matcher for constraint in constraints]
                faults = list(self._compiler.advance(matchers, [token for _, token in batch], masks))
            except BaseException as error:  # also a panic of the library: it ends only these requests
                log.exception("masks could not be computed")
                faults = [TridecodeError(f"structured_output: {type(error).__name__}")] * len(batch)
            is_slow = time.monotonic() - begun > self._mask_cpu_s
            for (sequence, _), constraint, mask, fault in zip(batch, constraints, masks, faults):
                constraint.take(mask, fault)
                constraint.timed = TIMED_MASKS if is_slow else 0
                self._done.put(sequence)

    def _fill_timed(self) -> None:
        while (job := self._timed_jobs.get()) is not None:
            sequence, token = job
            constraint: Constraint = sequence.constraint
            constraint.advance([token], self._mask_cpu_s)
            constraint.timed -= 1
            self._done.put(sequence)

    def _compile(self) -> None:
        while (found := self._compilations.get()) is not None:
            if self._waiting.get(id(found.group)) is not found:
                continue  # cancelled
            try:
                matcher = self._matcher(found.output)
                found.constraints = [self._started(matcher, start) for start in found.starts]
                found.error = next((one.error for one in found.constraints if one.error is not None), None)
            except TridecodeError as error:
                found.error = error
            except BaseException as error:  # also a panic of the library: it ends only this request
                log.exception("a grammar could not be compiled")
                found.error = TridecodeError(f"the grammar could not be compiled: {type(error).__name__}")
            self._compiled.put(found)
            self.on_ready()

    def _started(self, matcher: TokenMatcher, start: Start) -> Constraint:
        constraint = Constraint(matcher.copy(), self._words, self._end_ids, start.ends, start.allowed)
        constraint.advance(start.output, _FIRST_MASK_S)
        constraint.ready = True
        return constraint

    def _matcher(self, output: StructuredOutput) -> TokenMatcher:
        """Return the compiled grammar, from the cache if it is there."""
        assert self._compiler is not None
        key = hashlib.sha256(f"{output.kind}\0{output.text}".encode()).digest()
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                return known[0]
        matcher = self._compiler.compile(output)
        size = len(output.text)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = matcher, size
                self._cached_bytes += size
            while len(self._cache) > CACHED_GRAMMARS or self._cached_bytes > CACHED_BYTES:
                _, (_, old) = self._cache.popitem(last=False)
                self._cached_bytes -= old
        return matcher
