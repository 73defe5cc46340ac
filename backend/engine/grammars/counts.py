"""Totals of grammars and masks, for the metrics. No torch."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.grammars.matcher import GrammarFault

#: why requests fail: refused (invalid or not supported), time, memory, answer (no token can follow), internal
REASONS = ("refused", "time", "memory", "answer", "internal")


@dataclass
class GrammarCounts:
    """Totals since the engine started.

    compiled: grammars that were checked and compiled, in `seconds` of wall time. hits: requests whose grammar
    was cached. masks: computed masks. late_masks: rows whose step ended before their mask was ready.
    failures: reason -> requests that ended because of their grammar.
    """

    compiled: int = 0
    seconds: float = 0.0
    hits: int = 0
    masks: int = 0
    late_masks: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_compiled(self, seconds: float) -> None:
        """Count a compiled grammar. Called by the compiling threads."""
        with self._lock:
            self.compiled += 1
            self.seconds += seconds

    def fail(self, error: TridecodeError) -> None:
        """Count a request that ends because of its grammar. Called by the loop's thread."""
        reason = error.reason if isinstance(error, GrammarFault) else "internal"
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def metrics(self) -> dict[str, float]:
        """Return name in EngineBeat.metrics -> total."""
        return {
            "grammar_compilations": self.compiled,
            "grammar_compile_seconds": self.seconds,
            "grammar_cache_hits": self.hits,
            "grammar_masks": self.masks,
            "grammar_late_masks": self.late_masks,
            **{f'grammar_failures{{reason="{reason}"}}': count for reason, count in self.failures.items()},
        }
