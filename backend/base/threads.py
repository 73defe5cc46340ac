"""Sets how long the engine's CPU threads spin at barriers. Standard library only."""

from __future__ import annotations

from collections.abc import MutableMapping

#: Spins of a CPU thread at a barrier before it sleeps; libgomp's own default is milliseconds. If other
#: processes use the cores too, the awaited thread may have no core, and each of a step's hundreds of barriers
#: then costs that time. SmolLM2 on 2 cores, 16 sequences, `tridecode bench engine --batches 1,16`, ms per
#: step: alone 32.5 -> 32.4, next to two busy processes 289 and 374 -> 102 and 108.
SPIN = ("GOMP_SPINCOUNT", "4000")


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Set SPIN in the environment of a process that has not loaded torch; the user's own value stays."""
    environment.setdefault(*SPIN)
