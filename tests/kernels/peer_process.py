"""Ranks of tests/kernels/test_peer_sums.py, in processes of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from torch import Tensor

from tridecode.kernels.ops import Norm

LAUNCHES = 200  # of a graph that is replayed twice
SHAPES = [(1, 4096), (3, 64), (37, 4096), (5, 768), (2, 8192), (1, 14336), (300, 1024)]


def on_ranks(world: int, what: str | Callable[..., str]) -> list[str]:
    """Run `what`, a function or the name of one here, on every rank; what each of them found wrong, "" for
    nothing."""
    context = mp.get_context("spawn")
    pipes = [[context.Pipe() for _ in range(world)] for _ in range(world)]
    answers = context.Queue()
    processes = [
        context.Process(target=_run, args=(rank, world, what, pipes, answers), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=180) for _ in range(world))
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return [found[rank] for rank in range(world)]


def _run(rank, world, what, pipes, answers) -> None:
    try:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        work = globals()[what] if isinstance(what, str) else what
        found = work(rank, world, Exchange(rank, world, pipes))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    answers.put((rank, found))


class Exchange:
    def __init__(self, rank: int, world: int, pipes):
        self.rank, self.world, self.pipes = rank, world, pipes

    def __call__(self, data: bytes) -> list[bytes]:
        """Everybody's data."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        for other in others:
            self.pipes[self.rank][other][0].send_bytes(data)
        return [
            data if rank == self.rank else self.pipes[rank][self.rank][1].recv_bytes()
            for rank in range(self.world)
        ]


def make(rank, world, exchange, rows, columns, dtype, limit_s=60.0, sampled_rows=0, ops=None):
    from tridecode.kernels.cuda import Cuda
    from tridecode.kernels.peer_sums import PeerSums

    ops = ops or Cuda(torch.device("cuda"))
    sums = PeerSums(ops, rank, world, rows, columns, dtype, limit_s, sampled_rows)
    sums.connect(exchange(sums.handle))
    return sums


def normed_rows(x: Tensor, norm: Norm) -> Tensor:
    """In float64, of the documented definition."""
    x, weight = x.double(), norm.weight.double().cpu()
    if norm.bias is None:
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight
        + norm.bias.double().cpu()
    )


def random_rows(dtype, generator):
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


@torch.inference_mode()
def every_form(rank, world, exchange) -> str:
    """Sums of every shape and dtype, with every addend, against float64."""
    wrong = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, columns in SHAPES:
            if columns * dtype.itemsize > 32 << 10:
                continue
            sums = make(rank, world, exchange, rows, columns, dtype)
            normal = random_rows(dtype, torch.Generator().manual_seed(rows + columns))

            for count, biases, residual, kind in [
                (rows, 0, False, ""),
                (max(rows - 1, 1), 1, True, "layer"),
                (rows, 2, True, "rms"),
                (1, 0, True, "rms"),
                (rows, 1, False, "layer"),
            ]:
                parts, x = normal(world, count, columns), normal(count, columns)
                added = [normal(columns) for _ in range(biases)]
                weight, shift = normal(columns), normal(columns)
                parts[:, 0, :4] = -0.0
                gpu = [one.cuda() for one in added]
                norm = Norm(weight.cuda(), shift.cuda() if kind == "layer" else None, 1e-5) if kind else None
                out = x.cuda() if residual else torch.full((count, columns), torch.nan, dtype=dtype).cuda()
                normed = parts[rank].cuda() if kind else None
                torch.cuda.synchronize()
                partial = normed if normed is not None else parts[rank].cuda()
                sums.add_rows(partial, gpu, out if residual else None, norm, out=out, normed=normed)
                terms = [*parts.double(), *(one.double().expand(count, -1) for one in added)]
                wanted = sum(terms) + (x.double() if residual else 0)
                eps = torch.finfo(dtype).eps
                error = ((out.double().cpu() - wanted).abs() / (eps * (wanted.abs() + 1))).max()
                place = f"{dtype} {rows} x {columns}, {count} rows, {biases} biases, {kind or 'no norm'}"
                if not error <= (8 if dtype == torch.float32 else 2):  # up to five terms
                    wrong.append(f"{place}: off by {error:.1f} units")
                if norm is not None:
                    wanted = normed_rows(out.cpu(), norm)
                    error = ((normed.double().cpu() - wanted).abs() / (eps * (wanted.abs() + 1))).max()
                    if not error <= (8 if dtype == torch.float32 else 2):
                        wrong.append(f"{place}: norm off by {error:.1f} units")
                digest = hashlib.sha256(out.cpu().view(torch.uint8).numpy().tobytes()).digest()
                if len(set(exchange(digest))) > 1:
                    wrong.append(f"{place}: the ranks have different bits")
            exchange(b"done")
            sums.close()
    return "; ".join(wrong[:6])


