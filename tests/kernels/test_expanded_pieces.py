"""Weights in 8 and 4 bit that are larger than the scratch memory in which they are expanded for many rows:
they are expanded and multiplied in pieces of their outputs.

Compared with float64 of the matrices that they stand for, and with the same product in one piece.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import test_act_order
from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.packing import in_granules
from tests.kernels.test_linear import HeadsCase, make_heads, norm64
from tests.kernels.test_packed_weight import quantized, read_back
from tests.kernels.test_rounding_epilogue import compare, empty_cache
from tridecode.backend.engine.device.memory import _CudaShapes
from tridecode.kernels import gpu, scratch
from tridecode.kernels.cuda import Cuda
from tridecode.kernels.formats.packed_weight import PackedWeight, pack
from tridecode.kernels.formats.quantized import QuantizedWeight
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.gemm import cublas
from tridecode.kernels.gemm.call import Call
from tridecode.kernels.gemm.cublas import LibraryProducts
from tridecode.kernels.gemm.dequantised import DequantisedProducts
from tridecode.kernels.gemm.eight_bit import EightBit
from tridecode.kernels.gemm.gemms import Gemms
from tridecode.kernels.gemm.packed import Packed
from tridecode.kernels.gemm.packed_table import PACKED_TOKENS, choose_packed
from tridecode.kernels.gemm.plan import Device
from tridecode.kernels.gemm.table import TWO_PARTS_TOKENS, choose
from tridecode.kernels.gpu import ACTIVATIONS, FUSED_GATES, ROW_ACTIVATIONS, Gpu
from tridecode.kernels.library import KernelError
from tridecode.kernels.operands import Linear, Norm
from tridecode.kernels.reference import Reference
from tridecode.kernels.reference.products import activated

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
GATES = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": partial(F.gelu, approximate="tanh")}
#: "odd": the rows of up begin within a granule
HOW = ["plain", "bias", "residual", "odd"]


# ---------------------------------------------------------------- which rows


@pytest.mark.parametrize("shape", [(1, 8), (256, 1 << 20), (4096, 4096), (1100, 15000), (12, 16)], ids=str)
def test_what_fits_stays_whole(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 32 << 20)
    assert scratch.expanded_rows(*shape, 2) == shape[0]
    assert scratch.expanded_weight_bytes(*shape, 2) == 2 * shape[0] * shape[1]
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 0)  # no limit
    assert scratch.expanded_rows(1 << 20, 4096, 2) == 1 << 20


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((16384, 4096), [4096] * 4),
        ((4096, 16384), [1024] * 4),
        ((12288, 4096), [4096] * 3),
        ((6144, 4096), [3072] * 2),
        ((28672, 4096), [4096] * 7),
        ((4096, 14336), [1024] * 4),
        ((4104, 4096), [2304, 1800]),
        ((1000, 1 << 20), [256, 256, 256, 232]),
    ],
)
def test_pieces_are_about_equal(
    shape: tuple[int, int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 32 << 20)
    assert pieces_of(shape[0], scratch.expanded_rows(*shape, 2)) == sizes


def test_pieces_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 32 << 20)
    for rows in (514, 4096, 5000, 14336, 28680):
        for columns in (8, 272, 4096, 11008, 1 << 17):
            piece = scratch.expanded_rows(rows, columns, 2)
            assert piece == rows or piece % 256 == 0
            assert piece * columns * 2 <= max(32 << 20, 256 * columns * 2)


@pytest.mark.parametrize(("text", "bytes"), [(None, 32 << 20), ("0", 0), ("4096", 4096)])
def test_the_environment_sets_the_limit(
    monkeypatch: pytest.MonkeyPatch, text: str | None, bytes: int
) -> None:
    name = "TRIDECODE_EXPANDED_WEIGHT_BYTES"
    monkeypatch.delenv(name, raising=False)
    if text is not None:
        monkeypatch.setenv(name, text)
    assert scratch._bytes_of_environment(name, 32 << 20) == bytes
    monkeypatch.setenv(name, "32 MiB")
    with pytest.raises(ValueError, match="TRIDECODE_EXPANDED_WEIGHT_BYTES is '32 MiB'"):
        scratch._bytes_of_environment(name, 32 << 20)


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


def pieces_of(outputs: int, piece: int) -> list[int]:
    return [min(piece, outputs - first) for first in range(0, outputs, piece)]


def memory(address: float, rows: int, columns: int, stride: float, dtype: torch.dtype) -> Tensor:
    """(rows, columns) at an address."""
    count = (rows - 1) * int(stride) + columns
    held = (ctypes.c_char * (count * dtype.itemsize)).from_address(int(address))
    return torch.frombuffer(held, dtype=dtype).as_strided((rows, columns), (int(stride), 1))


CODES = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}
NAMES = {code: name for name, code in ACTIVATIONS.items()}
ROW_NAMES = {code: name for name, code in ROW_ACTIVATIONS.items()}


class MemoryLibrary:
    """The functions of csrc that products of an expanded weight call, by torch: they read and write the
    addresses that they are given."""

    def __init__(self) -> None:
        self.weights: dict[float, QuantizedWeight | PackedWeight] = {}  # by the address of their values
        self.arenas: dict[str, Tensor] = {}
        self._read: dict[int, tuple[PackedWeight, Tensor]] = {}  # by the id of a weight, which it keeps alive

    def expanded(self, weight: QuantizedWeight | PackedWeight, dtype: torch.dtype) -> Tensor:
        """(out, in). A packed weight is read element by element, once for all its pieces: that takes long."""
        if not isinstance(weight, PackedWeight):
            return weight.expanded(dtype)
        if id(weight) not in self._read:
            self._read[id(weight)] = weight, torch.from_numpy(read_back(weight))
        return self._read[id(weight)][1].to(dtype)

    def library_bind(self, addresses: int) -> None:
        pass

    def library_algorithms(self, stream: int, *, count: int, **fields: float) -> None:
        ctypes.c_int.from_address(count).value = 1

    def gemm_expanded(self, stream: int, **fields: float) -> None:
        f = {name: int(value) for name, value in fields.items()}
        dtype, tokens, inputs = CODES[f["dtype"]], f["tokens"], f["inputs"]
        weight, done = self.weights[f["packed"]], ctypes.c_int.from_address(f["done"])
        assert (f["outputs"], inputs) == weight.shape
        scratch_memory = self.arenas["expanded_weight"]
        assert f["weight"] == scratch_memory.data_ptr()
        assert 2 * f["piece"] * inputs <= scratch_memory.numel()
        out_dtype = torch.float32 if f["out_float32"] else dtype
        out = memory(f["out"], tokens, f["outputs"], f["out_stride"], out_dtype)
        residual = bias = None
        if f["residual"]:
            residual = memory(f["residual"], tokens, f["outputs"], f["residual_stride"], dtype)
        if f["bias"]:
            bias = memory(f["bias"], 1, f["outputs"], 0, dtype)[0]
        x = memory(f["x"], tokens, inputs, f["x_stride"], dtype)
        while done.value < f["outputs"]:
            size = min(f["piece"], f["outputs"] - done.value)
            found = f["found"] if size == f["piece"] else f["last_found"]
            if ctypes.c_uint8.from_address(found).value == 255:
                raise KernelError("cuBLASLt: the product returned status 15")
            rows = slice(done.value, done.value + size)
            part = Linear(self.expanded(weight, dtype)[rows], None if bias is None else bias[rows])
            more = None if residual is None else residual[:, rows]
            activation = NAMES[f["activation"]]
            Reference().linear(x, part, activation=activation, residual=more, out=out[:, rows])
            done.value += size

    def gemm_library_epilogue(
        self,
        out: int,
        product: int,
        bias: int,
        residual: int,
        scales: int,
        row_scales: int,
        tokens: int,
        columns: int,
        out_stride: int,
        product_stride: int,
        residual_stride: int,
        activation: int,
        product_float32: int,
        out_float32: int,
        dtype: int,
        stream: int,
    ) -> None:
        x, wide = CODES[dtype], columns * (2 if NAMES[activation] in FUSED_GATES else 1)
        values = memory(product, tokens, wide, product_stride, torch.float32 if product_float32 else x)
        values = values.float() if not bias else values.float() + memory(bias, 1, wide, 0, x)
        values = activated(values, NAMES[activation])
        if residual:
            values = values + memory(residual, tokens, columns, residual_stride, x)
        to = memory(out, tokens, columns, out_stride, torch.float32 if out_float32 else x)
        to.copy_(values)

    def activate_rows(self, stream: int, **fields: float) -> None:
        f = {name: int(value) for name, value in fields.items()}
        x, activation = CODES[f["dtype"]], ROW_NAMES[f["activation"]]
        tokens, columns = f["tokens"], f["columns"]
        wide = columns if activation == "silu" else 2 * columns
        values = memory(f["product"], tokens, wide, f["product_stride"], x).float()
        if f["bias"]:
            values = values + memory(f["bias"], 1, wide, 0, x)
        values = activated(values, activation)
        if f["residual"]:
            values = values + memory(f["residual"], tokens, columns, f["residual_stride"], x)
        to = memory(f["out"], tokens, columns, f["out_stride"], torch.float32 if f["out_float32"] else x)
        to.copy_(values)

    def expand_rows(
        self, out: int, values: int, scales: int, outputs: int, inputs: int, dtype: int, stream: int
    ) -> None:
        held = memory(values, outputs, inputs, inputs, torch.int8) * memory(
            scales, outputs, 1, 1, torch.float32
        )
        memory(out, outputs, inputs, inputs, CODES[dtype]).copy_(held)


class CpuGpu(Gpu):
    """A GPU whose library is MemoryLibrary: for products of many rows."""

    def __init__(self) -> None:
        self.device, self.capability = torch.device("cpu"), 90
        device = self.gemm_device = Device(90, 132, 232448, (132, 66, 44))
        self.choose_gemm = lambda gemm: choose(gemm, device)  # type: ignore[assignment]
        self.choose_packed = lambda gemm, inputs: choose_packed(gemm, inputs, device)  # type: ignore[assignment]
        self.library = MemoryLibrary()  # type: ignore[assignment]
        self.arenas = self.library.arenas  # type: ignore[attr-defined]
        self.library_products = LibraryProducts(self.library, 256)

    def norm(self, x: Tensor, norm: Norm, out: Tensor) -> None:
        Reference().norm(x, norm, out=out)


def on_cpu_ops(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """The operations over MemoryLibrary, which knows the weights of all products by their address."""
    ops = Cuda.__new__(Cuda)
    ops.gpu = CpuGpu()
    ops.gemms = Gemms(ops.gpu)
    launch = DequantisedProducts.launch

    def noted(self: DequantisedProducts, call: Call, weight: QuantizedWeight | PackedWeight) -> bool:
        ops.gpu.library.weights[weight.values.data_ptr()] = weight
        return launch(self, call, weight)

    monkeypatch.setattr(DequantisedProducts, "launch", noted)
    return ops


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublas, "addresses", lambda: (ctypes.c_void_p * len(cublas.FUNCTIONS))())
    monkeypatch.setattr(gpu, "current_stream", lambda device: 0)
    return Place(on_cpu_ops(monkeypatch), torch.device("cpu"), torch.Generator().manual_seed(3))


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
    if format == "int4":  # scales of int4 are rounded first
        weight = replace(weight, scales=weight.scales.to(dtype).float())
    linear = Linear(weight, place.normal(outputs, dtype=dtype) if bias else None)
    # the latter packs int8, too
    linear = place.ops.pack(linear, dtype) if kind == "rows" else in_granules(place.ops, linear, dtype)
    assert isinstance(linear.weight, QuantizedWeight if kind == "rows" else PackedWeight)
    tokens = TWO_PARTS_TOKENS + 88 if kind == "rows" else PACKED_TOKENS + 44
    return Case(weight.expanded(dtype).double(), linear, tokens)


def limit(monkeypatch: pytest.MonkeyPatch, inputs: int = INPUTS, rows: int = 300) -> None:
    """Limit memory to this many rows of 16-bit inputs; by default pieces have 256."""
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 2 * inputs * rows)


def watch(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the outputs of each later GEMM of a piece."""
    outputs: list[int] = []
    behind = place.ops.gpu.library.gemm_expanded

    def run(stream: int, **fields: float) -> None:
        outputs.extend(pieces_of(int(fields["outputs"]), int(fields["piece"])))
        behind(stream, **fields)

    monkeypatch.setattr(place.ops.gpu.library, "gemm_expanded", run)
    return outputs


