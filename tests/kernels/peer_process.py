"""Ranks of tests/kernels/test_peer_sums.py, in processes of their own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.multiprocessing as mp
from torch import Tensor

from tridecode.kernels.operands import Norm
from tridecode.kernels.scratch import HALVED_TOKENS, PeerLimits

ONE_SHOT, TWO_SHOTS = PeerLimits(8, 1 << 30, 0), PeerLimits(8, 0, 1 << 30)
WAIT_S = 60.0
LAUNCHES = 200  # of a graph that is replayed twice
SHAPES = [(1, 4096), (3, 64), (37, 4096), (5, 768), (2, 8192), (1, 14336), (300, 1024)]


def on_ranks(world: int, *what: str | Callable[..., str]) -> list[str]:
    """Run each of `what`, a function or the name of one here, on every rank; what each found wrong, "" for
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
        exchange = Exchange(rank, world, pipes)
        works = [globals()[one] if isinstance(one, str) else one for one in what]
        found = "; ".join(filter(None, (work(rank, world, exchange) for work in works)))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    answers.put((rank, found))


class Exchange:
    def __init__(self, rank: int, world: int, pipes):
        self.rank, self.world, self.pipes = rank, world, pipes

    def __call__(self, data: bytes) -> list[bytes]:
        """Everybody's data. The lower of two ranks sends first: a pipe that nobody reads takes 200 KB."""
        return [data if rank == self.rank else self._swap(rank, data) for rank in range(self.world)]

    def _swap(self, rank: int, data: bytes) -> bytes:
        there = self.pipes[self.rank][rank][0]
        if self.rank < rank:
            there.send_bytes(data)
            return self._from(rank)
        found = self._from(rank)
        there.send_bytes(data)
        return found

    def _from(self, rank: int) -> bytes:
        pipe = self.pipes[rank][self.rank][1]
        if not pipe.poll(WAIT_S):
            raise TimeoutError(f"nothing from rank {rank}")
        return pipe.recv_bytes()


def make(rank, world, exchange, rows, columns, dtype, limits=None, limit_s=WAIT_S, sampled_rows=0, ops=None):
    from tridecode.kernels.cuda import Cuda
    from tridecode.kernels.peer_sums import PeerSums

    ops = ops or Cuda(torch.device("cuda"))
    sums = PeerSums(ops.gpu, rank, world, rows, columns, dtype, limit_s, sampled_rows, limits)
    sums.connect(exchange(sums.handle))
    return sums


def ways(world: int) -> list[PeerLimits]:
    """Return the algorithms for summing rows; two ranks have only one."""
    return [ONE_SHOT] if world == 2 else [ONE_SHOT, TWO_SHOTS]


def normed_rows(x: Tensor, norm: Norm) -> Tensor:
    """Compute the documented definition in float64."""
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


@dataclass
class Form:
    """A call of add_rows. parts: (ranks, T, C); x: the residual, or None; keeps: whether there is an out."""

    parts: Tensor
    biases: list[Tensor]
    x: Tensor | None
    norm: Norm | None
    keeps: bool

    def run(self, sums, rank: int) -> tuple[Tensor | None, Tensor | None]:
        """out and normed, in memory as a model has them: out where x was, normed where the part was."""
        dtype = self.parts.dtype
        partial = self.parts[rank].cuda()
        normed = partial if self.norm is not None else None
        residual = None if self.x is None else self.x.cuda()
        out = None
        if self.keeps:
            out = torch.full_like(partial, torch.nan, dtype=dtype) if residual is None else residual
        biases = [bias.cuda() for bias in self.biases]
        torch.cuda.synchronize()
        sums.add_rows(partial, biases, residual, self.norm, out=out, normed=normed)
        return tuple(None if one is None else one.cpu() for one in (out, normed))

    def complaints(self, out: Tensor | None, normed: Tensor | None) -> list[str]:
        """Return the differences from float64."""
        dtype = self.parts.dtype
        count = self.parts.shape[1]
        terms = [*self.parts.double(), *(bias.double().expand(count, -1) for bias in self.biases)]
        wanted = sum(terms) + (0 if self.x is None else self.x.double())
        found = []
        if out is not None:
            found += off("sum", out, wanted)
        if self.norm is not None and normed is not None:
            found += off("norm", normed, normed_rows(wanted.to(dtype) if out is None else out, self.norm))
        return found


