"""Weights in 8 and 4 bit that are larger than the scratch memory in which they are expanded for many rows:
they are expanded and multiplied in pieces of their outputs.

Compared with float64 of the matrices that they stand for, and with the same product in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import test_act_order
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.test_linear import HeadsCase, make_heads, norm64
from tests.kernels.test_packed_weight import quantized, read_back
from tests.kernels.test_rounding_epilogue import compare, empty_cache
from tridecode.backend.engine.memory import _CudaShapes
from tridecode.kernels import scratch
from tridecode.kernels.cuda_gemm import _activate
from tridecode.kernels.cuda_packed import CudaPacked
from tridecode.kernels.cuda_w8a8 import CudaW8A8
from tridecode.kernels.gemm_table import TWO_PARTS_TOKENS, Device, choose
from tridecode.kernels.ops import Linear, Norm
from tridecode.kernels.packed_table import PACKED_TOKENS, choose_packed
from tridecode.kernels.packed_weight import PackedWeight, pack
from tridecode.kernels.quantized import QuantizedWeight
from tridecode.kernels.reference import Reference
from tridecode.kernels.round_to_nearest import round_to_nearest

INPUTS = 144
#: "rows": int8 with x in two parts. The others are packed
KINDS = ["rows", "int8", "fp8", "int4", "int4 in groups"]
DTYPES = [torch.float16, torch.bfloat16]
FUNCTIONS = {
    None: lambda v: v,
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
GATES = {"swiglu": F.silu, "geglu": F.gelu}
#: "paired", or what else there is: "bias" and "odd" keep gate and up rows from being expanded side by side
HOW = ["paired", "bias", "residual", "odd"]


# ---------------------------------------------------------------- which rows


@pytest.mark.parametrize("shape", [(1, 8), (256, 1 << 20), (4096, 4096), (1100, 15000), (12, 16)], ids=str)
def test_what_fits_stays_whole(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert scratch.expanded_rows(1 << 20, 4096, 2) == 1 << 20  # without a limit
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 32 << 20)
    assert scratch.expanded_rows(*shape, 2) == shape[0]
    assert scratch.expanded_weight_bytes(*shape, 2) == 2 * shape[0] * shape[1]


@pytest.mark.parametrize(
    ("shape", "gated", "sizes"),
    [
        ((16384, 4096), False, [4096] * 4),
        ((4096, 16384), False, [1024] * 4),
        ((12288, 4096), False, [4096] * 3),
        ((6144, 4096), False, [3072] * 2),
        ((28672, 4096), True, [2048] * 7),
        ((4104, 4096), False, [2304, 1800]),
        ((1000, 1 << 20), False, [256, 256, 256, 232]),
        ((1040, 1 << 20), True, [128, 128, 128, 128, 8]),
    ],
)
def test_pieces_are_about_equal(
    shape: tuple[int, int], gated: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 32 << 20)
    assert [piece.stop - piece.start for piece in scratch.weight_pieces(*shape, 2, gated)] == sizes


@pytest.mark.parametrize("gated", [False, True])
def test_every_row_is_in_one_piece_that_fits(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 32 << 20)
    halves = 2 if gated else 1
    for rows in (514, 4096, 5000, 14336, 28680):
        for columns in (8, 272, 4096, 11008, 1 << 17):
            most = scratch.expanded_rows(rows, columns, 2)
            assert most * columns * 2 <= max(scratch.EXPANDED_WEIGHT_BYTES, 256 * columns * 2)
            pieces = scratch.weight_pieces(rows, columns, 2, gated)
            assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
            assert (pieces[0].start, pieces[-1].stop) == (0, rows // halves)
            assert all(halves * (piece.stop - piece.start) <= most for piece in pieces)
            assert all(piece.start % 128 == 0 for piece in pieces)


@pytest.mark.parametrize(
    ("format", "group_size", "zeros"), [("int8", 0, False), ("fp8", 0, False), ("int4", 32, True)]
)
def test_a_part_of_a_packed_weight_has_its_rows(format: str, group_size: int, zeros: bool) -> None:
    weight = pack(quantized(format, 43, 264, group_size, zeros), torch.float16)
    for rows in (slice(0, 43), slice(8, 24), slice(16, 43), slice(40, 41)):
        part = weight.part(rows)
        assert part.shape == (rows.stop - rows.start, 264)
        assert part.values.untyped_storage().data_ptr() == weight.values.untyped_storage().data_ptr()
        assert (read_back(part) == read_back(weight)[rows]).all()


# ---------------------------------------------------------------- what is multiplied, without a GPU


class OnCpu(CudaW8A8):
    """The operations of a GPU whose kernels are Reference's: of products of many rows."""

    def __init__(self) -> None:
        self.device, self.capability = torch.device("cpu"), 90
        device = Device(90, 132, 232448, (132, 66, 44))
        self.choose_gemm = lambda gemm: choose(gemm, device)  # type: ignore[assignment]
        self.choose_packed = lambda gemm, inputs: choose_packed(gemm, inputs, device)  # type: ignore[assignment]
        self._arenas, self._sorts_inputs = {}, False
        self.products: list[tuple[int, int]] = []  # (outputs, inputs) of each

    def norm(self, x: Tensor, norm: Norm, *, out: Tensor) -> None:
        Reference().norm(x, norm, out=out)

    def _expand(self, weight: QuantizedWeight | PackedWeight, rows: slice, out: Tensor) -> None:
        if isinstance(weight, PackedWeight):
            out.copy_(torch.from_numpy(read_back(weight.part(rows))))
        else:
            out.copy_(weight.expanded(out.dtype)[rows])

    def _gemm_library(
        self, x: Tensor, linear: Linear, activation: str | None, residual: Tensor | None, out: Tensor
    ) -> None:
        self.products.append(tuple(linear.weight.shape))
        Reference().linear(x, linear, activation=activation, residual=residual, out=out)

    def _library_epilogue(
        self,
        product: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        dtype: torch.dtype,
    ) -> None:
        assert activation is not None
        _activate(product if bias is None else product + bias, activation, residual, out)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Place(OnCpu(), torch.device("cpu"), torch.Generator().manual_seed(3))