def normed(place: Place, x: Tensor, norm: Norm) -> Tensor:
    """Normalise with the operations under test, because SwiGLU would amplify a different rounding."""
    out = place.poison(*x.shape, dtype=x.dtype)
    place.settle()
    place.ops.norm(x, norm, out=out)
    return out


def check_plain(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    activation: str | None,
    dtype: torch.dtype,
    rows: int = 300,
    sizes: tuple[int, ...] = (256, 256, 256, 232),
) -> None:
    """Check a norm, a bias and a residual in place, with strided rows of x and out. sizes: of the pieces,
    with memory for that number of rows."""
    outputs = sum(sizes)
    case = make(place, kind, outputs, dtype)
    norm = Norm(place.normal(INPUTS, dtype=dtype), place.normal(INPUTS, dtype=dtype), 1e-5)
    x = place.normal(case.tokens, INPUTS + 8, dtype=dtype)[:, :INPUTS]
    before = place.normal(case.tokens, outputs, dtype=dtype)
    wanted = FUNCTIONS[activation](case.product64(norm64(x, norm))) + before.double()
    found = []
    for in_pieces in (False, True):
        if in_pieces:
            limit(monkeypatch, rows=rows)
        products = watch(place, monkeypatch)
        memory = place.poison(case.tokens, outputs + 16, dtype=dtype)
        out = memory[:, 8 : 8 + outputs]
        out.copy_(before)
        place.settle()
        place.ops.linear(x, case.linear, norm=norm, activation=activation, residual=out, out=out)
        assert_close("linear", out, wanted)
        assert torch.isnan(memory[:, :8]).all() and torch.isnan(memory[:, -8:]).all()
        found.append(out)
    assert products == list(sizes)
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
    assert products == [256] * 4 + [2 * inner - 1024]
    assert_close("two products", found[1], found[0].double())


