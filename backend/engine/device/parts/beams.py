"""The candidates of beams on the device."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.device.sampling import beam_slots
from tridecode.backend.engine.parts.beams import BeamRows
from tridecode.backend.engine.ranks.vocab_logits import beam_candidates
from tridecode.backend.engine.step.results import to_all


class BeamsRun(PartRun[BeamRows]):
    def after_sampling(self, tokens: Tensor) -> None:
        """Compute the candidates; sampling has not changed the logits of these rows."""
        state, beams = self.state, self.part
        shape = (len(beams.rows), min(beams.width, state.model_config.vocab_size))
        ids = torch.zeros(shape, dtype=torch.int32, device=state.device)
        log_probs = torch.zeros(shape, dtype=torch.float32, device=state.device)
        if state.is_last_stage:
            choose = state.ops.candidates
            if state.vocab is not None:
                choose = partial(beam_candidates, vocab=state.vocab, ranks=state.ranks)
            rows = beam_slots(state.sampling, beams, state.first_id)
            choose(state.work.logits, *rows, ids=ids, log_probs=log_probs)
        self._candidates = to_all(state.ranks, ids), to_all(state.ranks, log_probs)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        return self._candidates[0].numpy(), self._candidates[1].numpy()