# ---------------------------------------------------------------- on either


@dataclass
class Case:
    matrix: Tensor  # (out, in) float64: the weight, rounded to 16 bit as it is expanded
    linear: Linear  # packed
    tokens: int  # so many that the weight is expanded

    def product64(self, x: Tensor) -> Tensor:
        wanted = x.double() @ self.matrix.t()
        return wanted if self.linear.bias is None else wanted + self.linear.bias.double()


def make(
    place: Place, kind: str, outputs: int, dtype: torch.dtype, bias: bool = True, inputs: int = INPUTS
) -> Case:
    matrix = place.normal(outputs, inputs, dtype=torch.float32, scale=inputs**-0.5)
    format = "int8" if kind == "rows" else kind.split()[0]
    weight = round_to_nearest(matrix, format, 32 if kind == "int4 in groups" else 0)
    if format == "int4":  # whose scales are rounded first
        weight = replace(weight, scales=weight.scales.to(dtype).float())
    linear = Linear(weight, place.normal(outputs, dtype=dtype) if bias else None)
    # the latter packs int8, too
    linear = place.ops.pack(linear, dtype) if kind == "rows" else CudaPacked.pack(place.ops, linear, dtype)
    assert isinstance(linear.weight, QuantizedWeight if kind == "rows" else PackedWeight)
    tokens = TWO_PARTS_TOKENS + 88 if kind == "rows" else PACKED_TOKENS + 44
    return Case(weight.expanded(dtype).double(), linear, tokens)


def limit(monkeypatch: pytest.MonkeyPatch, inputs: int = INPUTS, rows: int = 300) -> None:
    """Pieces of 256 rows of so many 16-bit inputs."""
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 2 * inputs * rows)


