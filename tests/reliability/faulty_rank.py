"""A rank of the real engine that fails once at a named point, to test how failures are attributed.

The supervisor starts it instead of `python -m tridecode.backend.engine` (TRIDECODE_RANK_COMMAND).
TRIDECODE_TEST_ACCIDENT is RANK:POINT:KIND. The accident happens once: it writes the monotonic time to the
file TRIDECODE_TEST_STRUCK, which must not exist before.

An accident can also be ordered while the engine serves. The rank named in the file TRIDECODE_TEST_ORDER,
RANK:KIND, takes the file and fails STEP steps later, when the other ranks have the plan of that step. This
works with CUDA graphs as well, which call neither all_reduce nor share_tokens: the other ranks' kernels then
wait for this rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the supervisor starts this file as a program

import torch

from tridecode.backend.engine import __main__ as program
from tridecode.backend.engine.adapters.store import AdapterStore
from tridecode.backend.engine.device import file_weights, loading, preparation
from tridecode.backend.engine.device.device_state import DeviceState
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.host_tier.store import HostStore, Transfer
from tridecode.backend.engine.ranks.parallel import ProcessRanks
from tridecode.backend.engine.step.decode_graphs import Capturer
from tridecode.backend.supervisor.rank_link import RankLink
from tridecode.backend.weights.reader import WeightReader
from tridecode.kernels.operands import Batch

STEP = 6  # index of the step in which an accident at point "step" happens
LONG_S = 600.0
SLOW_S = 5.0


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _fail() -> None:
    raise ValueError("an accident of this test")


def _hang() -> None:
    time.sleep(LONG_S)


def _spin() -> None:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        pass


def _slow() -> None:
    """Keep computing, as in a step that takes too long."""
    x, end = torch.ones(256, 256), time.monotonic() + SLOW_S
    while time.monotonic() < end:
        x = (x @ x).clamp(max=1.0)


def _leave() -> None:
    os._exit(3)


KINDS: dict[str, Callable[[], None]] = {
    "kill": _kill, "stop": _stop, "fail": _fail, "hang": _hang, "spin": _spin, "slow": _slow, "leave": _leave,
}  # fmt: skip


def _at(owner: Any, name: str, strike: Callable[..., None]) -> None:
    """Call strike with the arguments of `owner.name` before each call of it."""
    before = getattr(owner, name)

    def run(*arguments: Any, **named: Any) -> Any:
        strike(*arguments)
        return before(*arguments, **named)

    setattr(owner, name, run)


def _behind(owner: Any, name: str, strike: Callable[..., None]) -> None:
    """Call strike with the arguments of `owner.name` after each call of it."""
    whole = getattr(owner, name)

    def run(*arguments: Any, **named: Any) -> Any:
        result = whole(*arguments, **named)
        strike(*arguments)
        return result

    setattr(owner, name, run)


def arrange(point: str, strike: Callable[[], None]) -> None:
    """Arrange that `strike` is called when this rank reaches the point."""
    calls = [0]

    def at(number: int) -> Callable[..., None]:
        def count(*_: Any) -> None:
            calls[0] += 1
            if calls[0] == number:
                strike()

        return count

    if point == "python":
        strike()
    elif point == "joining":
        _at(ProcessRanks, "__init__", at(1))
    elif point == "verify":
        _at(WeightReader, "verify", at(1))
    elif point == "loading":
        _at(file_weights.FileWeights, "tensor", at(8))
    elif point == "cache":
        _at(DeviceState, "allocate_cache", at(1))
    elif point == "peers":
        _at(loading, "map_peers", at(1))
    elif point == "warm-up":
        _at(Engine, "run", at(2))
    elif point == "graphs":
        _at(StandInCapturer, "run", at(3))
    elif point == "step":
        _at(ProcessRanks, "all_reduce" if _tensor_size() > 1 else "share", at(4 * STEP))
    elif point == "plan":  # between two steps
        _at(Engine, "launch", at(STEP))
    elif point == "adapter":
        _at(AdapterStore, "_place_table", at(1))
    elif point in ("copy-out", "copy-in"):
        _tear(point, strike)
    elif point == "end":
        _at(Engine, "close", at(1))
    else:
        raise SystemExit(f"no point {point}")


def _tear(point: str, strike: Callable[[], None]) -> None:
    """Call `strike` in the middle of a copy to or from the host tier, when its slots or blocks are half
    written.
    """

    def half(store: HostStore, transfer: Transfer, *_: Any) -> None:
        part = transfer.part
        if point == "copy-out" and part.outs:
            for out in part.outs:
                store._slots[out.slot, : store.region.slot_bytes // 2] = 0x55
            strike()
        if point == "copy-in" and part.ins:
            for _, block in part.ins:
                store._copies.tensors[0][block] = 0
            strike()

    _at(HostStore, "_copy", half)


class StandInCapturer(Capturer):
    """Runs the batches that a GPU would capture."""

    def __call__(self, batch: Batch, what: str) -> Any:
        self._report(f"the capture of CUDA graph {what}")
        self.run()
        self._run(batch)

    def run(self) -> None: ...


def stand_in_for_a_gpu() -> None:
    """Make the engine run the start-up phases of a GPU on the CPU."""
    prepare = preparation.prepare

    def run(engine: Engine, phase: Callable[[str], None], *others: Any) -> None:
        engine.is_asynchronous = True
        prepare(engine, phase, *others)
        engine.is_asynchronous, engine.graphs, engine.prompt_graphs = False, None, None

    preparation.prepare = run
    loading.PEER_DEVICES = frozenset({"cpu"})
    preparation.can_capture = lambda engine: True
    preparation.Capturer = StandInCapturer  # type: ignore[misc]
    torch.cuda.synchronize = lambda device=None: None


def take_orders(order: Path, rank: str, strike: Callable[[str], None]) -> None:
    """Arrange that `strike` is called, during a step, with the kind that `order` names for this rank."""
    waiting: list[str] = []  # the kind, once per remaining step

    def step(*_: Any) -> None:
        if waiting:
            kind = waiting.pop()
            if not waiting:
                strike(kind)
            return
        wanted, _, kind = order.read_text().partition(":") if order.exists() else ("", "", "")
        if wanted == rank:
            order.unlink()
            waiting.extend([kind] * STEP)

    if rank == "0":  # rank 0 has then sent the plan
        _behind(ProcessRanks, "broadcast_plan", step)
    else:  # this rank has then received the plan
        _at(Engine, "launch", step)


def _tensor_size() -> int:
    return int(os.environ.get("TRIDECODE_TEST_TENSOR", "2"))


def disagree(what: str) -> None:
    """Make this rank differ from the others in `what`."""
    if what == "flip":  # flip a bit of the sampling state, which each tensor rank has, in an unused slot

        def flip(engine: Engine, *_: Any) -> None:
            engine.state.sampling.slots[-1, 0] = 7

        _at(Engine, "launch", flip)
        return
    facts = program.facts_of

    def wrong(*arguments: Any, **named: Any) -> dict[str, str]:
        return {**facts(*arguments, **named), what: "another"}

    program.facts_of = wrong


def record(struck: Path) -> None:
    """Write the time of the accident at once, so that a reader never sees an empty file."""
    part = struck.with_suffix(".part")
    part.write_text(str(time.monotonic()))
    part.rename(struck)


def main() -> int:
    if os.environ.get("TRIDECODE_TEST_GPU_PHASES"):
        stand_in_for_a_gpu()
    rank, _, rest = os.environ.get("TRIDECODE_TEST_ACCIDENT", "").partition(":")
    struck = Path(os.environ.get("TRIDECODE_TEST_STRUCK", "/nonexistent"))
    mine = sys.argv[sys.argv.index("--rank") + 1]

    def strike(kind: str) -> None:
        record(struck)
        KINDS[kind]()

    if rank == mine and not struck.exists():
        point, _, kind = rest.partition(":")
        if point == "disagree":
            record(struck)
            disagree(kind)
        else:
            arrange(point, lambda: strike(kind))
    elif not rank:
        take_orders(Path(os.environ.get("TRIDECODE_TEST_ORDER", "/nonexistent")), mine, strike)
    return program.main()


if __name__ == "__main__":
    assert RankLink is not None
    sys.exit(main())
