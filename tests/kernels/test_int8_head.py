"""The head in int8 on a GPU: float32 logits against float64 of the weight's values, for any vocabulary and
number of rows, without scratch memory to expand it in."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import Place
from tests.kernels.test_linear import norm64
from tridecode.kernels.formats.quantized import rounded_activations
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.operands import Linear, Norm

pytestmark = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def ops():
    """Make separate operations, because those of other tests hold scratch memory for expanded weights."""
    from tridecode.kernels.cuda import Cuda

    made = Cuda(torch.device("cuda", 0))
    made.reserve(1024, 4096, 64, 1024, 4096)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("vocabulary", [257, 1000, 5003, 32064])
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 64, 65, 256, 300, 600])
def test_logits(ops, cuda_place: Place, rows: int, vocabulary: int, bias: bool, dtype: torch.dtype) -> None:
    columns = 512
    weight = round_to_nearest(cuda_place.normal(vocabulary, columns, dtype=torch.float32), "int8")
    offsets = cuda_place.normal(vocabulary, dtype=dtype) if bias else None
    x = cuda_place.normal(rows, columns, dtype=dtype)
    norm = Norm(
        cuda_place.normal(columns, dtype=dtype),
        offsets[:columns] if bias and vocabulary > 512 else None,
        1e-5,
    )
    head = ops.pack(Linear(weight, offsets), dtype, is_head=True)
    out = cuda_place.poison(rows, vocabulary, dtype=torch.float32)
    held = {name: arena.numel() for name, arena in ops.gpu.arenas.items()}
    cuda_place.settle()
    ops.linear(x, head, norm=norm, out=out)
    wanted = norm64(x, norm) @ (weight.values.double() * weight.scales.double()).t()
    wanted = wanted if offsets is None else wanted + offsets.double()
    # error of x in two int8 parts, or of scales in 16 bit. In bfloat16 one input that float32 rounds another
    # way than float64 is 2^-8 of it.
    error = (out.double() - wanted).abs().max() / wanted.abs().max()
    in_two_parts = 2e-4 if dtype == torch.float16 else 1e-3
    assert error < (in_two_parts if vocabulary % 8 == 0 else 2e-3)
    assert ops.gpu.arenas.get("expanded_weight") is None
    assert {name: arena.numel() for name, arena in ops.gpu.arenas.items()} == held


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("vocabulary", [1000, 5000, 32064])
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 64, 65, 128, 129, 256, 300, 600])
def test_logits_of_rounded_inputs(
    ops, cuda_place: Place, rows: int, vocabulary: int, bias: bool, dtype: torch.dtype
) -> None:
    """x in one part: integers of 8 bit are multiplied exactly, then scaled in float32."""
    columns = 512
    dense = cuda_place.normal(vocabulary, columns, dtype=torch.float32)
    weight = round_to_nearest(dense, "int8", activations="int8")
    offsets = cuda_place.normal(vocabulary, dtype=dtype) if bias else None
    x = cuda_place.normal(rows, columns, dtype=dtype)
    head = ops.pack(Linear(weight, offsets), dtype, is_head=True)
    out = cuda_place.poison(rows, vocabulary, dtype=torch.float32)
    cuda_place.settle()
    ops.linear(x, head, out=out)
    values, scales = rounded_activations(x.cpu(), "int8")
    rounded = (values.double() * scales.double()).to(x.device)
    wanted = rounded @ (weight.values.double() * weight.scales.double()).t()
    wanted = wanted if offsets is None else wanted + offsets.double()
    assert (out.double() - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("rows", [1, 17, 256])
def test_inputs_stay_in_16_bit_where_no_kernel_reads_them_in_8_bit(ops, cuda_place: Place, rows: int) -> None:
    dense = cuda_place.normal(257, 512, dtype=torch.float32)
    x = cuda_place.normal(rows, 512, dtype=torch.float16)
    results = []
    for activations in ("", "int8"):
        weight = round_to_nearest(dense, "int8", activations=activations)
        head = ops.pack(Linear(weight), torch.float16, is_head=True)
        assert head.kind == "packed"
        results.append(cuda_place.poison(rows, 257, dtype=torch.float32))
        cuda_place.settle()
        ops.linear(x, head, out=results[-1])
    assert torch.equal(*results)
