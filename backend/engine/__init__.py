"""What runs in the rank processes: scheduler, loop, engine."""

from __future__ import annotations

import os

#: How long a CPU thread turns at a barrier before it sleeps; libgomp's own choice is milliseconds. Where
#: others use the cores too, the thread it waits for has none, and each of a step's hundreds of barriers waits
#: that out. SmolLM2 on 2 cores, 16 sequences, `tridecode bench engine --batches 1,16`, ms a step: alone 32.5
#: -> 32.4, beside two busy processes 289 and 374 -> 102 and 108.
SPIN = ("GOMP_SPINCOUNT", "4000")


def spin_briefly() -> None:
    """Tell libgomp, which reads it when torch is loaded: so before that. What the user says counts."""
    os.environ.setdefault(*SPIN)


spin_briefly()
