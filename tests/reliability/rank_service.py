"""The real supervisor and real ranks of a tiny GPT-2, without a server: for accidents of single ranks."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.waiting import wait_until
from tridecode.backend.service.engine_link import EngineLink
from tridecode.backend.service.owner import Owner
from tridecode.backend.supervisor import processes, runtime_dir
from tridecode.backend.wire import messages as m

if TYPE_CHECKING:
    from tridecode.converters.convert import PlannedConversion

FAULTY_RANK = Path(__file__).with_name("faulty_rank.py")
ADAPTER = "first"
NUM_TOKENS = 64  # of a prompt and its answer
START_S = 60.0


@dataclass
class Answer:
    """A request's tokens and its end."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    ends: int = 0
    ended_at: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    def take(self, event: m.Event) -> None:
        self.tokens += event.tokens
        if event.finish:
            self.finish, self.error = event.finish, event.error
            self.ends += 1
            self.ended_at = time.monotonic()
            self.done.set()


class RankService:
    """An engine directory with weights, and a supervisor with its ranks. One epoch after the other.

    weights: a weight directory; adapters: a folder, or None. settings: of config.pbtxt.
    """

    def __init__(self, weights: Path, tensor: int, stages: int, adapters: Path | None = None, **settings):
        self.root = Path(tempfile.mkdtemp(prefix="tdranks"))  # pytest's own folders are too long for a socket
        self.engine_dir = self.root / "fastertransformer"
        (self.engine_dir / "1").mkdir(parents=True)
        self.world = tensor * stages
        self._settings = {
            "tensor_para_size": tensor,
            "pipeline_para_size": stages,
            "device": "cpu",
            "num_threads": 1,
            "max_sequences": 4,
            "cache_bytes": 4 << 20,
            "model_checkpoint_path": weights,
            "lora_path": adapters or "none",
            **settings,
        }
        self.configure()
        self._owner = subprocess.Popen(["sleep", "600"])
        identity = processes.identify(self._owner.pid)
        assert identity is not None
        self.struck, self.order = self.root / "struck", self.root / "order"
        self.environment = {
            "TRIDECODE_RUNTIME_DIR": str(self.root / "run"),
            "TRIDECODE_OWNER": f"{identity.pid}:{identity.start}",
            "TRIDECODE_RANK_COMMAND": shlex.join([sys.executable, str(FAULTY_RANK)]),
            "TRIDECODE_ENGINE_PYTHON": sys.executable,
            "TRIDECODE_TEST_STRUCK": str(self.struck),
            "TRIDECODE_TEST_ORDER": str(self.order),
            "TRIDECODE_TEST_TENSOR": str(tensor),
            "OMP_NUM_THREADS": "1",
        }
        self.states: list[tuple[float, m.EngineState]] = []
        self._closing = threading.Event()
        self.link: EngineLink | None = None

    def configure(self, **settings: object) -> None:
        self._settings.update(settings)
        lines = [
            f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
            for key, value in self._settings.items()
        ]
        text = 'name: "fastertransformer"\n' + "\n".join(lines)
        part = self.engine_dir / "config.part"
        part.write_text(text)
        part.rename(self.engine_dir / "config.pbtxt")

    def start(self, accident: str = "") -> RankService:
        """Start supervisor and ranks; `accident` is RANK:POINT:KIND of faulty_rank.py. Does not wait."""
        before = dict(os.environ)
        os.environ.update(self.environment, TRIDECODE_TEST_ACCIDENT=accident)
        try:
            self.link = EngineLink(str(self.engine_dir), "ranks", Owner.this_process(), hold_s=0.0).start()
            wait_until(self._supervised, 20, "a supervisor")
        finally:
            os.environ.clear()
            os.environ.update(before)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def order_accident(self, rank: int, kind: str) -> None:
        """Have an accident of faulty_rank.py in a step of the engine that serves, once requests run."""
        self.struck.unlink(missing_ok=True)
        part = self.order.with_suffix(".part")
        part.write_text(f"{rank}:{kind}")
        part.rename(self.order)

    def _supervised(self) -> bool:
        assert self.link is not None
        return bool(self.link.state().epoch)

    def _watch(self) -> None:
        assert self.link is not None
        while not self._closing.is_set():
            state = self.link.state()
            if not self.states or self.states[-1][1] != state:
                self.states.append((time.monotonic(), state))
            time.sleep(0.005)

    def wait(self, *phases: str, epoch: int = 0, timeout_s: float = START_S) -> tuple[float, m.EngineState]:
        """When the first state of one of the phases, of `epoch` or a later one, was seen; and the state."""

        def found() -> list[tuple[float, m.EngineState]]:
            seen = [(at, s) for at, s in list(self.states) if s.phase in phases and s.epoch >= epoch]
            return seen

        what = f"{phases} of epoch {epoch}"
        try:
            wait_until(found, timeout_s, what)
        except AssertionError:
            raise AssertionError(f"{what} not within {timeout_s} s; states: {self.states[-5:]}") from None
        return found()[0]

    def struck_at(self, timeout_s: float = START_S) -> float:
        """When the accident happened, in monotonic seconds."""
        wait_until(self.struck.exists, timeout_s, "the accident")
        return float(self.struck.read_text())

    def submit(self, prompt: Sequence[int], tokens: int = 24, adapter: str = "") -> Answer:
        assert self.link is not None
        answer = Answer()
        params = m.SamplingParams(max_tokens=tokens)
        data = np.asarray(prompt, np.int32).tobytes()
        self.link.submit(self.link.reserve(), [m.SequenceRequest(data, params, adapter)], answer.take)
        return answer

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last heartbeat."""
        assert self.link is not None
        beat = self.link.beat()
        assert beat is not None, "no engine runs"
        return beat.metrics

    def pids(self) -> list[int]:
        """Return the pids of the living ranks in rank order."""
        found = {}
        for pid in processes.all_pids():
            line = processes.command_line(pid)
            if str(FAULTY_RANK) in line and str(self.engine_dir) in line:
                found[int(line[line.index("--rank") + 1])] = pid
        return [found[rank] for rank in sorted(found)]

    def supervisor(self) -> int:
        owner = runtime_dir.read_owner(self.folder)
        assert owner is not None
        return owner.holder_pid

    @property
    def folder(self) -> Path:
        (folder,) = [path for path in (self.root / "run").iterdir() if path.is_dir()]
        return folder

    def close(self) -> None:
        self._closing.set()
        if self.link is not None:
            self.link.close()
        self._owner.kill()
        self._owner.wait()
        try:
            wait_until(lambda: not self.pids(), 60, "the end of all ranks")
        finally:
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.root, ignore_errors=True)


def write_model(folder: Path, layers: int = 4) -> tuple[object, Path, Path]:
    """A GPT-2 of 4 heads with an adapter: transformers' model, weight directory, folder of adapters."""
    from tests.checkpoints import FAMILIES
    from tests.lora_adapters import make_adapter
    from tridecode.converters.adapters import write_targets

    case = FAMILIES["gpt2"]
    model = case(**{**case.shared, "n_layer": layers})
    planned = write_weights(model, folder)
    write_targets(folder / "weights", planned)
    make_adapter(model, folder / "adapters" / ADAPTER, seed=3)
    return model, folder / "weights", folder / "adapters"


def write_weights(model: Any, folder: Path) -> PlannedConversion:
    """A model of transformers as the weight directory folder / "weights"."""
    from tests.checkpoints import save
    from tridecode.converters.checkpoint import open_checkpoint
    from tridecode.converters.convert import plan_conversion

    planned = plan_conversion(open_checkpoint(str(save(model, folder / "hf"))))
    planned.write(folder / "weights")
    return planned
