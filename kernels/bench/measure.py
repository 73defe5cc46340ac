"""Timing on the device: chains of operations in a CUDA graph, as in decode steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
#: memory bandwidth and 16-bit matrix rate of an H200, both measured (docs/lab/engine_speed.md)
ROOF_BYTES, ROOF_FLOPS = 4.46e12, 790e12


@dataclass
class Result:
    """One measured case. microseconds: per call; peer: per call of cuBLAS or torch, None if it has no such
    operation.
    """

    operation: str
    case: str
    microseconds: float
    bytes: float = 0.0
    flops: float = 0.0
    peer: float | None = None

    @property
    def share(self) -> float:
        """Return the achieved share of the roofline: memory bandwidth or matrix units."""
        return max(self.bytes / ROOF_BYTES, self.flops / ROOF_FLOPS) / (self.microseconds * 1e-6)

    def line(self) -> str:
        if self.flops / ROOF_FLOPS > self.bytes / ROOF_BYTES:
            rate = f"{self.flops / self.microseconds / 1e6:7.0f} TFLOP/s"
        else:
            rate = f"{self.bytes / self.microseconds / 1e6:7.2f} TB/s   "
        peer = "" if self.peer is None else f"   peer {self.peer:9.1f} us"
        share = 100 * self.share
        return f"{self.operation:18} {self.case:44} {self.microseconds:9.1f} us {rate} {share:4.0f} %{peer}"

    def record(self) -> dict[str, object]:
        return {**asdict(self), "share_of_roof": self.share}


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `run` as a graph, after one warm-up call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def over(items: Iterable[T], call: Callable[[T], object]) -> Callable[[], None]:
    """Return a chain that calls `call` with each of the items."""

    def run() -> None:
        for item in items:
            call(item)

    return run


def microseconds(run: Callable[[], object], calls: int, replays: int = 5, repeats: int = 5) -> float:
    """Return the time per call: `run` makes `calls` calls and is captured; median over repeated replays.

    The tensors of the chain must together exceed the L2 cache, or the cache is measured.
    """
    graph = capture(run)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / replays / calls)
    return statistics.median(times)
