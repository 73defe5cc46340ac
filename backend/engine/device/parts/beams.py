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
        """Sampling has left the logits of these rows as they were."""
        engine, beams = self.engine, self.part
        shape = (len(beams.rows), min(beams.width, engine.model_config.vocab_size))
        ids = torch.zeros(shape, dtype=torch.int32, device=engine.device)
        log_probs = torch.zeros(shape, dtype=torch.float32, device=engine.device)
        if engine.is_last_stage:
            choose = engine.ops.candidates
            if engine.vocab is not None:
                choose = partial(beam_candidates, vocab=engine.vocab, ranks=engine.ranks)
            rows = beam_slots(engine.state, beams, engine.first_id)
            choose(engine.work.logits, *rows, ids=ids, log_probs=log_probs)
        self._found = to_all(engine.ranks, ids), to_all(engine.ranks, log_probs)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        return self._found[0].numpy(), self._found[1].numpy()
