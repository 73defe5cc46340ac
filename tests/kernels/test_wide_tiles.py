"""Kernels of 65 to 256 tokens, forced, against float64: gemm_packed_wide_sm90, tiles of 96 to 256 tokens of
gemm_sm90_stream_k, and clusters that share every tile evenly (gemm_packed_even_split_sm90,
gemm_sm90_even_split).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import test_linear, test_two_parts, test_w8a8
from tests.kernels.conftest import Place
from tests.kernels.numeric import GATES, assert_close
from tests.kernels.test_gemm_sm90 import even_split
from tests.kernels.test_linear import make_heads
from tests.kernels.test_packed_linear import Case
from tests.kernels.test_two_parts import make_linear, product64
from tridecode.kernels.formats.packed_weight import multiplied_in_int8
from tridecode.kernels.gemm.eight_bit import Fp8Blocks
from tridecode.kernels.gemm.plan import Gemm, Plan
from tridecode.kernels.operands import Linear

DTYPES = [torch.float16, torch.bfloat16]
#: columns of a group, whether groups have zeros
GROUPS = [(0, False), (128, True), (384, True)]
TOKENS = [1, 65, 96, 97, 128, 129, 150, 192, 193, 200, 256]
#: inputs, outputs: one step, odd ends, many steps of few tiles, many tiles
SHAPES = [(128, 128), (416, 264), (1056, 1000), (14336, 520), (512, 6152)]
#: tiles of gemm_packed_sm90 and gemm_packed_wide_sm90, 0: gemm_packed_even_split_sm90; whether clusters share
#: tiles
WIDE_WAYS = [(96, True), (160, True), (192, True), (192, False), (224, False), (256, True), (256, False)]
EVEN = (0, True)
WAYS = [*WIDE_WAYS, EVEN]
#: four clusters, each with a step of its own, compute a tile, and those of all tiles are resident together
EVEN_SHAPES = [(inputs, outputs) for inputs, outputs in SHAPES if inputs >= 512 and outputs <= 4096]

pytestmark = pytest.mark.gpu


@pytest.fixture
def place(cuda_place: Place) -> Place:
    if torch.cuda.get_device_capability(cuda_place.device) != (9, 0):
        pytest.skip("the kernels need compute capability 9.0")
    return cuda_place


def force_wide(place: Place, monkeypatch: pytest.MonkeyPatch, tile: int, shared: bool) -> None:
    most = place.ops.gpu.gemm_device.multiprocessors // 2

    def plan(gemm: Gemm, granule_inputs: int) -> Plan:
        assert gemm.operand == "int4"
        if tile == 0:
            return even_split(gemm, 192 if gemm.tokens <= 192 else 256, "gemm_packed_even_split_sm90")
        tiles = -(-gemm.outputs // 256) * -(-gemm.tokens // tile)
        clusters = min(most, tiles * -(-gemm.inputs // 128) if shared else tiles)
        heads = gemm.epilogue == "qkv"
        kernel = "gemm_packed_wide_sm90" if tile > 128 else "gemm_packed_sm90"
        return Plan(kernel, "forced", 256, tile, 0, clusters, shared, fuses_heads=heads)

    monkeypatch.setattr(place.ops.gpu, "choose_packed", plan)


def force_two_parts(place: Place, monkeypatch: pytest.MonkeyPatch, tile: int, split: int) -> None:
    def plan(gemm: Gemm) -> Plan:
        assert gemm.operand == "two_parts"
        return even_split(gemm, tile, "gemm_sm90_even_split_two_parts", split)

    monkeypatch.setattr(place.ops.gpu, "choose_gemm", plan)


def assert_same_twice(
    place: Place, x: Tensor, linear: Linear, residual: Tensor | None, wanted: Tensor, **how
):
    """Run twice, because a launch leaves the flags of shared tiles to the next one; compare with float64."""
    columns = wanted.shape[1]
    outs = [place.poison(x.shape[0], columns, dtype=x.dtype) for _ in range(2)]
    place.settle()
    for out in outs:
        place.ops.linear(x, linear, residual=residual, out=out, **how)
    assert torch.equal(*outs)
    assert_close("two products" if how.get("activation") in GATES else "linear", outs[0], wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize(
    ("shape", "tile", "shared"),
    [
        *((shape, *way) for shape in SHAPES for way in WIDE_WAYS),
        *((shape, *EVEN) for shape in EVEN_SHAPES),
    ],
    ids=str,
)
def test_products_of_int4(place: Place, monkeypatch, shape, tile: int, shared: bool, group, dtype):
    case = Case(place, ("int4", *group), *shape, dtype)
    assert multiplied_in_int8(case.linear.weight)
    force_wide(place, monkeypatch, tile, shared)
    for tokens in TOKENS:
        x, residual = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
        assert_same_twice(place, x, case.linear, residual, case.product64(x) + residual.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "tile", "shared"),
    [
        *((one, *way) for one in (None, "gelu_tanh", "gelu", "relu") for way in WAYS),
        *((gate, *way) for gate in GATES for way in WIDE_WAYS),  # without tiles that clusters share evenly
    ],
)
def test_activations_of_int4(place: Place, monkeypatch, activation, tile: int, shared: bool, dtype):
    inputs, outputs = 1056, 1040
    case = Case(place, ("int4", 128, True), inputs, outputs, dtype)
    force_wide(place, monkeypatch, tile, shared)
    for tokens in (70, 150, 192, 250, 256):
        x = place.normal(tokens, inputs, dtype=dtype)
        wanted = applied(activation, case.product64(x))
        assert_same_twice(place, x, case.linear, None, wanted, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "shared"), WAYS)
def test_logits_of_int4_are_float32(place: Place, monkeypatch, tile: int, shared: bool, dtype):
    case = Case(place, ("int4", 128, False), 1024, 1008, dtype, bias=False)
    force_wide(place, monkeypatch, tile, shared)
    for tokens in (150, 192, 256):
        x, out = place.normal(tokens, 1024, dtype=dtype), place.poison(tokens, 1008, dtype=torch.float32)
        place.settle()
        place.ops.linear(x, case.linear, out=out)
        assert_close("linear", out.to(dtype), case.product64(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads", [(4, 4, 64, 0, False), (8, 2, 128, 128, False), (3, 1, 256, 256, False)], ids=str
)
@pytest.mark.parametrize("tile", [96, 192])
def test_queries_and_keys_of_int4_are_rotated_and_kept(place: Place, monkeypatch, heads, tile: int, dtype):
    for tokens in (90, 150, 192, 200):
        heads_case = make_heads(place, tokens, 1024, heads, dtype)
        case = Case(place, ("int4", 128, False), 1024, heads_case.heads.qkv_size, dtype)
        force_wide(place, monkeypatch, tile, True)
        heads_case.linear = case.linear
        out = heads_case.project(place)
        dense = Linear(case.weight.expanded(torch.float64), case.bias)
        assert_close("linear", out, replace(heads_case, linear=dense).wanted())
        assert_kept(place, heads_case, out)


def applied(activation: str | None, sums: Tensor) -> Tensor:
    if activation in GATES:
        half = sums.shape[1] // 2
        return GATES[activation](sums[:, :half]) * sums[:, half:]
    if activation is None:
        return sums
    how = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    return getattr(F, activation.removesuffix("_tanh"))(sums, **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "split"), [(96, 2), (128, 2), (128, 4)])
@pytest.mark.parametrize("shape", [(528, 264), (1040, 1000), (14336, 520), (4096, 1032)], ids=str)
def test_products_in_two_parts(place: Place, monkeypatch, shape, tile: int, split: int, dtype):
    linear = make_linear(place, *shape, dtype)
    force_two_parts(place, monkeypatch, tile, split)
    for tokens in (*TOKENS, 300):
        x, residual = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
        assert_same_twice(place, x, linear, residual, product64(x, linear) + residual.double())
        if tokens in (97, 200):
            assert_same_twice(
                place, x, linear, None, applied("gelu", product64(x, linear)), activation="gelu"
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "tile", "split"), [("16 bit", 192, 4), ("int8", 128, 2), ("int8", 192, 4)])
@pytest.mark.parametrize("shape", [(528, 264), (1040, 1000), (14336, 520), (4096, 1032)], ids=str)
def test_products_of_evenly_shared_tiles(
    place: Place, monkeypatch, shape, kind: str, tile: int, split: int, dtype
):
    linear, exact = made(place, kind, shape, dtype)
    kernel = "gemm_sm90_even_split" + {"16 bit": "", "int8": "_8bit"}[kind]
    monkeypatch.setattr(place.ops.gpu, "choose_gemm", lambda gemm: even_split(gemm, tile, kernel, split))
    for tokens in (*TOKENS, 300):
        x, residual = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
        assert_same_twice(place, x, linear, residual, exact(x) + residual.double())


def made(place: Place, kind: str, shape: tuple[int, int], dtype: torch.dtype):
    """Return a linear of random values, and its product in float64. kind: "16 bit", "int8" (W8A8) or
    "two_parts".
    """
    if kind == "16 bit":
        linear = test_linear.make_linear(place, *shape, dtype)
        return linear, lambda x: test_linear.product64(x, linear)
    if kind == "int8":
        linear = test_w8a8.make_linear(place, *shape, dtype, "int8")
        return linear, lambda x: test_w8a8.product64(x, linear)
    linear = test_two_parts.make_linear(place, *shape, dtype)
    return linear, lambda x: test_two_parts.product64(x, linear)


def force_stream_k(place: Place, monkeypatch: pytest.MonkeyPatch, tile: int, shared: bool) -> None:
    """Force gemm_sm90_stream_k of any operand. shared: each cluster has one or more steps of a tile."""
    most = place.ops.gpu.gemm_device.multiprocessors // 2

    def plan(gemm: Gemm) -> Plan:
        suffix = {"": "", "two_parts": "_two_parts"}.get(gemm.operand, "_8bit")
        tiles = -(-gemm.outputs // 256) * -(-gemm.tokens // tile)
        steps = -(-gemm.inputs // (128 if gemm.operand else 64))
        clusters = min(most, tiles * steps if shared else tiles)
        heads = gemm.epilogue == "qkv"
        return Plan(
            f"gemm_sm90_stream_k{suffix}", "forced", 256, tile, 0, clusters, shared, fuses_heads=heads
        )

    monkeypatch.setattr(place.ops.gpu, "choose_gemm", plan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("kind", "tile"), [("int8", 96), ("int8", 160), ("int8", 192), ("int8", 224), ("two_parts", 96)]
)
@pytest.mark.parametrize("shape", [(128, 128), (144, 264), (1040, 1000), (4096, 512), (512, 9216)], ids=str)
def test_products_of_tiles(place: Place, monkeypatch, shape, kind: str, tile: int, shared: bool, dtype):
    linear, exact = made(place, kind, shape, dtype)
    force_stream_k(place, monkeypatch, tile, shared)
    for tokens in (65, 96, 150, 224, 300):
        x, residual = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
        assert_same_twice(place, x, linear, residual, exact(x) + residual.double())
        if tokens in (150, 224):
            wanted = applied("gelu", exact(x))
            assert_same_twice(place, x, linear, None, wanted, activation="gelu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("format", ["fp8", "fp8_blocks"])
@pytest.mark.parametrize("shape", [(144, 264), (1040, 1000), (4096, 512), (512, 9216)], ids=str)
def test_fp8_products_of_tiles_of_96_tokens(
    place: Place, monkeypatch, shape, format: str, shared: bool, dtype
):
    linear = test_w8a8.make_linear(place, *shape, dtype, format)
    force_stream_k(place, monkeypatch, 96, shared)
    monkeypatch.setattr(Fp8Blocks, "library_rows", lambda *_: 0)  # all rows by the kernel
    for tokens in (65, 96, 150, 192):
        x, residual = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
        outs = [place.poison(tokens, shape[1], dtype=dtype) for _ in range(2)]
        place.settle()
        for out in outs:
            place.ops.linear(x, linear, residual=residual, out=out)
        assert torch.equal(*outs)
        wanted = test_w8a8.product64(x, linear) + residual.double()
        test_w8a8.assert_product(format, shape[0], outs[0], wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("kind", "tile"),
    [("16 bit", 160), ("16 bit", 224), *(("int8", tile) for tile in (128, 160, 192, 224, 256))],
)
@pytest.mark.parametrize("shape", [(4096, 1040), (272, 22016)], ids=str)
def test_gates_of_tiles(
    place: Place, monkeypatch, shape, kind: str, tile: int, shared: bool, activation: str, dtype
):
    linear, exact = made(place, kind, shape, dtype)
    force_stream_k(place, monkeypatch, tile, shared)
    for tokens in (97, 150, 224):
        x = place.normal(tokens, shape[0], dtype=dtype)
        assert_same_twice(place, x, linear, None, applied(activation, exact(x)), activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "tile"), [("int8", 96), ("int8", 192), ("two_parts", 96)])
@pytest.mark.parametrize(
    "heads", [(4, 4, 64, 0, False), (8, 2, 128, 128, False), (3, 1, 256, 256, False)], ids=str
)
def test_queries_and_keys_of_tiles_are_rotated_and_kept(
    place: Place, monkeypatch, heads, kind: str, tile: int, dtype
):
    for tokens in (70, 96, 150, 192, 200):
        heads_case = make_heads(place, tokens, 1024, heads, dtype)
        linear, _ = made(place, kind, (1024, heads_case.heads.qkv_size), dtype)
        force_stream_k(place, monkeypatch, tile, True)
        out = replace(heads_case, linear=linear).project(place)
        exact = Linear(linear.weight.expanded(torch.float64), linear.bias)
        x = test_w8a8.rounded64(heads_case.x, "int8") if kind == "int8" else heads_case.x
        assert_close("linear", out, replace(heads_case, x=x, linear=exact).wanted().to(place.device))
        assert_kept(place, heads_case, out)


def assert_kept(place: Place, heads_case, out: Tensor) -> None:
    """The cache holds the keys and values of `out`, except those of the unwritten row."""
    heads, tokens = heads_case.heads, out.shape[0]
    rows = torch.arange(tokens, device=place.device) != heads_case.unwritten
    held = heads_case.cache.blocks.transpose(1, 3).flatten(0, 1)  # (slots, kv head, k and v, size)
    kept = out.unflatten(1, (-1, heads.head_size))[:, heads.num_heads :]
    kept = kept.unflatten(1, (2, heads.num_kv_heads)).transpose(1, 2)
    assert torch.equal(held[heads_case.slots[rows].long()], kept[rows])
