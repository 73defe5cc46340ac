"""Measures the sum over tensor ranks, through peer memory and through NCCL, in microseconds per call.

    python -m tridecode.tools.bench.studies.all_reduce [--ranks 2] [--columns 4096] [--rows 1,8,64,256]
        [--out FILE]

Each figure is from a CUDA graph of many calls. "norm": with residual and RMSNorm, which takes three launches
with NCCL. With more than two ranks, one shot and two shots are measured at every size, for the limits of
scratch.PEER_LIMITS. One process per GPU; the results are first compared with float64.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.ranks.parallel import ProcessRanks
from tridecode.backend.engine.ranks.peer_memory import join_peers
from tridecode.kernels.cuda import Cuda
from tridecode.kernels.operands import Norm
from tridecode.kernels.peer_sums import PeerSums
from tridecode.kernels.scratch import PeerLimits

_CALLS, _REPLAYS, _LIMIT_S = 32, 8, 20.0
WAYS = {"one shot": PeerLimits(8, 1 << 30, 0), "two shots": PeerLimits(8, 0, 1 << 30)}


def measure(run: Callable[[], None], barrier: Callable[[str], None], name: str) -> float:
    """Microseconds of a call."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    barrier(name)
    graph.replay()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(end) / (_CALLS * _REPLAYS)


def of_limits(ops: Cuda, ranks: ProcessRanks, limits: PeerLimits, rows: int, columns: int) -> PeerSums:
    """Sums that take one of WAYS. Collective."""
    place = ranks.tensor_rank, ranks.tensor_size
    sums = PeerSums(ops.gpu, *place, rows, columns, torch.bfloat16, _LIMIT_S, limits=limits)
    sums.connect(ranks.exchange_bytes(sums.handle))
    return sums


@torch.inference_mode()
def rank_figures(rank: int, arguments: argparse.Namespace, meeting: str) -> list[dict[str, Any]]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    ranks = ProcessRanks(rank, arguments.ranks, 1, meeting, device)
    ops, columns = Cuda(device), arguments.columns
    config = EngineConfig(max_step_tokens=max(arguments.rows))
    sums = join_peers(ranks, ops, config, columns, dtype)
    if sums is None:
        raise RuntimeError("no peer memory")
    ways = {"peers": sums}
    if arguments.ranks > 2:
        ways |= {
            name: of_limits(ops, ranks, limits, max(arguments.rows), columns) for name, limits in WAYS.items()
        }
    figures = []
    weight = torch.rand(columns, device=device).to(dtype)
    norm = Norm(weight, None, 1e-5)
    for rows in arguments.rows:
        generator = torch.Generator().manual_seed(rows)
        parts = torch.randn(arguments.ranks, rows, columns, generator=generator).to(dtype)
        x = torch.randn(rows, columns, generator=generator).to(device, dtype)
        mine, out, normed = parts[rank].to(device), torch.empty_like(x), torch.empty_like(x)
        taken = {name: way for name, way in ways.items() if way.takes(mine)}
        next(reversed(taken.values())).add_rows(mine, (), x, norm, out=out, normed=normed)
        wanted = parts.double().sum(0) + x.double().cpu()
        error = (out.double().cpu() - wanted).abs().max().item() / wanted.abs().max().item()

        def library_norm(added: Tensor, residual: Tensor, norm: Norm, *, out: Tensor) -> None:
            ranks.all_reduce(added)
            residual.add_(added)
            ops.norm(residual, norm, out=out)

        zeros = torch.zeros_like(x), torch.zeros_like(x)
        runs: dict[str, Callable[[], None]] = {
            **{name: partial(way.add_rows, mine, out=out) for name, way in taken.items()},
            **{
                f"{name}, norm": partial(way.add_rows, mine, (), x, norm, out=out, normed=normed)
                for name, way in taken.items()
            },
            "NCCL": partial(ranks.all_reduce, zeros[0]),
            "NCCL, norm": partial(library_norm, zeros[1], x.clone(), norm, out=normed),
        }
        took = {name: measure(run, ranks.barrier, f"{name} {rows}") for name, run in runs.items()}
        figures.append({"rows": rows, "error": error, **{name: round(us, 2) for name, us in took.items()}})
        if rank == 0:
            print(figures[-1], flush=True)
    ranks.barrier("end")
    ranks.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rows", default="1,8,32,64,128,256,512,2048,8192")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    arguments.rows = [int(rows) for rows in arguments.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        meeting = f"file://{folder}/ranks"
        others = [
            context.Process(target=rank_figures, args=(rank, arguments, meeting), daemon=True)
            for rank in range(1, arguments.ranks)
        ]
        for process in others:
            process.start()
        figures = rank_figures(0, arguments, meeting)
        for process in others:
            process.join(10)
            process.kill()
    if arguments.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        settings = {"ranks": arguments.ranks, "columns": arguments.columns, "dtype": "bf16"}
        Path(arguments.out).write_text(json.dumps({**about, **settings, "us": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