@torch.inference_mode()
def special_numbers(rank, world, exchange) -> str:
    """-0.0, NaN and infinities pass; none of them is taken for rows that have not arrived."""
    sums = make(rank, world, exchange, 2, 64, torch.bfloat16)
    parts = torch.zeros(world, 2, 64)
    parts[:] = -0.0
    parts[0, 0, 5], parts[1, 0, 7], parts[0, 1, 9] = torch.nan, torch.inf, -torch.inf
    out = torch.ones(2, 64, dtype=torch.bfloat16).cuda()
    for _ in range(3):
        sums.add_rows(parts[rank].bfloat16().cuda(), out=out)
    wanted = parts.sum(0)
    found = out.float().cpu()
    exchange(b"done")
    sums.close()
    if sums.lost is not None or not torch.allclose(found, wanted, equal_nan=True):
        return f"lost {sums.lost}, found {found[:, :12].tolist()}"
    return ""


@torch.inference_mode()
def replayed(rank, world, exchange) -> str:
    """Many sums of differing data and numbers of rows in a graph, replayed beside sums without one."""
    sums = make(rank, world, exchange, 8, 256, torch.bfloat16)
    counts = [1 + launch * 5 % 8 for launch in range(LAUNCHES)]
    generator = torch.Generator().manual_seed(5)
    parts = torch.randint(-9, 10, (LAUNCHES, world, 8, 256), generator=generator).bfloat16()
    mine = parts[:, rank].contiguous().cuda()
    out = torch.full((LAUNCHES, 8, 256), torch.nan, dtype=torch.bfloat16).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch, count in enumerate(counts):
            sums.add_rows(mine[launch, :count], out=out[launch, :count])
    wanted = parts.double().sum(1)
    for turn in range(2):
        graph.replay()
        single = torch.empty_like(out[0])
        sums.add_rows(mine[0], out=single)
        for launch, count in enumerate(counts):
            if not torch.equal(out[launch, :count].double().cpu(), wanted[launch, :count]):
                return f"replay {turn}, launch {launch} of {count} rows; lost {sums.lost}"
        if not torch.equal(single.double().cpu(), wanted[0]):
            return f"the sum after replay {turn}"
        out.fill_(torch.nan)
    exchange(b"done")
    sums.close()
    return ""


@torch.inference_mode()
def abandoned(rank, world, exchange) -> str:
    """Rank 1 does not come: rank 0 ends within the limit, says so, and does not wait again."""
    import time

    sums = make(rank, world, exchange, 4, 256, torch.bfloat16, limit_s=0.5)
    found = ""
    if rank == 0:
        x = torch.ones(4, 256, dtype=torch.bfloat16).cuda()
        started = time.monotonic()
        for _ in range(20):
            sums.add_rows(x, out=x)
        torch.cuda.synchronize()
        took = time.monotonic() - started
        if sums.lost != 1 or not 0.4 < took < 3.0:
            found = f"lost {sums.lost} after {took:.2f} s"
    exchange(b"done")
    return found
