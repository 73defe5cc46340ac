"""The arrangement of 8- and 4-bit weights for the kernels, read back as packed_weight.cuh describes it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.kernels.test_gemm_table import instance_of, instances
from tridecode.kernels.bench.shapes import SHAPES
from tridecode.kernels.formats.packed_weight import (
    GRANULE_INPUTS,
    PackedWeight,
    loses_scales,
    not_packed,
    pack,
)
from tridecode.kernels.formats.quantized import QuantizedWeight, packed
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.gemm.packed_table import PACKED_TOKENS, choose_packed
from tridecode.kernels.gemm.plan import Device, Gemm

H200 = Device(90, 132, 232448, (132, 66, 44))


def quantized(
    format: str, rows: int, columns: int, group_size: int = 0, zeros: bool = False
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(rows + columns)
    count = -(-columns // (group_size or columns))
    scales = torch.rand(rows, count, generator=generator) * 0.1 + 0.01
    if format == "int4":
        values = packed(torch.randint(0, 16, (rows, columns), generator=generator))
        zero = torch.randint(0, 16, (rows, count), generator=generator).float() if zeros else None
        return QuantizedWeight(format, columns, values, scales, zero, group_size)
    if format == "int8":
        return QuantizedWeight(
            format,
            columns,
            torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8),
            scales,
        )
    values = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return QuantizedWeight(format, columns, values, scales)


def read_back(weight: PackedWeight) -> NDArray[np.float64]:
    """The matrix, element by element, from the words of granules."""
    words = weight.values.numpy().view("<u4").reshape(*weight.values.shape[:2], 8, 4, 4)  # (.., g, t, word)
    out = np.full(weight.shape, np.nan)
    inputs = GRANULE_INPUTS[weight.format]
    for row in range(weight.rows):
        for column in range(weight.columns):
            chunk, rest = divmod(column, inputs)
            step, rest = divmod(rest, 16)
            half, rest = divmod(rest, 8)
            t, second = divmod(rest, 2)
            lane = words[row // 8, chunk, row % 8, t]
            if weight.format != "int4":
                assert weight.scales is not None
                byte = int(lane[step]) >> 8 * (half + 2 * second) & 255
                dtype = torch.int8 if weight.format == "int8" else torch.float8_e4m3fn
                value = torch.tensor([byte], dtype=torch.uint8).view(dtype).float().item()
                out[row, column] = value * weight.scales[row].item()
                continue
            assert weight.groups is not None
            nibble = int(lane[step // 2]) >> 4 * (step % 2 * 2 + half + 4 * second) & 15
            of = weight.groups[row // 8, chunk, row % 8]
            word = of[column % inputs * of.shape[0] // inputs]
            scale, zero = word.view(1).view(weight.dtype).double().tolist()
            out[row, column] = (nibble - (zero - 16)) * scale
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("format", "group_size", "zeros"),
    [("int8", 0, False), ("fp8", 0, False), ("int4", 0, False), ("int4", 32, True), ("int4", 64, False),
     ("int4", 128, True), ("int4", 256, True)],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(16, 256), (19, 328), (8, 72)])
def test_every_weight_is_found_where_the_kernels_look(shape, format, group_size, zeros, dtype):
    weight = quantized(format, *shape, group_size, zeros)
    assert not_packed(weight, dtype) == ""
    found, wanted = read_back(pack(weight, dtype)), weight.expanded().double().numpy()
    # scales of groups are rounded to dtype
    error = 0.0 if format != "int4" else float(torch.finfo(dtype).eps)
    np.testing.assert_allclose(found, wanted, rtol=max(error, 1e-6), atol=0)


def test_packing_takes_the_bytes_of_the_format():
    bytes_of = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}
    for format, each in bytes_of.items():
        weight = pack(quantized(format, 512, 1024, 128 if format == "int4" else 0), torch.float16)
        scales = 4 * 512 if format != "int4" else 0
        assert weight.nbytes == 512 * 1024 * each + scales


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"activations": "int8"}, "activations in int8"),
        ({"scales": torch.ones(16, 2), "group_size": 128}, "several scales of a row in 8 bit"),
        ({"scales": torch.ones(2, 1), "block_rows": 8}, "several scales of a row in 8 bit"),
        ({"groups": torch.zeros(256, dtype=torch.int32)}, "groups that are not consecutive inputs"),
    ],
)
def test_what_no_kernel_reads_is_named(change, why):
    weight = quantized("int8", 16, 256)
    fields = {**weight.__dict__, **change}
    assert not_packed(QuantizedWeight(**fields), torch.float16) == why
    assert not_packed(weight, torch.float32) == "products of torch.float32"
    assert not_packed(quantized("int8", 16, 252), torch.float16).startswith("252 inputs")
    assert "groups of 48" in not_packed(quantized("int4", 16, 96, 48), torch.float16)


def test_scales_below_float16_are_noticed():
    weight = quantized("int4", 16, 256, 128)
    assert not loses_scales(weight, torch.float16) and not loses_scales(weight, torch.bfloat16)
    small = QuantizedWeight("int4", 256, weight.values, weight.scales * 1e-7, None, 128)
    assert loses_scales(small, torch.float16) and not loses_scales(small, torch.bfloat16)


def test_packing_follows_shapes_alone():
    """The memory plan relies on this: it has the same sizes without data."""
    weight = round_to_nearest(torch.randn(24, 384), "int4", 128)
    fields = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in weight.__dict__.items()}
    assert pack(QuantizedWeight(**fields), torch.bfloat16).nbytes == pack(weight, torch.bfloat16).nbytes


def test_the_choice_follows_the_tokens():
    names = {
        tokens: choose_packed(Gemm(tokens, 4096, 4096), 64, H200).kernel for tokens in (1, 2, 3, 256, 257)
    }
    assert names[1] == names[2] == "gemm_packed_mma" and names[3] == names[256] == "gemm_packed_sm90"
    assert names[257] == "expand_weight" and PACKED_TOKENS == 256
    older = H200._replace(capability=80)
    assert choose_packed(Gemm(8, 4096, 4096), 64, older).kernel == "gemm_packed_mma"
    assert choose_packed(Gemm(16, 4096, 4096), 64, older).kernel == "expand_weight"
    # x of 8 tokens does not fit whole: the inputs are split
    assert choose_packed(Gemm(8, 14336, 4096), 64, older).split > 1


@pytest.mark.parametrize("granule_inputs", [64, 128])
def test_every_choice_has_an_instance_and_every_instance_is_chosen(granule_inputs):
    """Covers published models on one rank and shared by ranks."""
    chosen: dict[str, set[tuple[str, ...]]] = {
        "gemm_packed_sm90": set(),
        "gemm_packed_wide_sm90": set(),
        "gemm_packed_even_split_sm90": set(),
    }
    for shape in SHAPES.values():
        for product in [each for size in (1, 2, 4) if shape.kv_heads % size == shape.inner % size == 0
                        for each in shape.products(size).values()]:  # fmt: skip
            for tokens, operand in itertools.product((*range(1, 130), 160, 192, 200, 256, 300), ("", "int4")):
                gemm = product._replace(tokens=tokens, operand=operand)
                plan = choose_packed(gemm, granule_inputs, H200)
                assert (plan.kernel == "expand_weight") == (tokens > PACKED_TOKENS)
                if plan.kernel in chosen:
                    chosen[plan.kernel].add(instance_of(gemm, plan))
    for kernel, reached in chosen.items():
        assert reached == instances(kernel), kernel