@pytest.mark.parametrize(
    ("kind", "activation"), [*(("rows", name) for name in FUNCTIONS), ("int4 in groups", "relu")]
)
def test_outputs_of_pieces_on_a_cpu(on_cpu: Place, monkeypatch, kind, activation: str | None) -> None:
    check_plain(on_cpu, monkeypatch, kind, activation, torch.float16)


#: rows that there is memory for, and the pieces
SIZES = [(260, (256, 8)), (300, (256,) * 4), (600, (512, 496)), (900, (768, 512)), (1100, (1024,) * 3)]


@pytest.mark.parametrize(("rows", "sizes"), SIZES, ids=str)
def test_sizes_of_pieces_on_a_cpu(on_cpu: Place, monkeypatch, rows: int, sizes: tuple[int, ...]) -> None:
    check_plain(on_cpu, monkeypatch, "rows", None, torch.float16, rows, sizes)


@pytest.mark.pairwise
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(
    ("kind", "how"), [*(("rows", how) for how in HOW), ("int8", "plain"), ("int8", "odd")]
)
def test_gate_and_up_of_pieces_on_a_cpu(on_cpu: Place, monkeypatch, kind, how, activation) -> None:
    check_gated(on_cpu, monkeypatch, kind, activation, how, torch.float16)


