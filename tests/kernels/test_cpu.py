"""The CPU path: products run at a bounded set of sizes, and give the bits of the reference's oracle."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tridecode.kernels.cpu import Cpu, rounded_rows
from tridecode.kernels.operands import Linear

packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def test_products_run_at_a_bounded_number_of_sizes_that_are_little_larger():
    sizes = {rows: rounded_rows(rows) for rows in range(1, 513)}
    assert all(rows <= size <= max(16, 1.19 * rows) for rows, size in sizes.items())
    assert len(set(sizes.values())) == 52


@packs
def test_rows_behind_those_of_a_product_are_not_seen():
    """The rows that fill a product up come from the buffer behind it, which may hold anything."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.full((64, 48), torch.nan)
    buffer[:17] = torch.randn(17, 48, generator=generator)
    ops, weight = Cpu(), torch.randn(40, 48, generator=generator)
    outs = torch.full((64, 40), 7.0)
    ops.linear(buffer[:17], ops.pack(Linear(weight, None)), out=outs[:17])
    torch.testing.assert_close(outs[:17], buffer[:17] @ weight.t(), atol=1e-4, rtol=1e-5)
    assert (outs[17:] == 7.0).all()


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
from tridecode.kernels.cpu import Cpu, rounded_rows
from tridecode.kernels.operands import Linear

def resident() -> float:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024

torch.set_num_threads(1)
ops, x, out = Cpu(), torch.zeros(512, 64), torch.zeros(512, 128)
linear = ops.pack(Linear(torch.zeros(128, 64), None))
def run(sizes) -> None:
    for rows in sizes:
        ops.linear(x[:rows], linear, out=out[:rows])
run({rounded_rows(rows) for rows in range(1, 513)})
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
