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
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, Queue

import torch

from tridecode.backend.base.errors import CapacityError, CheckpointError, TridecodeError
from tridecode.backend.engine.adapters.channel import AdapterChannel
from tridecode.backend.engine.adapters.place import Place, Table
from tridecode.backend.engine.adapters.table import Loaded, unknown_adapter
from tridecode.backend.engine.adapters.tables import AdapterTables
from tridecode.backend.engine.adapters.upload import Upload
from tridecode.backend.engine.ranks.agreement import PeerLost
from tridecode.backend.weights.lora import LoraTargets, read_targets
from tridecode.backend.weights.lora_tensors import Lora, fingerprint, read_lora
from tridecode.kernels.adapters.matrices import spans_of

log = logging.getLogger("tridecode.engine")

_LOOK_S = 1.0  # interval between checks of the directories of loaded adapters


class AdapterStore:
    """The tables of a rank and, on rank 0, the Loader that engine.adapters.Adapters works with.

    folder: has a directory for each adapter. weights: the directory of lora_targets.json. channel: connects
    the ranks, if there are several. tables: the kernels' tables, if kernels add the adapters. on_finished:
    called in the loading thread after each load. on_broken: called there with the error that ended the
    thread; the rank must then exit, because it can no longer load adapters. broken: that error, if the thread
    ended before on_broken was set.
    """

    def __init__(
        self,
        folder: Path,
        weights: Path,
        place: Place,
        max_loras: int,
        max_rank: int,
        channel: AdapterChannel | None = None,
        tables: AdapterTables | None = None,
    ):
        self.folder, self.max_loras = Path(folder), max_loras
        self.on_finished: Callable[[], None] = lambda: None
        self.on_broken: Callable[[BaseException], None] = lambda error: None
        self.broken: BaseException | None = None
        self._weights, self.place, self._max_rank = Path(weights), place, max_rank
        self._channel, self._device_tables = channel, tables
        self._upload = Upload(place.device)
        self._tables: dict[int, Table] = {}
        self._targets: LoraTargets | None = None
        self._jobs: Queue[tuple[int, str] | None] = Queue()
        self._finished: deque[Loaded] = deque()
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
            if self._device_tables is not None:
                self._device_tables.release(number)
            self._tables.pop(number, None)

    def start(self, number: int, name: str) -> None:
        if self._thread is None:
            self._run_in_thread(self._lead)
        self._jobs.put((number, name))

    def finished(self) -> list[Loaded]:
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

    def load_now(self, number: int, name: str) -> None:
        """Load an adapter in the calling thread, on rank 0, before any request names one."""
        loaded = self._load(number, name)
        if loaded.error is not None:
            raise loaded.error

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
                self._finished.append(self._load(*job))
                self.on_finished()
            if time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                self._look()
        if self._channel is not None:
            self._channel.end()

    def _load(self, number: int, name: str) -> Loaded:
        """Load an adapter on every rank. After a failure nothing remains loaded."""
        started = time.monotonic()
        try:
            lora = self.read(name)
            digest = lora.digest()
            if self._channel is not None:
                self._channel.send(number, lora)
        except PeerLost:
            raise
        except TridecodeError as error:
            return Loaded(number, error)
        except Exception as error:
            log.exception("the adapter %s could not be read", name)
            what = f"the adapter {name!r} could not be read: {type(error).__name__}"
            return Loaded(number, CheckpointError(what))
        fault = self._place_table(number, lora)
        if self._channel is not None and not self._channel.agree(fault is None) and fault is None:
            fault = CapacityError(f"a rank could not load the adapter {name!r}; the server's log says why")
        if fault is None:
            seconds = time.monotonic() - started
            log.info("loaded the adapter %s, %s bytes, in %.2f s", name, f"{lora.num_bytes:,}", seconds)
        return Loaded(number, fault, digest)

    def read(self, name: str) -> Lora:
        """Read an adapter of the folder. Raises TridecodeError."""
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
                self._tables[number] = self._placed(number, self.place.table(lora))
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

    def _placed(self, number: int, table: Table) -> Table:
        """Copy the table to the device, add it to the kernels' tables, and return it."""
        host = [tensor for a, b in table.values() for tensor in (a.t(), b)]
        spans = [] if self._device_tables is None else [spans_of(b) for _, b in table.values()]
        copies = self._upload([*host, *spans])
        pairs, held = copies[: len(host)], copies[len(host) :]
        table = {weight: (a.t(), b) for weight, a, b in zip(table, pairs[::2], pairs[1::2])}
        if self._device_tables is not None:
            self._device_tables.place(number, table, dict(zip(table, held)), self._upload.write)
        return table

    def _follow(self) -> None:
        """The loading thread of the other ranks: receive from rank 0 until it sends the end."""
        assert self._channel is not None
        while (received := self._channel.receive()) is not None:
            number, lora = received
            error = self._place_table(number, lora)
            if error is not None:
                log.error("adapter %d: %s", number, error)
            self._channel.agree(error is None)