@pytest.mark.parametrize("activation", [None, "relu", "swiglu"])
def test_torch_multiplies_pieces_without_cublaslt(on_cpu: Place, monkeypatch, activation) -> None:
    monkeypatch.setattr(on_cpu.ops.gpu.library_products, "is_open", False)
    check_without_cublaslt(on_cpu, monkeypatch, "rows", activation)


def check_without_cublaslt(place: Place, monkeypatch, kind: str, activation: str | None) -> None:
    dtype, outputs = torch.float16, 1000
    case = make(place, kind, outputs, dtype)
    columns = outputs // 2 if activation == "swiglu" else outputs
    x, residual = (
        place.normal(case.tokens, INPUTS, dtype=dtype),
        place.normal(case.tokens, columns, dtype=dtype),
    )
    product = case.product64(x)
    wanted = (
        FUNCTIONS[activation](product)
        if activation in FUNCTIONS
        else F.silu(product[:, :500]) * product[:, 500:]
    )
    limit(monkeypatch)
    products = watch(place, monkeypatch)
    out = residual.clone()
    place.settle()
    place.ops.linear(x, case.linear, activation=activation, residual=out, out=out)
    assert_close("two products", out, wanted + residual.double())
    assert products == []


def refuse(place: Place, monkeypatch, refused: int, exact: bool = True) -> None:
    """Make algorithms for pieces of `refused` outputs fail for other token counts than requested.

    exact: whether an algorithm for the requested count exists.
    """
    products = place.ops.gpu.library_products
    find, garbage = products._algorithm, (ctypes.c_uint8 * 96)(*([255] * 96))

    def algorithm(tokens: int, rows: int, fields: dict[str, float]) -> object:
        if fields["outputs"] != refused:
            return find(tokens, rows, fields)
        if rows == tokens and not exact:
            return None
        return garbage if rows != tokens else find(tokens, rows, fields)

    monkeypatch.setattr(products, "_algorithm", algorithm)