def off(what: str, found: Tensor, wanted: Tensor) -> list[str]:
    """A complaint if they differ by more than the rounding of up to six terms."""
    eps = torch.finfo(found.dtype).eps
    units = ((found.double() - wanted).abs() / (eps * (wanted.abs() + 1))).max()
    return [] if units <= (8 if found.dtype == torch.float32 else 2) else [f"{what} off by {units:.1f} units"]


def forms(world: int, rows: int, columns: int, dtype: torch.dtype) -> Iterator[Form]:
    normal = random_rows(dtype, torch.Generator().manual_seed(rows + columns))
    for count, biases, residual, kind, keeps in [
        (rows, 0, False, "", True),
        (max(rows - 1, 1), 1, True, "layer", True),
        (rows, 2, True, "rms", True),
        (1, 0, True, "rms", True),
        (rows, 1, False, "layer", True),
        (rows, 1, True, "rms", False),
    ]:
        parts, x = normal(world, count, columns), normal(count, columns)
        parts[:, 0, :4] = -0.0
        weight, shift = normal(columns), normal(columns)
        norm = Norm(weight.cuda(), shift.cuda() if kind == "layer" else None, 1e-5) if kind else None
        yield Form(parts, [normal(columns) for _ in range(biases)], x if residual else None, norm, keeps)


@torch.inference_mode()
def every_form(rank, world, exchange) -> str:
    """Sums of every shape and dtype, with every addend, against float64; one shot and two, and all ranks,
    give the same bits."""
    wrong = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, columns in SHAPES:
            if columns * dtype.itemsize > 32 << 10:
                continue
            sums = [make(rank, world, exchange, rows, columns, dtype, limits) for limits in ways(world)]
            for form in forms(world, rows, columns, dtype):
                results = [form.run(each, rank) for each in sums]
                place = f"{dtype} {rows} x {columns}, {form.parts.shape[1]} rows: "
                wrong += [place + text for text in form.complaints(*results[0])]
                digests = {digest(result) for result in results}
                if len(digests) > 1:
                    wrong.append(place + "one shot and two give different bits")
                if len(set(exchange(digests.pop()))) > 1:
                    wrong.append(place + "the ranks have different bits")
            exchange(b"done")
            for each in sums:
                each.close()
    return "; ".join(wrong[:6])


def digest(tensors: Sequence[Tensor | None]) -> bytes:
    """Return a digest of the tensors' bits."""
    made = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            made.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return made.digest()


@torch.inference_mode()
def halves(rank, world, exchange) -> str:
    """Sums whose rows copy engines exchange have the bits of add_rows: of both halves, of different sizes, in
    more turns than there are words, with -0.0, while this rank's own kernels overwrite what was sent."""
    wrong = []
    for dtype, columns, turns in [
        (torch.bfloat16, 256, 1100),
        (torch.float16, 8192, 6),
        (torch.float32, 768, 6),
        (torch.bfloat16, 14336, 4),
    ]:
        sums = make(rank, world, exchange, HALVED_TOKENS, columns, dtype)
        normal = random_rows(dtype, torch.Generator().manual_seed(columns))
        step = torch.empty(HALVED_TOKENS, columns, dtype=dtype, device="cuda")
        copies = sums.half_sums(step)
        if copies is None or sums.half_sums(step[1:]) is not None:
            return f"{HALVED_TOKENS} tokens are not halved, or fewer are"
        bias, weight, shift = (normal(columns).cuda() for _ in range(3))
        norms = [Norm(weight, shift, 1e-5), Norm(weight, None, 1e-5), None]
        parts = normal(3, world, 300, columns)
        parts[:, :, 0, :4] = -0.0
        mine, residual = parts[:, rank].cuda(), normal(300, columns).cuda()
        wanted = []
        for turn, norm in enumerate(norms):
            x, normed = residual.clone(), mine[turn].clone()
            sums.add_rows(mine[turn], [bias], x, norm, out=x, normed=None if norm is None else normed)
            wanted.append((x, normed))
        faults = torch.zeros(1, dtype=torch.int64, device="cuda")
        sent = torch.empty(2, 300, columns, dtype=dtype, device="cuda")
        for turn in range(turns):
            counts = 1 + turn * 7 % 300, 300 - turn * 11 % 290
            for half, count in enumerate(counts):
                sent[half, :count] = mine[(turn + half) % 3, :count]
                copies.send(half, sent[half, :count])
            for half, count in enumerate(counts):
                which, part = (turn + half) % 3, sent[half, :count]
                norm, x = norms[which], residual[:count].clone()
                copies.add_rows(half, part, [bias], x, norm, normed=None if norm is None else part)
                for found, right in zip((x, part), wanted[which]):
                    faults += (found != right[:count]).sum()
        if int(faults):
            wrong.append(f"{dtype}, {columns} columns: {int(faults)} numbers differ; lost {sums.lost}")
        exchange(b"done")
        sums.close()
    return "; ".join(wrong)


