"""Transfers the results of a step to the host of rank 0.

With pipeline stages they come from the first tensor rank of the last stage, from host to host over a separate
gloo group: a receive that NCCL posts ahead would occupy part of rank 0's GPU until the last stage is done,
and the kernels of the next step may need the whole GPU.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

#: time that `close` waits for the sender, whose peer may be gone
_LEAVE_S = 1.0


class Ranks(Protocol):
    rank: int
    num_stages: int
    is_pipelined: bool

    def to_first(self, x: Tensor | None, host: Tensor | None) -> None: ...

    def share(self, x: Tensor) -> None: ...


def empty_host(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory to which `device` can copy asynchronously."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_host(x: Tensor, host: Tensor | None = None) -> Tensor:
    """Copy x to the host; complete once the device has finished its work so far.

    host: destination; None: new memory, or x itself on a CPU.
    """
    if host is None:
        if x.device.type == "cpu":
            return x
        host = empty_host(tuple(x.shape), x.dtype, x.device)
    return host.copy_(x, non_blocking=True)


def to_first(
    ranks: Ranks,
    x: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    host: Tensor | None = None,
) -> Tensor:
    """Send x of the last stage to the host of rank 0; complete once the step is. Undefined on other ranks.
    All ranks call it in the same order.

    x: (shape) of dtype; read on the first tensor rank of the last stage only, None is allowed elsewhere.
    device: of this rank. host: memory for x, contiguous.
    """
    if ranks.num_stages == 1:
        assert x is not None or ranks.rank > 0
        return to_host(x, host) if x is not None else torch.empty(0, dtype=dtype)
    if host is None:
        host = empty_host(shape if ranks.rank == 0 else (0,), dtype, device)
    ranks.to_first(x, host)
    return host


def to_all(ranks: Ranks, x: Tensor, host: Tensor | None = None) -> Tensor:
    """Send x of the last stage to the host of every rank, and into x itself; see to_first for
    is_pipelined.
    """
    if ranks.is_pipelined:
        return to_first(ranks, x, tuple(x.shape), x.dtype, x.device, host)
    if ranks.num_stages > 1:
        ranks.share(x)
    return to_host(x, host)


class Outbox:
    """Sends tensors in order, in a separate thread, so that the thread that launches steps never waits for a
    send.
    """

    def __init__(self, send: Callable[[Tensor], None]):
        """send: sends a host tensor; may raise."""
        self._send = send
        self._waiting: queue.Queue[tuple[Tensor, torch.cuda.Event | None] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def put(self, x: Tensor) -> None:
        """Send x with its value at this point of the device's stream. Raises the error of an earlier send."""
        self.raise_if_failed()
        event, host = None, torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        host.copy_(x, non_blocking=True)
        if x.is_cuda:
            event = torch.cuda.Event(blocking=True)
            event.record()
        self._waiting.put((host, event))

    def raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (found := self._waiting.get()) is not None:
                host, event = found
                if event is not None:
                    event.synchronize()
                self._send(host)
        except BaseException as error:  # raised in the launching thread
            self._error = error

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(_LEAVE_S)