def check_refused(place: Place, monkeypatch, kind: str, refused: int) -> None:
    """Check a residual in place: a piece that was launched is not launched again."""
    dtype = torch.float16
    case = make(place, kind, 1000, dtype)
    x, residual = place.normal(case.tokens, INPUTS, dtype=dtype), place.normal(case.tokens, 1000, dtype=dtype)
    wanted, out = case.product64(x) + residual.double(), residual.clone()
    limit(monkeypatch)
    refuse(place, monkeypatch, refused)
    place.settle()
    place.ops.linear(x, case.linear, residual=out, out=out)
    assert_close("linear", out, wanted)


@pytest.mark.parametrize("refused", [256, 232])
def test_a_refused_algorithm_is_asked_for_again_on_a_cpu(on_cpu: Place, monkeypatch, refused: int) -> None:
    check_refused(on_cpu, monkeypatch, "rows", refused)


def test_a_product_that_cublaslt_leaves_half_way_is_an_error(on_cpu: Place, monkeypatch) -> None:
    """Another attempt would add a residual in place twice."""
    case = make(on_cpu, "rows", 1000, torch.float16)
    x = on_cpu.normal(case.tokens, INPUTS, dtype=torch.float16)
    out = on_cpu.normal(case.tokens, 1000, dtype=torch.float16)
    limit(monkeypatch)
    refuse(on_cpu, monkeypatch, 232, exact=False)
    with pytest.raises(KernelError, match="768 of 1000 outputs"):
        on_cpu.ops.linear(x, case.linear, residual=out, out=out)


