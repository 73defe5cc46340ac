"""The LoRA adapters of one rank: loaded in a separate thread, stored on the device by number.

Rank 0 reads and checks a directory once and sends it to the other ranks, so that all have the same; it uses a
separate torch group, and steps continue meanwhile. Every rank stores its share: A is split like the inputs of
its matrix, B like the outputs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue

import torch
from torch import Tensor

from tridecode.backend.base.errors import CapacityError, CheckpointError, TridecodeError
from tridecode.backend.engine.adapters.channel import AdapterChannel
from tridecode.backend.engine.adapters.table import unknown_adapter
from tridecode.backend.engine.ranks.agreement import PeerLost
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.lora import LoraTargets, read_targets
from tridecode.backend.weights.lora_tensors import Lora, fingerprint, read_lora
from tridecode.kernels.operands import Linear

log = logging.getLogger("tridecode.engine")

_LOOK_S = 1.0  # interval between checks of the directories of loaded adapters
#: weight of a Linear, by identity -> (a (in, R), b (R, out)) of this rank
Table = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Place:
    """The matrices of a rank's model.

    linears: those of this rank's stage, by the stems of their files. dtype, device: those of the activations.
    """

    specs: Mapping[str, WeightSpec]
    linears: Mapping[tuple[str, ...], Linear]
    tensor_rank: int
    tensor_size: int
    num_stages: int
    dtype: torch.dtype
    device: torch.device

    def table(self, lora: Lora) -> Table:
        """Return this rank's share of an adapter, on the device.

        CheckpointError if it does not fit the model.
        """
        missing = set(lora.pairs) - {name for names in self.linears for name in names}
        missing = {name for name in missing if f"{name}.weight" in self.specs or self.num_stages == 1}
        if missing:
            raise CheckpointError(f"the adapter changes {min(missing)}, which this model does not have")
        return {
            id(linear.weight): self._pair(names, lora)
            for names, linear in self.linears.items()
            if any(name in lora.pairs for name in names)
        }

    def _pair(self, names: tuple[str, ...], lora: Lora) -> tuple[Tensor, Tensor]:
        """Return a (in, R) and b (R, out) for the matrices `names`, which one GEMM computes side by side."""
        shares = [self._share(name, lora.pairs.get(name)) for name in names]
        a = torch.cat([share[0] for share in shares])
        b = torch.block_diag(*(share[1] for share in shares)) if len(shares) > 1 else shares[0][1]
        a, b = (tensor.t().to(self.dtype).contiguous() for tensor in (a, b))
        if not b.isfinite().all() or not a.isfinite().all():
            raise CheckpointError(f"the adapter has values for {names[0]} that do not fit {self.dtype}")
        return a.to(self.device), b.to(self.device)

    def _share(self, name: str, pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Return a (R, in) and b (out, R) of one matrix, split like the matrix; R is 0 without a pair."""
        spec = self.specs[f"{name}.weight"]
        inputs, outputs = spec.shape
        if pair is None:
            pair = torch.zeros(0, inputs), torch.zeros(outputs, 0)
        a, b = pair
        if (a.shape[1], b.shape[0]) != spec.shape:
            found = f"{a.shape[1]} inputs and {b.shape[0]} outputs"
            raise CheckpointError(
                f"lora_targets.json has {found} for {name}; config.ini makes it {spec.shape}"
            )
        if spec.axis is None:
            return a, b
        if spec.axis == 0:
            return self._cut(spec, a.t()).t(), b
        return a, self._cut(spec, b)

    def _cut(self, spec: WeightSpec, rows: Tensor) -> Tensor:
        """Return this rank's share of rows that are split like the matrix, with zeros for padding."""
        sizes = spec.share_sizes(self.tensor_size)
        cuts = spec.slices(self.tensor_rank, self.tensor_size)
        parts = [
            part
            for (start, stop), size in zip(cuts, sizes)
            for part in (rows[start:stop], rows.new_zeros(size - (stop - start), rows.shape[1]))
        ]
        return torch.cat(parts)


