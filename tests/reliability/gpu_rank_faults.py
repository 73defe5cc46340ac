"""Accidents of tensor ranks on GPUs that sum over peer memory and replay graphs, as a short schedule.

    python -m tests.reliability.gpu_rank_faults [--device cuda]

One supervisor; each accident strikes the engine that followed the one before, in a step that the other rank
already runs. Without a second GPU both ranks share the first one. "hang" is a rank that neither ends nor is
stopped: the kernels of the other one wait for it until the limit of a sum over peer memory.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from tests.backend.hf_models import gpt2
from tests.reliability.rank_faults import (
    HEADS,
    NAMED_S,
    PROMPT,
    SLACK_S,
    TOKENS,
    WORDS,
    Accident,
    Row,
    Strikes,
)
from tests.reliability.rank_faults import cells as cells_of
from tests.reliability.rank_service import RankService, write_weights

#: a sum over peer memory waits for a third of it (peer_memory.py)
STEP_TIMEOUT_S = 9
SCHEDULE = [
    Accident(1, "step", "kill"),
    Accident(0, "step", "stop"),
    Accident(1, "step", "fail"),
    Accident(1, "step", "hang"),
]
#: in the place of WORDS, with CUDA: the kernel's own limit, or the watch over loops, before that of the step
HANG = (
    r"(rank \d lost the connection to another rank: rank {rank} did not reach the sum over the tensor"
    r"|rank {rank} has been asleep)"
)


class GpuRankRange(Strikes):
    """A service of two tensor ranks. device: "cuda", or "cpu" to try the schedule without a GPU."""

    def __init__(self, folder: Path, device: str = "cuda") -> None:
        super().__init__()
        self._device = device
        write_weights(gpt2(heads=4, head_size=64), folder)
        settings = {"device": device, "cache_bytes": 8 << 20, "step_timeout_s": STEP_TIMEOUT_S}
        if device == "cuda":
            settings["devices"] = _two_gpus()
        self._service = RankService(folder / "weights", 2, 1, **settings)
        self._service.environment["TRIDECODE_SHARE_GPUS"] = "1"
        self._service.start()
        self._epoch = self._service.wait("ready", timeout_s=90)[1].epoch
        self.check_answer(self._service, Row("tp 2", "none"))

    def strike(self, accident: Accident) -> Row:
        row = Row("tp 2", str(accident))
        self.rows.append(row)
        try:
            self._strike(accident, row)
        except AssertionError as error:
            row.complaint = row.complaint or str(error)[:300]
        return row

    def _strike(self, accident: Accident, row: Row) -> None:
        service = self._service
        service.order_accident(accident.rank, accident.kind)
        answers = [service.submit(PROMPT, TOKENS) for _ in range(2)]
        struck = service.struck_at()
        limit = NAMED_S + SLACK_S
        if accident.kind == "hang" and self._device == "cpu":
            limit += STEP_TIMEOUT_S  # nothing but the limit of the step names it
        at, state = service.wait("down", epoch=self._epoch, timeout_s=limit + 20)
        row.named_s, row.cause = at - struck, state.detail
        if row.named_s > limit:
            row.complaint = f"named after {row.named_s:.1f} s"
        words = HANG if accident.kind == "hang" and self._device == "cuda" else WORDS[accident.kind]
        if not re.match(words.format(rank=accident.rank), state.detail):
            row.complaint = "another is named"
        self.check_ends(answers, state.detail, row)
        if row.requests != "error":
            row.complaint = row.complaint or "the requests had ended before the accident"
        back, ready = service.wait("ready", epoch=state.epoch + 1)
        self._epoch, row.back_s = ready.epoch, back - at
        self.check_answer(service, row)

    def close(self) -> None:
        self._service.close()


def _two_gpus() -> str:
    import torch

    return "0,1" if torch.cuda.device_count() > 1 else "0,0"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tdgpufaults") as folder:
        strikes = GpuRankRange(Path(folder), arguments.device)
        try:
            print(" | ".join(HEADS))
            for accident in SCHEDULE:
                print(" | ".join(cells_of(strikes.strike(accident))), flush=True)
        finally:
            strikes.close()
        return 1 if any(row.complaint for row in strikes.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