def test_the_scratch_memory_is_the_planned_one(on_cpu: Place, monkeypatch) -> None:
    """And no product takes more."""
    limit(monkeypatch)
    for outputs, rows in ((128, 128), (1000, 256), (304, 256)):
        for kind in ("rows", "int8"):
            place = replace(on_cpu, ops=on_cpu_ops(monkeypatch))
            case = make(place, kind, outputs, torch.float16)
            assert place.ops.gpu.arenas["expanded_weight"].numel() == 2 * INPUTS * rows
            planned = _CudaShapes(2)
            before = planned.bytes
            planned.pack(Linear(round_to_nearest(case.matrix, "int8")), torch.float16)
            assert planned.bytes - before == 2 * INPUTS * rows
            x, out = place.normal(case.tokens, INPUTS, dtype=torch.float16), torch.empty(case.tokens, outputs)
            place.ops.linear(x, case.linear, out=out.half())
            assert place.ops.gpu.arenas["expanded_weight"].numel() == 2 * INPUTS * rows


@pytest.mark.parametrize("outputs", [1000, 1003])
def test_the_heads_weight_is_not_expanded_in_pieces(on_cpu: Place, monkeypatch, outputs: int) -> None:
    """Though a layer's weight has left scratch memory that would hold a piece."""
    limit(monkeypatch)
    make(on_cpu, "rows", 256, torch.float16)
    seen = []
    monkeypatch.setattr(EightBit, "launch", lambda _, call: seen.append(call.tokens))
    monkeypatch.setattr(Packed, "launch", lambda _, call: seen.append(call.tokens))
    weight = round_to_nearest(on_cpu.normal(outputs, INPUTS, dtype=torch.float32), "int8")
    head = on_cpu.ops.pack(Linear(weight), torch.float16, is_head=True)
    x = on_cpu.normal(600, INPUTS, dtype=torch.float16)
    on_cpu.ops.linear(x, head, out=torch.empty(600, outputs))
    assert seen == [256, 256, 88]


# ---------------------------------------------------------------- on a GPU


def skip_rows(kind: str, place: Place) -> None:
    if kind == "rows" and place.ops.gpu.capability != 90:
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
def test_gate_and_up_of_pieces(cuda_place: Place, monkeypatch, kind, how, activation, dtype) -> None:
    skip_rows(kind, cuda_place)
    check_gated(cuda_place, monkeypatch, kind, activation, how, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "sizes"), SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_pieces(cuda_place: Place, monkeypatch, kind, rows: int, sizes: tuple[int, ...]) -> None:
    skip_rows(kind, cuda_place)
    check_plain(cuda_place, monkeypatch, kind, None, torch.bfloat16, rows, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("refused", [256, 232])
@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_algorithm_is_asked_for_again(cuda_place: Place, monkeypatch, kind, refused: int) -> None:
    skip_rows(kind, cuda_place)
    check_refused(cuda_place, monkeypatch, kind, refused)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "relu", "swiglu"])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_without_cublaslt(cuda_place: Place, monkeypatch, kind, activation) -> None:
    skip_rows(kind, cuda_place)
    monkeypatch.setattr(cuda_place.ops.gpu.library_products, "is_open", False)
    check_without_cublaslt(cuda_place, monkeypatch, kind, activation)


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
    arenas = {name: arena.numel() for name, arena in place.ops.gpu.arenas.items()}
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
    assert {name: arena.numel() for name, arena in place.ops.gpu.arenas.items()} == arenas


HEADS = [  # heads, kv heads, head size, rotary size, interleaved
    (4, 4, 64, 0, False),
    (8, 2, 128, 128, False),
    (3, 1, 256, 64, True),
    (5, 5, 80, 32, False),
]


def project(place: Place, monkeypatch: pytest.MonkeyPatch, made: HeadsCase) -> Tensor:
    """Run the projection in pieces."""
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