def watch(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The outputs of each product by cuBLAS that follows."""
    outputs: list[int] = []
    behind = place.ops._gemm_library

    def run(x: Tensor, linear: Linear, *rest: object) -> None:
        outputs.append(linear.weight.shape[0])
        behind(x, linear, *rest)

    monkeypatch.setattr(place.ops, "_gemm_library", run)
    return outputs


def normed(place: Place, x: Tensor, norm: Norm) -> Tensor:
    """Of the operations themselves: SwiGLU would multiply the difference of a number rounded otherwise."""
    out = place.poison(*x.shape, dtype=x.dtype)
    place.settle()
    place.ops.norm(x, norm, out=out)
    return out


def check_plain(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str, activation: str | None, dtype: torch.dtype
) -> None:
    """With a norm, a bias and a residual in place, over rows of x and out that lie apart."""
    outputs = 1000
    case = make(place, kind, outputs, dtype)
    norm = Norm(place.normal(INPUTS, dtype=dtype), place.normal(INPUTS, dtype=dtype), 1e-5)
    x = place.normal(case.tokens, INPUTS + 8, dtype=dtype)[:, :INPUTS]
    before = place.normal(case.tokens, outputs, dtype=dtype)
    wanted = FUNCTIONS[activation](case.product64(norm64(x, norm))) + before.double()
    found = []
    for in_pieces in (False, True):
        if in_pieces:
            limit(monkeypatch)
        products = watch(place, monkeypatch)
        memory = place.poison(case.tokens, outputs + 16, dtype=dtype)
        out = memory[:, 8 : 8 + outputs]
        out.copy_(before)
        place.settle()
        place.ops.linear(x, case.linear, norm=norm, activation=activation, residual=out, out=out)
        assert_close("linear", out, wanted)
        assert torch.isnan(memory[:, :8]).all() and torch.isnan(memory[:, -8:]).all()
        found.append(out)
    assert products == [256, 256, 256, 232]
    assert_close("linear", found[1], found[0].double())


def check_gated(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str, activation: str, how: str, dtype: torch.dtype
) -> None:
    inner = 516 if how == "odd" else 520
    case = make(place, kind, 2 * inner, dtype, bias=how == "bias")
    norm = Norm(place.normal(INPUTS, dtype=dtype), None, 1e-5)
    x = place.normal(case.tokens, INPUTS, dtype=dtype)
    residual = place.normal(case.tokens, inner, dtype=dtype) if how == "residual" else None
    gate, up = case.product64(normed(place, x, norm)).chunk(2, dim=1)
    wanted = GATES[activation](gate) * up
    wanted = wanted if residual is None else wanted + residual.double()
    found = []
    for in_pieces in (False, True):
        if in_pieces:
            limit(monkeypatch)
        products = watch(place, monkeypatch)
        out = place.poison(case.tokens, inner, dtype=dtype)
        place.settle()
        place.ops.linear(x, case.linear, norm=norm, activation=activation, residual=residual, out=out)
        assert_close("two products", out, wanted)
        found.append(out)
    paired = activation == "swiglu" and how in ("paired", "residual")
    assert products == ([256] * 4 + [16] if paired else [256] * 4 + [2 * inner - 1024])
    assert_close("two products", found[1], found[0].double())


@pytest.mark.parametrize(
    ("kind", "activation"), [*(("rows", name) for name in FUNCTIONS), ("int4 in groups", "relu")]
)
def test_outputs_of_pieces_on_a_cpu(on_cpu: Place, monkeypatch, kind, activation: str | None) -> None:
    check_plain(on_cpu, monkeypatch, kind, activation, torch.float16)


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(
    ("kind", "how"), [*(("rows", how) for how in HOW), ("int8", "paired"), ("int8", "odd")]
)
def test_gate_and_up_rows_are_paired_on_a_cpu(on_cpu: Place, monkeypatch, kind, how, activation) -> None:
    check_gated(on_cpu, monkeypatch, kind, activation, how, torch.float16)


def test_the_scratch_memory_is_the_planned_one(on_cpu: Place, monkeypatch) -> None:
    """And no product takes more."""
    limit(monkeypatch)
    for outputs, rows in ((128, 128), (1000, 256), (304, 256)):
        for kind in ("rows", "int8"):
            place = replace(on_cpu, ops=OnCpu())
            case = make(place, kind, outputs, torch.float16)
            assert place.ops._arenas["expanded_weight"].numel() == 2 * INPUTS * rows
            planned = _CudaShapes(2)
            before = planned.bytes
            planned.pack(Linear(round_to_nearest(case.matrix, "int8")), torch.float16)
            assert planned.bytes - before == 2 * INPUTS * rows
            x, out = place.normal(case.tokens, INPUTS, dtype=torch.float16), torch.empty(case.tokens, outputs)
            place.ops.linear(x, case.linear, out=out.half())
            assert place.ops._arenas["expanded_weight"].numel() == 2 * INPUTS * rows


@pytest.mark.parametrize("outputs", [1000, 1003])
def test_the_heads_weight_is_not_expanded_in_pieces(on_cpu: Place, monkeypatch, outputs: int) -> None:
    """Though a layer's weight has left scratch memory that would hold a piece."""
    limit(monkeypatch)
    make(on_cpu, "rows", 256, torch.float16)
    seen = []
    monkeypatch.setattr(on_cpu.ops, "_8_bit_gemm", lambda x, *rest: seen.append(len(x)))
    monkeypatch.setattr(on_cpu.ops, "_packed_gemm", lambda x, *rest: seen.append(len(x)))
    weight = round_to_nearest(on_cpu.normal(outputs, INPUTS, dtype=torch.float32), "int8")
    head = on_cpu.ops.pack(Linear(weight), torch.float16, is_head=True)
    x = on_cpu.normal(600, INPUTS, dtype=torch.float16)
    on_cpu.ops.linear(x, head, out=torch.empty(600, outputs))
    assert seen == [256, 256, 88]


# ---------------------------------------------------------------- on a GPU


def skip_rows(kind: str, place: Place) -> None:
    if kind == "rows" and place.ops.capability != 90:
        pytest.skip("int8 rows need compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_pieces(cuda_place: Place, monkeypatch, kind, activation: str | None, dtype) -> None:
    skip_rows(kind, cuda_place)
    check_plain(cuda_place, monkeypatch, kind, activation, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_up_rows_are_paired(cuda_place: Place, monkeypatch, kind, how, activation, dtype) -> None:
    skip_rows(kind, cuda_place)
    check_gated(cuda_place, monkeypatch, kind, activation, how, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_float32_results_and_rows_at_any_address(cuda_place: Place, monkeypatch, kind) -> None:
    place, dtype = cuda_place, torch.bfloat16
    skip_rows(kind, place)
    case = make(place, kind, 1000, dtype)
    x = place.normal(case.tokens, INPUTS, dtype=dtype)
    wanted = case.product64(x)
    limit(monkeypatch)
    products = watch(place, monkeypatch)
    logits = place.poison(case.tokens, 1000, dtype=torch.float32)
    memory = place.poison(case.tokens, 1003, dtype=dtype)
    place.settle()
    place.ops.linear(x, case.linear, out=logits)
    place.ops.linear(x, case.linear, out=memory[:, 1:1001])
    assert_close("linear", logits.to(dtype), wanted)
    assert_close("linear", memory[:, 1:1001], wanted)
    assert torch.isnan(memory[:, 0]).all() and torch.isnan(memory[:, 1001:]).all()
    assert products == 2 * [256, 256, 256, 232]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_the_limit(cuda_place: Place, monkeypatch, kind) -> None:
    """Large ones, and a chain of products in the same scratch memory: each waits for the one before it."""
    place, dtype, size, inner = cuda_place, torch.bfloat16, 2048, 8192
    skip_rows(kind, place)
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 8 << 20)
    wide = make(place, kind, 2 * inner, dtype, bias=False, inputs=size)
    narrow = make(place, kind, size, dtype, inputs=inner)
    norm = Norm(place.normal(size, dtype=dtype), None, 1e-5)
    x = place.normal(1100, size, dtype=dtype)
    products = watch(place, monkeypatch)

    def chain(after_each) -> Tensor:
        hidden, between = x.clone(), place.poison(1100, inner, dtype=dtype)
        place.settle()
        for _ in range(10):
            place.ops.linear(hidden, wide.linear, norm=norm, activation="swiglu", out=between)
            after_each()
            place.ops.linear(between, narrow.linear, residual=hidden, out=hidden)
            after_each()
        return hidden

    wanted = chain(torch.cuda.synchronize)
    assert products == 10 * (8 * [2048] + 4 * [512])
    assert torch.isfinite(wanted).all()
    for _ in range(3):
        assert torch.equal(chain(lambda: None), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_captured_and_replayed(monkeypatch, kind) -> None:
    """Nothing is allocated in a capture: with scratch memory that `pack` and `reserve` have made."""
    from tridecode.kernels.cuda import Cuda

    dtype, inner = torch.float16, 520
    place = Place(Cuda(torch.device("cuda", 0)), torch.device("cuda", 0), torch.Generator().manual_seed(5))
    skip_rows(kind, place)
    limit(monkeypatch)
    wide, gated = make(place, kind, 1000, dtype), make(place, kind, 2 * inner, dtype, bias=False)
    biased = make(place, kind, 2 * inner, dtype)
    place.ops.reserve(600, 2 * inner, 64, 600, 1000)
    arenas = {name: arena.numel() for name, arena in place.ops._arenas.items()}
    assert arenas["expanded_weight"] == scratch.expanded_weight_bytes(1000, INPUTS, 2) == 2 * INPUTS * 256
    norm = Norm(place.normal(INPUTS, dtype=dtype), place.normal(INPUTS, dtype=dtype), 1e-5)
    x, out = place.normal(600, INPUTS, dtype=dtype), place.poison(600, 1000, dtype=dtype)
    outs = [place.poison(600, inner, dtype=dtype) for _ in range(2)]

    def run() -> None:
        place.ops.linear(x, wide.linear, norm=norm, activation="relu", out=out)
        place.ops.linear(x, wide.linear, residual=out, out=out)
        for case, each in zip((gated, biased), outs):
            place.ops.linear(x, case.linear, norm=norm, activation="swiglu", out=each)

    run()  # cuBLAS chooses algorithms outside of the capture
    place.settle()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side):
        run()
    for _ in range(3):
        x.copy_(place.normal(600, INPUTS, dtype=dtype))
        graph.replay()
        torch.cuda.synchronize()
        rows = normed(place, x, norm)
        assert_close("linear", out, wide.product64(rows).relu() + wide.product64(x))
        for case, each in zip((gated, biased), outs):
            gate, up = case.product64(rows).chunk(2, dim=1)
            assert_close("two products", each, F.silu(gate) * up)
    assert {name: arena.numel() for name, arena in place.ops._arenas.items()} == arenas


HEADS = [  # heads, kv heads, head size, rotary size, interleaved
    (4, 4, 64, 0, False),
    (8, 2, 128, 128, False),
    (3, 1, 256, 64, True),
    (5, 5, 80, 32, False),
]


def project(place: Place, monkeypatch: pytest.MonkeyPatch, made: HeadsCase) -> Tensor:
    """In pieces."""
    with monkeypatch.context() as patched:
        limit(patched)
        products = watch(place, patched)
        out = made.project(place)
    assert sum(products) == made.heads.qkv_size and len(products) > 1
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_pieces_are_rotated_and_kept(cuda_place: Place, monkeypatch, kind, heads, dtype) -> None:
    place = cuda_place
    skip_rows(kind, place)
    tokens = make(place, kind, 8, dtype).tokens
    made = make_heads(place, tokens, INPUTS, heads, dtype)
    case = make(place, kind, made.heads.qkv_size, dtype)
    made.linear = case.linear
    whole = made.project(place)
    made.cache.blocks.fill_(float("nan"))
    out = project(place, monkeypatch, made)
    dense = Linear(case.matrix, case.linear.bias)
    assert_close("linear", out, replace(made, linear=dense).wanted())
    assert_close("linear", out, whole.double())
    size, num_heads, num_kv_heads = made.heads.head_size, made.heads.num_heads, made.heads.num_kv_heads
    rows = torch.arange(tokens, device=place.device) != made.unwritten
    held = made.cache.blocks.transpose(1, 3).flatten(0, 1)  # (slots, kv head, k and v, size)
    kept = out.unflatten(1, (-1, size))[:, num_heads:].unflatten(1, (2, num_kv_heads)).transpose(1, 2)
    assert torch.equal(held[made.slots[rows].long()], kept[rows])
    assert torch.isnan(held[made.slots[~rows].long()]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_pieces_are_rounded_for_an_8_bit_cache(
    cuda_place: Place, monkeypatch, kind, heads, format
) -> None:
    place = cuda_place
    skip_rows(kind, place)
    tokens = make(place, kind, 8, torch.bfloat16).tokens
    made = make_heads(place, tokens, INPUTS, heads, torch.bfloat16)
    made.linear = make(place, kind, made.heads.qkv_size, torch.bfloat16).linear
    exact = project(place, monkeypatch, made)
    cache = empty_cache(made, format)
    out = project(place, monkeypatch, replace(made, cache=cache))
    compare(made, cache, exact, out, format)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize(("size", "zeros"), test_act_order.GROUPS)
def test_columns_that_are_sorted_by_groups(cuda_place: Place, monkeypatch, size, zeros, activation) -> None:
    place, dtype = cuda_place, torch.bfloat16
    case = test_act_order.Case(place, size, zeros, 512, 1040, dtype)
    norm = Norm(place.normal(512, dtype=dtype), place.normal(512, dtype=dtype), 1e-5)
    x = place.normal(300, 512, dtype=dtype)
    wanted = case.product64(normed(place, x, norm))
    if activation:
        gate, up = wanted.chunk(2, dim=1)
        wanted = F.silu(gate) * up
    limit(monkeypatch, 512)
    products = watch(place, monkeypatch)
    out = place.poison(300, wanted.shape[1], dtype=dtype)
    place.settle()
    place.ops.linear(x, case.linear, norm=norm, activation=activation, out=out)
    assert products == [256, 256, 256, 256, 16]
    assert_close("two products" if activation else "linear", out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "tokens"), [("rows", TWO_PARTS_TOKENS), ("int4", PACKED_TOKENS)])
def test_few_rows_are_multiplied_as_ever(cuda_place: Place, monkeypatch, kind: str, tokens: int) -> None:
    """Without the scratch memory."""
    place, dtype = cuda_place, torch.float16
    skip_rows("rows", place)
    case = make(place, kind, 1000, dtype)
    x, found = place.normal(tokens, INPUTS, dtype=dtype), []
    for in_pieces in (False, True):
        if in_pieces:
            limit(monkeypatch)
        out = place.poison(tokens, 1000, dtype=dtype)
        place.settle()
        place.ops.linear(x, case.linear, out=out)
        found.append(out)
    assert torch.equal(*found)
