"""The scheduler's side of drafts that each rank's device has. No torch."""

from __future__ import annotations

import numpy as np

from tridecode.backend.engine.schedule.sequence import Sequence


class DeviceIds:
    """A Drafter whose ids are in SamplingState.drafts."""

    needs_token = False

    def drafts(self, sequence: Sequence, most: int) -> np.ndarray:
        return np.full(most, -1, np.int32)