class AdapterStore:
    """The tables of a rank and, on rank 0, the Loader that engine.adapters.Adapters works with.

    folder: has a directory for each adapter. weights: the directory of lora_targets.json. channel: to the
    other ranks, if any. on_finished: called in the loading thread when a load has ended. on_broken: called
    there with the error that ended the thread; the rank must then exit, because it can no longer load
    adapters. broken: that error, if the thread ended before on_broken was set.
    """

    def __init__(
        self,
        folder: Path,
        weights: Path,
        place: Place,
        max_loras: int,
        max_rank: int,
        channel: AdapterChannel | None = None,
    ):
        self.folder, self.max_loras = Path(folder), max_loras
        self.on_finished: Callable[[], None] = lambda: None
        self.on_broken: Callable[[BaseException], None] = lambda error: None
        self.broken: BaseException | None = None
        self._weights, self._place, self._max_rank = Path(weights), place, max_rank
        self._channel = channel
        self._tables: dict[int, Table] = {}
        self._targets: LoraTargets | None = None
        self._jobs: Queue[tuple[int, str] | None] = Queue()
        self._finished: deque[tuple[int, TridecodeError | None]] = deque()
        self._changed: deque[str] = deque()
        self._seen: dict[str, tuple[int, ...]] = {}  # name -> fingerprint of the loaded directory
        self._thread: threading.Thread | None = None
        if channel is not None and not channel.is_first:
            self._run_in_thread(self._follow)

    # ------------------------------------------------------------ the step thread

    def table(self, number: int) -> Table:
        return self._tables[number]

    def drop(self, numbers: Iterable[int]) -> None:
        """Free adapters.

        Called between steps: memory that a step in flight reads is freed in the device's stream order.
        """
        for number in numbers:
            self._tables.pop(number, None)

    def start(self, number: int, name: str) -> None:
        if self._thread is None:
            self._run_in_thread(self._lead)
        self._jobs.put((number, name))

    def finished(self) -> list[tuple[int, TridecodeError | None]]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def has_finished(self) -> bool:
        return bool(self._finished)

    def changed(self) -> list[str]:
        return [self._changed.popleft() for _ in range(len(self._changed))]

    def close(self) -> None:
        """End the threads; on rank 0 also those of the other ranks. Must be called on every rank."""
        if self._channel is not None and self._channel.is_first and self._thread is None:
            self._run_in_thread(self._lead)
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(5.0)

    def _run_in_thread(self, target: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._guarded, args=(target,), name="adapters", daemon=True)
        self._thread.start()

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:
            log.error("the thread that loads adapters ends: %s: %s", type(error).__name__, error)
            self.broken = error
            self.on_broken(error)

    # ------------------------------------------------------------ the loading thread of rank 0

    def _lead(self) -> None:
        looked = time.monotonic()
        while True:
            try:
                job = self._jobs.get(timeout=_LOOK_S)
            except Empty:
                job = (0, "")
            if job is None:
                break
            if job[1]:
                self._finished.append((job[0], self._load(*job)))
                self.on_finished()
            if time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                self._look()
        if self._channel is not None:
            self._channel.end()

    def _load(self, number: int, name: str) -> TridecodeError | None:
        """Load an adapter on every rank. If that fails, return the reason; nothing remains loaded."""
        started = time.monotonic()
        try:
            lora = self._read(name)
            if self._channel is not None:
                self._channel.send(number, lora)
        except PeerLost:
            raise
        except TridecodeError as error:
            return error
        except Exception as error:
            log.exception("the adapter %s could not be read", name)
            return CheckpointError(f"the adapter {name!r} could not be read: {type(error).__name__}")
        fault = self._place_table(number, lora)
        if self._channel is not None and not self._channel.agree(fault is None) and fault is None:
            fault = CapacityError(f"a rank could not load the adapter {name!r}; the server's log says why")
        if fault is None:
            seconds = time.monotonic() - started
            log.info("loaded the adapter %s, %s bytes, in %.2f s", name, f"{lora.num_bytes:,}", seconds)
        return fault

    def _read(self, name: str) -> Lora:
        directory = self.folder / name
        try:
            state = fingerprint(directory)
        except (FileNotFoundError, NotADirectoryError):
            if not directory.is_dir():
                raise unknown_adapter(name, self._names(), "lora_path") from None
            state = ()
        self._seen.pop(name, None)
        if self._targets is None:
            self._targets = read_targets(self._weights)
        lora = read_lora(directory, self._targets, self._max_rank)
        self._seen[name] = state
        return lora

    def _names(self) -> list[str]:
        try:
            return [
                entry.name for entry in os.scandir(self.folder) if entry.is_dir() and entry.name[0] != "."
            ]
        except OSError:
            return []

    def _look(self) -> None:
        """Return which of the loaded directories have changed or gone."""
        for name, state in list(self._seen.items()):
            try:
                now: tuple[int, ...] = fingerprint(self.folder / name)
            except OSError:
                now = ()
            if now != state:
                del self._seen[name]
                self._changed.append(name)

    # ------------------------------------------------------------ any loading thread

    def _place_table(self, number: int, lora: Lora) -> TridecodeError | None:
        try:
            with torch.inference_mode():
                self._tables[number] = self._place.table(lora)
            return None
        except TridecodeError as error:
            return error
        except torch.OutOfMemoryError:
            return CapacityError(
                f"{lora.num_bytes:,} bytes of an adapter do not fit into the device's memory"
            )
        except Exception as error:
            log.exception("an adapter could not be loaded")
            return CheckpointError(f"the adapter could not be loaded: {type(error).__name__}")

    def _follow(self) -> None:
        """The loading thread of the other ranks: receive from rank 0 until it sends the end."""
        assert self._channel is not None
        while (received := self._channel.receive()) is not None:
            number, lora = received
            error = self._place_table(number, lora)
            if error is not None:
                log.error("adapter %d: %s", number, error)
            self._channel.agree(error is None)