@torch.inference_mode()
def abandoned_half(rank, world, exchange) -> str:
    """The last rank does not come: the other ends within the limit, names it, and does not wait again."""
    sums = make(rank, world, exchange, HALVED_TOKENS, 256, torch.bfloat16, limit_s=0.5)
    fault = ""
    if rank < world - 1:
        x = torch.ones(HALVED_TOKENS, 256, dtype=torch.bfloat16).cuda()
        copies, started = sums.half_sums(x), time.monotonic()
        for turn in range(8):
            copies.send(turn % 2, x[:900])
            copies.add_rows(turn % 2, x[:900], [], x[1000:1900], None, normed=None)
        torch.cuda.synchronize()
        took = time.monotonic() - started
        if sums.lost != world - 1 or not 0.4 < took < 3.0:
            fault = f"lost {sums.lost} after {took:.2f} s"
    exchange(b"done")
    return fault


@torch.inference_mode()
def special_numbers(rank, world, exchange) -> str:
    """-0.0, NaN and infinities pass; none of them is taken for rows that have not arrived."""
    wrong = []
    for limits in ways(world):
        sums = make(rank, world, exchange, 5, 64, torch.bfloat16, limits)
        parts = torch.zeros(world, 5, 64)
        parts[:] = -0.0
        parts[0, 0, 5], parts[1, 0, 7], parts[0, 1, 9] = torch.nan, torch.inf, -torch.inf
        parts[world - 1, 4, 3] = torch.nan
        out = torch.ones(5, 64, dtype=torch.bfloat16).cuda()
        for _ in range(3):
            sums.add_rows(parts[rank].bfloat16().cuda(), out=out)
        found = out.float().cpu()
        exchange(b"done")
        sums.close()
        if sums.lost is not None or not torch.allclose(found, parts.sum(0), equal_nan=True):
            wrong.append(f"{limits}: lost {sums.lost}, found {found[:, :12].tolist()}")
    return "; ".join(wrong)


@torch.inference_mode()
def replayed(rank, world, exchange) -> str:
    """Many sums of differing data and numbers of rows in a graph, replayed next to sums without one. Of more
    than two ranks, one shot and two alternate."""
    turns = None if world == 2 else PeerLimits(8, one_shot=3 * 512, two_shots=8 * 512)
    sums = make(rank, world, exchange, 8, 256, torch.bfloat16, turns)
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
    """The last rank does not come: the others end within the limit, name it, and do not wait again. Where it
    is the owner of no row, a rank with no row of its own waits for twice as long."""
    wrong = []
    for limits in ways(world):
        for rows in (4, 1):
            sums = make(rank, world, exchange, 4, 256, torch.bfloat16, limits, limit_s=0.5)
            if rank < world - 1:
                x = torch.ones(rows, 256, dtype=torch.bfloat16).cuda()
                started = time.monotonic()
                for _ in range(20):
                    sums.add_rows(x, out=x)
                torch.cuda.synchronize()
                took = time.monotonic() - started
                if sums.lost != world - 1 or not 0.4 < took < 3.0:
                    wrong.append(f"{limits}, {rows} rows: lost {sums.lost} after {took:.2f} s")
            exchange(b"done")
    return "; ".join(wrong)
