"""Loads weight files to a rank's tensors on the device, in the engine's dtype and the operations' layout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tridecode.backend import models
from tridecode.backend.base.byte_budget import ByteBudget
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.reader import WeightReader
from tridecode.kernels.ops import Ops

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_THREADS = 8
_CHUNK_BYTES = 16 << 20  # bytes of a pinned buffer, two per thread: one is filled while the other is copied
_COPIED_BYTES = 512 << 20  # bytes of tensors that are merged or cut in host memory, or one larger tensor
_AHEAD = 48  # tensors on the device that the model has not taken yet


class Uploader:
    """Copies tensors from mapped files to a CUDA device ahead of their use, several at a time.

    `read(name)` gives a tensor on the CPU; it runs in the uploader's threads. `copied_bytes(name)`: the
    memory that a contiguous one takes, which is bounded for all threads together.
    """

    def __init__(
        self,
        names: Iterable[str],
        read: Callable[[str], Tensor],
        device: torch.device,
        copied_bytes: Callable[[str], int] = lambda name: 0,
    ):
        self._read, self._device, self._copied_bytes = read, device, copied_bytes
        self._budget = ByteBudget(_COPIED_BYTES)
        self._local = threading.local()
        self._change = threading.Condition()
        self._ahead = 0  # tensors on the device, or in flight, that the model has not taken
        self._wanted: set[str] = set()  # taken while their upload was waiting for room
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="upload")
        self._futures: dict[str, Future[Tensor]] = {
            name: self._pool.submit(self._upload_ahead, name) for name in names
        }

    def take(self, name: str) -> Tensor:
        """Return the tensor on the device: copied ahead or, if it is not queued yet, copied now."""
        future = self._futures.pop(name, None)
        if future is None or future.cancel():
            return self._upload(name)
        with self._change:  # this upload must not wait for room: only later takes make room
            self._wanted.add(name)
            self._change.notify_all()
        try:
            return future.result()
        finally:
            with self._change:
                self._ahead -= 1
                self._change.notify_all()

    def close(self) -> None:
        """Drop the tensors that were not taken."""
        for future in self._futures.values():
            future.cancel()
        with self._change:
            self._wanted.update(self._futures)
            self._change.notify_all()
        self._pool.shutdown(wait=True)

    def _upload_ahead(self, name: str) -> Tensor:
        with self._change:
            self._change.wait_for(lambda: self._ahead < _AHEAD or name in self._wanted)
            self._ahead += 1
        return self._upload(name)

    def _upload(self, name: str) -> Tensor:
        with self._budget.hold(self._copied_bytes(name)):
            return self._to_device(self._read(name).contiguous())

    def _to_device(self, source: Tensor) -> Tensor:
        out = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        flat_in, flat_out = source.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
        stream, buffers, events = self._staging()
        # the memory of `out` may have been freed while queued kernels still read it
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for turn, start in enumerate(range(0, flat_in.numel(), _CHUNK_BYTES)):
                part = flat_in[start : start + _CHUNK_BYTES]
                buffer, event = buffers[turn % 2][: part.numel()], events[turn % 2]
                event.synchronize()
                buffer.copy_(part)
                flat_out[start : start + part.numel()].copy_(buffer, non_blocking=True)
                event.record(stream)
        stream.synchronize()
        return out

    def _staging(self) -> tuple[torch.cuda.Stream, list[Tensor], list[torch.cuda.Event]]:
        """Return this thread's stream and its two pinned buffers."""
        if not hasattr(self._local, "staging"):
            torch.cuda.set_device(self._device)
            buffers = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._local.staging = (
                torch.cuda.Stream(self._device),
                buffers,
                [torch.cuda.Event(), torch.cuda.Event()],
            )
        return self._local.staging


class FileWeights(Weights):
    """The tensors of a WeightReader. `progress` is called with each tensor's name.

    On CUDA the files are read by several threads, in the order of `specs`, ahead of the model. Call `close`
    when the model is complete.
    """

    def __init__(
        self,
        reader: WeightReader,
        specs: list[WeightSpec],
        tensor_rank: int,
        tensor_size: int,
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device,
        progress: Callable[[str], None] | None = None,
        int8_mode: int = 0,
        head_mode: int = 0,
    ):
        quantization = reader.config.quantization
        super().__init__(specs, ops, quantization, int8_mode, tensor_rank, tensor_size, dtype, head_mode)
        self._reader, self._device = reader, device
        self._progress = progress or (lambda name: None)
        self._uploader: Uploader | None = None
        if device.type == "cuda":
            self._uploader = Uploader(self.files, self._read, device, self._copied_bytes)

    def close(self) -> None:
        if self._uploader is not None:
            self._uploader.close()

    def _read(self, name: str) -> Tensor:
        return self._reader.read(self.files[name], self.rank, self.size)

    def _copied_bytes(self, name: str) -> int:
        return self._reader.copied_bytes(self.files[name], self.rank, self.size)

    def tensor(self, name: str) -> Tensor:
        self._progress(name)
        spec = self.files[name]
        dtype = self._reader.file_dtype(spec) if spec.dtype else self.dtype
        if self._uploader is not None:
            return self._uploader.take(name).to(dtype)
        return self._reader.copy(spec, self.rank, self.size, dtype)


@contextmanager
def unrounded_weights(
    served: Path,
    config: EngineConfig,
    ops: Ops,
    device: torch.device,
    directory: Path | None,
    model: ModelConfig,
) -> Iterator[Weights]:
    """Return the weights of another model for an engine of one rank, not quantised at load.

    directory: None: `served`, whose files have been verified. Raises WeightFileError.
    """
    specs = models.family(model.family).weight_specs(model)
    reader = WeightReader(directory or served, model)
    if directory is not None:
        reader.verify(config.verify_weights, specs)
    weights = FileWeights(reader, specs, 0, 1, DTYPES[config.data_type], ops, device)
    try:
        yield weights
    finally:
        weights.close()
