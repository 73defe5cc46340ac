"""LoRA adapters that the epilogue of a GEMM adds, compared with float64 and, for heads, with the operations
that the epilogue replaces. On a GPU of compute capability 9.0 the plan is forced, so that small shapes take
the kernels of large ones.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import test_gemm_sm90, test_two_parts
from tests.kernels.conftest import Place
from tests.kernels.numeric import GATES, assert_close
from tests.kernels.test_add_adapters import ACTIVATIONS, make_slots, make_table, sum64
from tests.kernels.test_linear import make_heads, norm64
from tridecode.kernels.adapters.fused import adapter_fields
from tridecode.kernels.checks import DtypeError, ShapeError
from tridecode.kernels.gemm.table import choose
from tridecode.kernels.operands import AdapterSlots, AdapterTable, Linear, Norm

DTYPES = [torch.float16, torch.bfloat16]
RANKS = {0: 16, 1: 8, 2: 64, 3: 33, 4: 130}
PARTS = [1, 8, 11]  # of the sums
KINDS = {"16 bit": test_gemm_sm90, "two parts": test_two_parts}
#: tokens, and the split of split-K; 0: stream-K
WAYS = [(1, 0), (8, 2), (16, 3), (17, 0), (17, 2), (33, 1), (64, 0), (64, 2), (64, 3)]


@pytest.fixture(autouse=True)
def _chosen_plans(place: Place):
    yield
    if place.device.type == "cuda":
        gpu = place.ops.gpu
        gpu.choose_gemm = lambda gemm: choose(gemm, gpu.gemm_device)


def make_sums(place: Place, x: Tensor, table: AdapterTable, slots: list[int], parts: int = 8) -> Tensor:
    """Return x @ a.T in parts of the inputs. Everything that is undefined is NaN."""
    ranks = -(-max(len(a) for a, _ in table.pairs.values()) // 4) * 4
    sums = torch.full((len(slots), parts, ranks), float("nan"), dtype=torch.float64)
    ends = [x.shape[1] * part // parts for part in range(parts + 1)]
    for row, slot in enumerate(slots):
        if slot in table.pairs:
            a = table.pairs[slot][0].double().cpu()
            for part in range(parts):
                inputs = slice(ends[part], ends[part + 1])
                sums[row, part, : len(a)] = a[:, inputs] @ x[row, inputs].double().cpu()
    return sums.float().to(place.device)


def some_slots(place: Place, rows: int) -> list[int]:
    """Slots of all adapters, of an empty slot and of none, mixed."""
    drawn = torch.randint(-3, 5, (rows,), generator=place.generator).tolist()
    return [max(slot, -1) for slot in drawn]


def make_linear(
    place: Place, kind: str, inputs: int, outputs: int, dtype, split: int
) -> tuple[Linear, Tensor]:
    """Return a linear whose kernel is forced, and its weight in float64."""
    if place.device.type == "cpu":
        weight = place.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
        return Linear(weight, place.normal(outputs, dtype=dtype)), weight.double()
    if torch.cuda.get_device_capability(place.device) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    tests = KINDS[kind]
    tests.force(place, split)
    linear = tests.make_linear(place, inputs, outputs, dtype)
    if kind == "16 bit":
        return linear, linear.weight.double()
    return linear, linear.weight.values.double() * linear.weight.scales.double()


def product64(x: Tensor, weight: Tensor, linear: Linear) -> Tensor:
    return x.double() @ weight.t() + linear.bias.double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 256), (1152, 1000), (4096, 4608)])
@pytest.mark.parametrize(("tokens", "split"), WAYS)
def test_sums_and_a_residual(place: Place, tokens, split, inputs, outputs, dtype, kind) -> None:
    table = make_table(place, RANKS, inputs, outputs, dtype)
    linear, weight = make_linear(place, kind, inputs, outputs, dtype, split)
    x, out = place.normal(tokens, inputs, dtype=dtype), place.normal(tokens, outputs, dtype=dtype)
    slots = some_slots(place, tokens)
    wanted = sum64(x, table, slots, product64(x, weight, linear) + out.double())
    sums = make_sums(place, x, table, slots, PARTS[tokens % 3])
    place.settle()
    assert place.ops.linear_with_adapters(
        x, linear, table, make_slots(place, slots), sums, residual=out, out=out
    )
    assert_close("two products", out, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["none", "one", "all"])
@pytest.mark.parametrize(("tokens", "split"), WAYS)
def test_one_adapter(place: Place, tokens, split, case, kind) -> None:
    dtype, inputs, outputs = torch.bfloat16, 1024, 768
    table = make_table(place, RANKS, inputs, outputs, dtype)
    linear, weight = make_linear(place, kind, inputs, outputs, dtype, split)
    x, out = place.normal(tokens, inputs, dtype=dtype), place.poison(tokens, outputs, dtype=dtype)
    slots = {"none": [-1] * tokens, "one": [-1] * (tokens - 1) + [0], "all": [2] * tokens}[case]
    sums = make_sums(place, x, table, slots)
    place.settle()
    assert place.ops.linear_with_adapters(x, linear, table, make_slots(place, slots), sums, out=out)
    assert_close("two products", out, sum64(x, table, slots, product64(x, weight, linear)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu", "geglu_tanh"])
@pytest.mark.parametrize(("tokens", "split"), [(1, 0), (17, 0), (64, 0)])
def test_an_activation_follows(place: Place, tokens, split, activation, dtype, kind) -> None:
    inputs, columns = 2048, 1056
    outputs = 2 * columns if activation in GATES else columns
    table = make_table(place, {0: 32, 1: 32, 2: 96, 3: 48}, inputs, outputs, dtype, blocks=2)
    linear, weight = make_linear(place, kind, inputs, outputs, dtype, split)
    x, out = place.normal(tokens, inputs, dtype=dtype), place.poison(tokens, columns, dtype=dtype)
    slots = some_slots(place, tokens)
    sums = make_sums(place, x, table, slots)
    place.settle()
    assert place.ops.linear_with_adapters(
        x, linear, table, make_slots(place, slots), sums, activation=activation, out=out
    )
    wanted = sum64(x, table, slots, product64(x, weight, linear))
    if activation in GATES:
        wanted = GATES[activation](wanted[:, :columns]) * wanted[:, columns:]
    else:
        wanted = ACTIVATIONS[activation](wanted)
    assert_close("two products", out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(GATES))
@pytest.mark.parametrize(("tokens", "inputs"), [(65, 128), (96, 1152), (130, 4096), (200, 1152), (256, 64)])
def test_products_of_rows_with_an_adapter_are_kept(place: Place, tokens, inputs, activation, dtype) -> None:
    columns = 1056 if place.device.type == "cpu" else 10320
    linear, weight = make_linear(place, "16 bit", inputs, 2 * columns, dtype, 0)
    linear = Linear(linear.weight)
    table = make_table(place, {0: 32, 1: 2, 2: 96, 3: 48}, inputs, 2 * columns, dtype, blocks=2)
    x, slots = place.normal(tokens, inputs, dtype=dtype), some_slots(place, tokens)
    sums, adapters = make_sums(place, x, table, slots), make_slots(place, slots)
    plain64 = x.double() @ weight.t()
    adapted64 = sum64(x, table, slots, plain64.clone())

    def gated64(product: Tensor) -> Tensor:
        return GATES[activation](product[:, :columns]) * product[:, columns:]

    for _ in range(2):  # a launch leaves the flags of shared tiles to the next one
        out = place.poison(tokens, columns, dtype=dtype)
        product = place.poison(tokens, 2 * columns, dtype=dtype)
        place.settle()
        assert place.ops.linear_keeping(x, linear, adapters, activation=activation, product=product, out=out)
        kept = [row for row, slot in enumerate(slots) if slot >= 0]
        assert_close("two products", out, gated64(plain64))
        assert_close("two products", product[kept], plain64[kept])
        assert product.isnan().all(1).sum() == tokens - len(kept)
        place.settle()
        place.ops.add_adapters(
            x, table, adapters, product=product, activation=activation, sums=sums, complete=True, out=out
        )
        assert_close("two products", out, gated64(adapted64))


@pytest.mark.gpu
def test_more_adapters_than_are_held_in_registers(place: Place) -> None:
    """Twenty adapters of 64 rows: their b is in shared memory in three rounds."""
    dtype, inputs, columns, rows = torch.bfloat16, 1024, 2048, 64
    ranks = {slot: 32 for slot in range(20)}
    table = make_table(place, ranks, inputs, 2 * columns, dtype, blocks=2)
    for split, activation in ((0, "swiglu"), (0, None), (2, None)):
        linear, weight = make_linear(place, "16 bit", inputs, 2 * columns, dtype, split)
        x = place.normal(rows, inputs, dtype=dtype)
        out = place.poison(rows, columns if activation else 2 * columns, dtype=dtype)
        slots = [row % 21 - 1 for row in range(rows)]
        sums = make_sums(place, x, table, slots)
        place.settle()
        assert place.ops.linear_with_adapters(
            x, linear, table, make_slots(place, slots), sums, activation=activation, out=out
        )
        wanted = sum64(x, table, slots, product64(x, weight, linear))
        if activation:
            wanted = GATES[activation](wanted[:, :columns]) * wanted[:, columns:]
        assert_close("two products", out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4, 64, 0, False), (9, 3, 64, 64, False), (32, 8, 128, 128, False)])
@pytest.mark.parametrize(("tokens", "split"), WAYS)
def test_heads_are_those_of_separate_operations(place: Place, tokens, split, heads, dtype) -> None:
    case = make_heads(place, tokens, 1024, heads, dtype)
    make_linear(place, "16 bit", 64, 64, dtype, split)  # forces the kernel
    width = case.heads.qkv_size
    table = make_table(place, {0: 48, 1: 24, 3: 96}, 1024, width, dtype, blocks=3)
    chosen = some_slots(place, tokens)
    slots, sums = make_slots(place, chosen), make_sums(place, case.x, table, chosen)
    out, wanted = (place.poison(tokens, width, dtype=dtype) for _ in range(2))
    place.settle()
    assert place.ops.project_qkv_with_adapters(
        case.x, case.linear, table, slots, sums, case.heads, case.batch, case.cache, out=out
    )
    found = case.cache.blocks.clone()
    case.cache.blocks.fill_(float("nan"))
    place.ops.linear(case.x, case.linear, out=wanted)
    place.ops.add_adapters(case.x, table, slots, product=wanted, out=wanted)
    place.ops.finish_qkv(wanted, case.heads, case.batch, case.cache)
    assert_close("two products", out, wanted.double())
    written = ~case.cache.blocks.isnan()
    assert torch.equal(written, ~found.isnan())
    assert_close("two products", found[written], case.cache.blocks[written].double())


@pytest.mark.gpu
def test_a_captured_graph_serves_other_slots(cuda_place: Place) -> None:
    place, dtype, inputs, outputs, rows = cuda_place, torch.bfloat16, 4096, 6144, 64
    table = make_table(place, RANKS, inputs, outputs, dtype)
    linear, weight = make_linear(place, "16 bit", inputs, outputs, dtype, 0)
    x, out = place.normal(rows, inputs, dtype=dtype), place.poison(rows, outputs, dtype=dtype)
    slots, sums = make_slots(place, [-1] * rows), make_sums(place, x, table, [-1] * rows)
    place.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        place.ops.linear_with_adapters(x, linear, table, slots, sums, out=out)
    for given in ([0] * rows, [-1] * 63 + [1], [row % 5 for row in range(rows)]):
        changed = make_slots(place, given)
        for old, new in zip(
            (slots.slots, slots.order, slots.groups), (changed.slots, changed.order, changed.groups)
        ):
            old.copy_(new)
        sums.copy_(make_sums(place, x, table, given))
        place.settle()
        graph.replay()
        place.settle()
        assert_close("two products", out, sum64(x, table, given, product64(x, weight, linear)))


@pytest.mark.gpu
def test_more_rows_than_a_tile_are_left_to_other_operations(cuda_place: Place) -> None:
    place, dtype = cuda_place, torch.bfloat16
    table = make_table(place, RANKS, 128, 256, dtype)
    linear, _ = make_linear(place, "16 bit", 128, 256, dtype, 0)
    x, out = place.normal(65, 128, dtype=dtype), place.poison(65, 256, dtype=dtype)
    sums = make_sums(place, x, table, [0] * 65)
    assert not place.ops.linear_with_adapters(x, linear, table, make_slots(place, [0] * 65), sums, out=out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, "rms", "layer"])
@pytest.mark.parametrize("inputs", [128, 4096, 8200, 14336])
@pytest.mark.parametrize("tokens", [1, 17, 64])
def test_sums_of_many_rows(place: Place, tokens, inputs, norm, dtype) -> None:
    table = make_table(place, RANKS, inputs, 256, dtype)
    table = AdapterTable(table.entries, table.pairs, ranks=130)
    bias = place.normal(inputs, dtype=dtype) if norm == "layer" else None
    used = Norm(place.normal(inputs, dtype=dtype) + 1, bias, 1e-5) if norm else None
    x, normed = place.normal(tokens, inputs, dtype=dtype) * 3, place.poison(tokens, inputs, dtype=dtype)
    slots = some_slots(place, tokens)
    place.settle()
    given = dict(norm=used, normed=normed) if used else {}
    sums = place.ops.adapter_sums(x, table, make_slots(place, slots), **given)
    assert sums is not None and sums.dtype == torch.float32
    if used:
        assert_close("norm", normed, norm64(x, used))
    for row, slot in enumerate(slots):
        if slot in table.pairs:
            a = table.pairs[slot][0].double()
            wanted = (norm64(x[row : row + 1], used) if used else x[row : row + 1].double()) @ a.t()
            assert_close("two products", sums[row, :1, : len(a)].to(dtype), wanted)


def test_sums_that_do_not_fit_are_refused() -> None:
    x, table = torch.zeros(3, 128), AdapterTable(torch.zeros(5, 4, dtype=torch.int64))
    ints = torch.zeros(3, dtype=torch.int32)
    slots = AdapterSlots(ints, ints, torch.zeros(6, 2, dtype=torch.int32))
    for sums, error, text in (
        (torch.zeros(3, 2, 16, dtype=torch.float16), DtypeError, "float16; wanted float32"),
        (torch.zeros(2, 2, 16), ShapeError, r"\(2, 2, 16\); wanted \(3, parts, a multiple of 4\)"),
        (torch.zeros(3, 2, 18), ShapeError, r"\(3, 2, 18\)"),
    ):
        with pytest.raises(error, match=text):
            adapter_fields("linear", x, table, slots, sums)
