"""Caches compiled grammars by their digest. No torch."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from tridecode.backend.engine.grammars.matcher import GrammarFault, TokenMatcher
from tridecode.backend.wire.structured_output import StructuredOutput

#: maximum number of cached grammars, and maximum bytes of their texts
CACHED_GRAMMARS, CACHED_BYTES = 64, 4 << 20
#: maximum number of remembered grammars whose compilation exceeded a limit; they are not compiled again
CACHED_FAULTS = 1024


class GrammarCache:
    """An LRU cache; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._matchers: OrderedDict[bytes, tuple[TokenMatcher, int]] = OrderedDict()
        self._bytes = 0
        self._faults: OrderedDict[bytes, GrammarFault] = OrderedDict()

    @staticmethod
    def key(output: StructuredOutput) -> bytes:
        return hashlib.sha256(f"{output.kind}\0{output.text}".encode()).digest()

    def get(self, key: bytes) -> TokenMatcher | None:
        """Return the matcher at the beginning of an answer, to be copied; None if the grammar is not cached.

        Raises the GrammarFault of a grammar that exceeded a limit before.
        """
        with self._lock:
            if key in self._faults:
                raise GrammarFault(str(self._faults[key]), self._faults[key].reason)
            known = self._matchers.get(key)
            if known is None:
                return None
            self._matchers.move_to_end(key)
            return known[0]

    def put(self, key: bytes, matcher: TokenMatcher, size: int) -> None:
        """Keep a grammar. size: bytes of its text."""
        with self._lock:
            if key not in self._matchers:
                self._matchers[key] = matcher, size
                self._bytes += size
            while len(self._matchers) > CACHED_GRAMMARS or self._bytes > CACHED_BYTES:
                _, (_, old) = self._matchers.popitem(last=False)
                self._bytes -= old

    def refuse(self, key: bytes, fault: GrammarFault) -> None:
        """Keep the fault of a grammar that exceeded a limit."""
        with self._lock:
            self._faults[key] = fault
            while len(self._faults) > CACHED_FAULTS:
                self._faults.popitem(last=False)
