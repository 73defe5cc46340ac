"""The CPU path: products run at a bounded set of sizes, and give the bits of the reference's oracle."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tridecode.kernels.cpu import Cpu, row_tiles
from tridecode.kernels.ops import Linear

packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def test_tiles_cover_the_rows_at_a_bounded_number_of_sizes():
    sizes = set()
    for rows in range(9000):
        tiles = row_tiles(rows)
        assert sum(taken for taken, _ in tiles) == rows
        assert all(taken <= size for taken, size in tiles)
        assert sum(size for _, size in tiles) - rows < 8
        sizes |= {size for _, size in tiles}
    assert len(sizes) <= 28


@packs
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17, 63, 64, 65, 257, 600])
def test_a_product_in_tiles_equals_the_product_in_float64(rows, residual, bias):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 48, generator=generator), torch.randn(40, 48, generator=generator)
    added = torch.randn(rows, 40, generator=generator) if residual else None
    linear = Linear(weight, torch.randn(40, generator=generator) if bias else None)
    wanted = x.double() @ weight.double().t()
    wanted = wanted if linear.bias is None else wanted + linear.bias.double()
    wanted = wanted if added is None else wanted + added.double()
    ops = Cpu()
    out = torch.full((rows, 40), torch.nan) if added is None else added  # as a model calls it: in place
    ops.linear(x, ops.pack(linear), residual=added, out=out)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-5)


@packs
def test_a_row_of_a_product_does_not_depend_on_the_other_rows():
    generator = torch.Generator().manual_seed(0)
    ops, x = Cpu(), torch.randn(300, 64, generator=generator)
    linear = ops.pack(Linear(torch.randn(96, 64, generator=generator), None))

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(rows.shape[0], 96)
        ops.linear(rows, linear, out=out)
        return out

    alone = torch.cat([product(x[row : row + 1]) for row in range(300)])
    for count in (2, 5, 16, 17, 33, 64, 100, 299, 300):
        first = 300 - count
        assert torch.equal(product(x[first:].contiguous()), alone[first:]), count


_EVERY_SIZE = """
import torch
from tridecode.kernels.cpu import Cpu
from tridecode.kernels.ops import Linear

def resident() -> float:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024

torch.set_num_threads(1)
ops, x, out = Cpu(), torch.zeros(512, 64), torch.zeros(512, 128)
linear = ops.pack(Linear(torch.zeros(128, 64), None))
def run(sizes) -> None:
    for rows in sizes:
        ops.linear(x[:rows], linear, out=out[:rows])
run([*range(1, 65), 128, 256, 512])
before = resident()
run(range(1, 513))
print(resident() - before)
"""


@packs
def test_sizes_that_were_not_seen_before_take_no_memory():
    done = subprocess.run(
        [sys.executable, "-c", _EVERY_SIZE], capture_output=True, text=True, timeout=120, check=True
    )
    assert float(done.stdout) < 4, f"{done.stdout} MiB for 512 sizes"
