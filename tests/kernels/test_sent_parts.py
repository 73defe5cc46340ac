"""GEMMs that send their part of a sum over two tensor ranks (csrc/gemm/sent), one process per rank: the bits
of the same GEMMs with sums that send, and float64."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.kernels.peer_process import Exchange, make, on_ranks
from tridecode.kernels.formats.quantized import rounded_activations
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.gemm.plan import SENT_TOKENS
from tridecode.kernels.operands import Linear, Norm

pytestmark = pytest.mark.gpu

COLUMNS, INPUTS = 4096, (2048, 7168)
#: rows by kind of the weights: each size of tile, and the ends of tiles
ROWS = {"16 bit": (3, 8, 17, 32, 61, 64), "w8a8-int8": (2, 17, 61, 64, 65, 130, 192, 250, SENT_TOKENS)}
#: rows and inputs that no kernel sends: gemm_sm90_even_split_8bit computes them
WITHOUT = {(250, 7168), (SENT_TOKENS, 7168)}
#: of the type: a weight and a number of x whose products round to -0.0
TINY = {torch.float16: (-6e-8, 1e-5), torch.bfloat16: (-1.2e-38, 1e-6)}
LAUNCHES = 40  # of a graph


@pytest.mark.parametrize("what", ["equal_bits", "replayed", "abandoned"])
def test_two_ranks(what: str) -> None:
    assert on_ranks(2, WORKS[what]) == ["", ""]


def operations():
    from tridecode.kernels.cuda import Cuda

    made = Cuda(torch.device("cuda", torch.cuda.current_device()))
    made.reserve(SENT_TOKENS, max(COLUMNS, *INPUTS), 8, 64, 1000)
    return made


@dataclass
class Part:
    """The GEMM of one rank. matrix: float64, as the weight holds it."""

    linear: Linear
    matrix: Tensor
    x: Tensor

    @classmethod
    def draw(cls, ops, rank: int, kind: str, inputs: int, rows: int, dtype: torch.dtype) -> Part:
        """Draw the same for each rank in both processes. The first columns of the sum are zeros; a part of
        the next ones, of row 1, rounds to -0.0."""
        generator = torch.Generator("cuda").manual_seed(rank + 1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda")

        matrix, x = normal(COLUMNS, inputs) * inputs**-0.5, normal(rows, inputs)
        weight, number = TINY[dtype]
        matrix[:64], matrix[64:200], x[1] = 0.0, weight, number
        x = x.to(dtype)
        if kind == "16 bit":
            matrix = matrix.to(dtype)
            return cls(Linear(matrix), matrix.double(), x)
        rounded = round_to_nearest(matrix, "int8", 0, "int8")
        return cls(ops.pack(Linear(rounded), dtype), rounded.expanded().double(), x)

    def product64(self, rows: int) -> Tensor:
        x = self.x[:rows].double()
        if not isinstance(self.linear.weight, Tensor):
            values, scales = rounded_activations(self.x[:rows].cpu(), "int8")
            x = (values.double() * scales.double()).cuda()
        return x @ self.matrix.t()

    def add(self, ops, sums, rows: int, sends: bool, **arguments) -> Tensor:
        """Return the part, after the sum."""
        x, part = self.x[:rows], torch.full((rows, COLUMNS), torch.nan, dtype=self.x.dtype, device="cuda")
        if not sends:
            ops.linear(x, self.linear, out=part)
        elif not ops.linear_sending(x, self.linear, sums, out=part):
            raise AssertionError(f"{rows} rows of {x.shape[1]} inputs are not sent")
        sums.add_rows(part, **arguments, follows_product=True, sent=sends)
        return part


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


@torch.inference_mode()
def equal_bits(rank: int, world: int, exchange: Exchange) -> str:
    ops, wrong = operations(), []
    for kind, counts in ROWS.items():
        for dtype in (torch.bfloat16, torch.float16):
            sums = make(rank, world, exchange, SENT_TOKENS, COLUMNS, dtype, ops=ops)
            generator = torch.Generator("cuda").manual_seed(7)
            residual, weight, bias = (
                torch.randn(rows, COLUMNS, generator=generator, device="cuda").to(dtype)
                for rows in (SENT_TOKENS, 1, 1)
            )
            norm = Norm(weight[0], None, 1e-5)
            for inputs in INPUTS:
                parts = [Part.draw(ops, each, kind, inputs, SENT_TOKENS, dtype) for each in range(world)]
                torch.cuda.synchronize()
                for rows in counts:
                    if (rows, inputs) in WITHOUT:
                        mine = parts[rank]
                        if ops.linear_sending(mine.x[:rows], mine.linear, sums, out=residual[:rows]):
                            wrong.append(f"{rows} rows of {inputs} inputs are sent")
                        continue
                    found = []
                    for sends in (False, True, True):
                        out, normed = residual[:rows].clone(), torch.empty_like(residual[:rows])
                        more = {"biases": [bias[0]], "residual": out, "norm": norm, "normed": normed}
                        part = parts[rank].add(ops, sums, rows, sends, out=out, **more)
                        found.append((out, normed, part))
                    place = f"{kind} {dtype}, {rows} rows of {inputs}: "
                    (out, normed, part), *others = found
                    for other in others:
                        if not torch.equal(bits(out), bits(other[0])):
                            wrong.append(place + "other sums")
                        if not torch.equal(bits(normed), bits(other[1])) or not torch.equal(part, other[2]):
                            wrong.append(place + "other norms or parts")
                    terms = [each.product64(rows) for each in parts]
                    terms += [residual[:rows].double(), bias.double()]
                    room = torch.finfo(dtype).eps * (1 + sum(term.abs() for term in terms))
                    if not bool(((out.double() - sum(terms)).abs() <= room).all()):
                        wrong.append(place + "not the sums of float64")
            biased = Linear(parts[rank].linear.weight, bias[0])
            if ops.linear_sending(parts[rank].x, biased, sums, out=residual):
                wrong.append("a GEMM with a bias is sent")
            if sums.lost is not None:
                wrong.append(f"lost {sums.lost}")
            exchange(b"done")
            sums.close()
    return "; ".join(wrong[:6])


@torch.inference_mode()
def replayed(rank: int, world: int, exchange: Exchange) -> str:
    """Graphs of sums that GEMMs have sent, among others, replayed with ranks that come late."""
    ops, wrong = operations(), []
    for kind, dtype in (("16 bit", torch.bfloat16), ("w8a8-int8", torch.float16)):
        sums = make(rank, world, exchange, SENT_TOKENS, COLUMNS, dtype, ops=ops)
        parts = [Part.draw(ops, rank, kind, inputs, 64, dtype) for inputs in INPUTS]
        out = torch.full((LAUNCHES, 64, COLUMNS), torch.nan, dtype=dtype, device="cuda")
        torch.cuda.synchronize()
        launch_all(ops, sums, parts, out, sends=False)
        wanted = out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch_all(ops, sums, parts, out, sends=True)
        for turn in range(6):
            out.fill_(torch.nan)
            if turn % 3 == rank:
                torch.cuda._sleep(100_000_000)
            if turn % 3 == 2 and rank == turn // 3:
                time.sleep(0.1)
            graph.replay()
            if turn % 2:
                launch_all(ops, sums, parts, out, sends=True)
            if not torch.equal(bits(out), bits(wanted)):
                wrong.append(f"{kind}: replay {turn}, lost {sums.lost}")
        exchange(b"done")
        sums.close()
    return "; ".join(wrong)


def launch_all(ops, sums, parts: list[Part], out: Tensor, sends: bool) -> None:
    """Compute LAUNCHES sums of 3 to 62 rows. sends: four of five are sent by the GEMM."""
    for launch in range(LAUNCHES):
        rows, part = 3 + 7 * launch % 60, parts[launch % 3 % 2]
        part.add(ops, sums, rows, sends and launch % 5 < 4, out=out[launch, :rows])


@torch.inference_mode()
def abandoned(rank: int, world: int, exchange: Exchange) -> str:
    """The last rank does not come: the other ends within the limit, names it, and does not wait again."""
    ops, fault = operations(), ""
    sums = make(rank, world, exchange, SENT_TOKENS, COLUMNS, torch.bfloat16, limit_s=0.5, ops=ops)
    if rank == 0:
        part = Part.draw(ops, rank, "16 bit", INPUTS[0], 64, torch.bfloat16)
        out = torch.empty(64, COLUMNS, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        started = time.monotonic()
        for _ in range(20):
            part.add(ops, sums, 64, True, out=out)
        torch.cuda.synchronize()
        took = time.monotonic() - started
        if sums.lost != 1 or not 0.4 < took < 3.0:
            fault = f"lost {sums.lost} after {took:.2f} s"
    exchange(b"done")
    return fault


WORKS = {"equal_bits": equal_bits, "replayed": replayed, "abandoned": abandoned}
