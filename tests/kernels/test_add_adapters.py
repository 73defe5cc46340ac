"""LoRA adapters of rows after a GEMM, compared with float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.numeric import assert_close
from tests.kernels.test_linear import norm64
from tridecode.kernels.adapters.matrices import entry_of, spans_of
from tridecode.kernels.adapters.operation import NextSums, parts
from tridecode.kernels.checks import DtypeError, ShapeError
from tridecode.kernels.operands import AdapterSlots, AdapterTable, Linear, Norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = {
    None: lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
GATES = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": ACTIVATIONS["gelu_tanh"]}
SLOTS = 5
_HELD: list[Tensor] = []  # keeps the tensors alive to which entries point during a test


@pytest.fixture(autouse=True)
def _release():
    yield
    _HELD.clear()


def make_table(place: Place, ranks: dict[int, int], inputs: int, outputs: int, dtype, blocks: int = 1):
    """Return a table with an adapter of rank `ranks[slot]` in each slot. blocks: b is 0 outside this many
    diagonal blocks. Entries of other slots have rank 0 and invalid addresses."""
    size = max(SLOTS, *(slot + 1 for slot in ranks))
    entries = torch.zeros(size, 3, 4, dtype=torch.int64)  # one GEMM of three
    pairs = {}
    for slot, rank in ranks.items():
        a = place.normal(rank, inputs, dtype=dtype, scale=inputs**-0.5)
        b = place.normal(rank, outputs, dtype=dtype, scale=rank**-0.5)
        for block in range(blocks):
            rows = slice(block * rank // blocks, (block + 1) * rank // blocks)
            b[rows, : block * outputs // blocks] = 0
            b[rows, (block + 1) * outputs // blocks :] = 0
        spans = spans_of(b.cpu()).to(place.device)
        pairs[slot] = a, b
        entries[slot, 1] = entry_of(a, b, spans)
        _HELD.extend([a, b, spans])
    entries = entries.to(place.device)
    _HELD.append(entries)
    return AdapterTable(entries[:, 1], pairs)


def make_slots(place: Place, slots: list[int], ordered: bool = True) -> AdapterSlots:
    if not ordered:
        return AdapterSlots(place.ints(slots))
    order = place.ints(np.argsort(np.array(slots, np.int32).view(np.uint32), kind="stable"))
    used = sorted(slot for slot in slots if slot >= 0)
    groups = [(slot, used.index(slot)) for slot in sorted(set(used))]
    groups += [(-1, len(used))] * max(1, SLOTS + 1 - len(groups))
    return AdapterSlots(place.ints(slots), order, place.ints(groups))


def sum64(x: Tensor, table: AdapterTable, slots: list[int], product: Tensor) -> Tensor:
    total = product.double().cpu()
    for row, slot in enumerate(slots):
        if slot in table.pairs:
            a, b = (matrix.double().cpu() for matrix in table.pairs[slot])
            total[row] += x[row].double().cpu() @ a.t() @ b
    return total


def activated64(x: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
    if activation in GATES:
        gates, values = x.chunk(2, dim=1)
        x = GATES[activation](gates) * values
    else:
        x = ACTIVATIONS[activation](x)
    return x if residual is None else x + residual.double().cpu()


def random_slots(place: Place, rows: int, every: bool = False) -> list[int]:
    drawn = torch.randint(0 if every else -1, SLOTS, (rows,), generator=place.generator)
    return drawn.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 64, 200])
@pytest.mark.parametrize(
    ("ranks", "inputs", "outputs"),
    [
        ({0: 16, 1: 16, 3: 16}, 512, 768),
        ({0: 8, 1: 64, 2: 33, 4: 1}, 264, 1000),
        ({0: 7, 2: 130, 3: 64}, 1024, 4104),
        ({1: 48, 4: 5}, 72, 9000),
    ],
)
def test_rows_get_the_sums_of_their_adapters(place: Place, ranks, inputs, outputs, rows, dtype) -> None:
    table = make_table(place, ranks, inputs, outputs, dtype)
    slots = random_slots(place, rows)
    x, product = place.normal(rows, inputs, dtype=dtype), place.normal(rows, outputs, dtype=dtype)
    for ordered in (True, False):
        batch, out = make_slots(place, slots, ordered), product.clone()
        place.settle()
        place.ops.add_adapters(x, table, batch, product=out, out=out)
        assert_close("linear", out, sum64(x, table, slots, product))
        without = [row for row, slot in enumerate(slots) if slot not in table.pairs]
        assert torch.equal(out[without], product[without])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATES])
@pytest.mark.parametrize("columns", [72, 1024, 14336])
def test_activations_and_residuals_follow(place: Place, columns, activation, residual, dtype) -> None:
    if place.device.type == "cpu" and columns > 1024:
        columns = 128
    rows, inputs = 9, 136
    outputs = 2 * columns if activation in GATES else columns
    table = make_table(place, {0: 16, 1: 3, 2: 64}, inputs, outputs, dtype)
    slots = random_slots(place, rows)
    x, product = place.normal(rows, inputs, dtype=dtype), place.normal(rows, outputs, dtype=dtype)
    added = place.normal(rows, columns, dtype=dtype) if residual else None
    out = place.poison(rows, columns, dtype=dtype)
    place.settle()
    place.ops.add_adapters(
        x, table, make_slots(place, slots), product=product, activation=activation, residual=added, out=out
    )
    assert_close("linear", out, activated64(sum64(x, table, slots, product), activation, added))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("columns", [40, 4096, 8192])
def test_a_norm_follows(place: Place, columns, kind, dtype) -> None:
    rows, inputs = 7, 520
    table = make_table(place, {0: 16, 3: 40}, inputs, columns, dtype)
    slots = random_slots(place, rows)
    x, product = place.normal(rows, inputs, dtype=dtype), place.normal(rows, columns, dtype=dtype)
    bias = None if kind == "rms" else place.normal(columns, dtype=dtype)
    norm = Norm(place.normal(columns, dtype=dtype) + 1, bias, 1e-5)
    out, normed = product.clone(), place.poison(rows, columns, dtype=dtype)
    place.settle()
    place.ops.add_adapters(x, table, make_slots(place, slots), product=out, norm=norm, normed=normed, out=out)
    assert_close("linear", out, sum64(x, table, slots, product))
    assert_close("norm", normed, norm64(out, norm))


# ---------------------------------------------------------------- sums that an earlier operation computes


SUM_RANKS = 200  # more than any adapter has


def sums_of(x: Tensor, table: AdapterTable, slots: list[int], count: int) -> Tensor:
    """Return x @ a.T of each row as `count` parts; what the operation may not read is not a number."""
    found = torch.full((len(x), count, SUM_RANKS), float("nan"))
    for row, slot in enumerate(slots):
        if slot in table.pairs:
            a = table.pairs[slot][0].double().cpu()
            weights = torch.arange(1, count + 1, dtype=torch.float64)
            whole = x[row].double().cpu() @ a.t()
            found[row, :, : len(a)] = (whole * (weights / weights.sum())[:, None]).float()
    return found.to(x.device)


def room(
    place: Place, table: AdapterTable, rows: int, columns: int, *, normed: bool, gated: bool
) -> NextSums:
    sizes = rows, parts(columns, normed=normed, gated=gated), SUM_RANKS
    return NextSums(table, torch.full(sizes, float("nan"), device=place.device))


class TwoGemms:
    """Two GEMMs with adapters: the operation after the first computes the sums of the second. x (rows,
    inputs): the input of the first; product: its result; columns: inputs of the second."""

    def __init__(
        self, place: Place, ranks: dict[int, int], next_ranks: dict[int, int], rows: int, inputs: int,
        columns: int, dtype, *, normed: bool = False, gated: bool = False,
    ):  # fmt: skip
        outputs = 2 * columns if gated else columns
        self.place, self.table = place, make_table(place, ranks, inputs, outputs, dtype, blocks=2)
        after = make_table(place, next_ranks, columns, 264, dtype)
        self.following = room(place, after, rows, columns, normed=normed, gated=gated)
        self.slots = random_slots(place, rows)
        self.x = place.normal(rows, inputs, dtype=dtype)
        self.product = place.normal(rows, outputs, dtype=dtype)

    def run(self, given: int, **fields) -> None:
        """Run the operation after the first GEMM. given: parts of the sums of x; 0: the operation computes
        them."""
        sums = sums_of(self.x, self.table, self.slots, given) if given else None
        slots = make_slots(self.place, self.slots)
        self.place.settle()
        self.place.ops.add_adapters(self.x, self.table, slots, sums=sums, next_sums=self.following, **fields)

    def wanted(self) -> Tensor:
        """Return the first GEMM's result with its adapters, in float64."""
        return sum64(self.x, self.table, self.slots, self.product)

    def check_next(self, x: Tensor) -> None:
        """Compare the second GEMM's result with float64. x: its input."""
        place, table = self.place, self.following.table
        product = place.normal(len(x), 264, dtype=x.dtype)
        out, slots = product.clone(), make_slots(place, self.slots)
        place.settle()
        place.ops.add_adapters(x, table, slots, product=out, sums=self.following.sums, out=out)
        assert_close("linear", out, sum64(x, table, self.slots, product))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    ("rows", "columns", "given"),
    [
        (19, 40, 0),
        (19, 1000, 9),
        (19, 4096, 0),
        (19, 4096, 14),
        (19, 8192, 1),
        (190, 1000, 2),
        (190, 4096, 0),
    ],
)
def test_a_norm_computes_the_sums_of_the_next_gemm(place: Place, rows, columns, given, kind, dtype) -> None:
    ranks, next_ranks = {0: 16, 2: 130, 3: 40}, {0: 48, 1: 5, 3: 200}
    gemms = TwoGemms(place, ranks, next_ranks, rows, 520, columns, dtype, normed=True)
    bias = None if kind == "rms" else place.normal(columns, dtype=dtype)
    norm = Norm(place.normal(columns, dtype=dtype) + 1, bias, 1e-5)
    out, normed = gemms.product.clone(), place.poison(rows, columns, dtype=dtype)
    gemms.run(given, product=out, norm=norm, normed=normed, out=out)
    assert_close("linear", out, gemms.wanted())
    assert_close("norm", normed, norm64(out, norm))
    gemms.check_next(normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, *GATES])
@pytest.mark.parametrize(("rows", "columns"), [(13, 72), (130, 2056), (130, 4096)])
def test_rows_without_an_adapter_may_be_complete(place: Place, rows, columns, activation, dtype) -> None:
    if place.device.type == "cpu":
        columns = 72
    ranks, next_ranks = {0: 32, 1: 3, 2: 144}, {0: 16, 2: 64, 3: 7}
    gemms = TwoGemms(place, ranks, next_ranks, rows, 136, columns, dtype, gated=activation in GATES)
    out = activated64(gemms.wanted(), activation, None).to(place.device, dtype)
    with_adapter = torch.tensor(gemms.slots) >= 0
    complete = out.clone()
    out[with_adapter.to(place.device)] = float("nan")
    product = gemms.product.clone()
    product[~with_adapter.to(place.device)] = float("nan")
    changed = torch.tensor([slot in ranks or slot in next_ranks for slot in gemms.slots]).to(place.device)
    gemms.run(8, product=product, activation=activation, complete=True, out=out)
    assert_close("linear", out[changed], activated64(gemms.wanted(), activation, None)[changed.cpu()])
    assert torch.equal(out[~with_adapter.to(place.device)], complete[~with_adapter.to(place.device)])
    out[with_adapter.to(place.device) & ~changed] = 0  # an empty slot: what the GEMM stored remains
    gemms.check_next(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu_tanh", *GATES])
@pytest.mark.parametrize(("columns", "given"), [(72, 1), (2056, 8), (14336, 8)])
def test_an_activation_computes_the_sums_of_the_next_gemm(
    place: Place, columns, given, activation, residual, dtype
) -> None:
    if place.device.type == "cpu" and columns > 72:
        columns = 128
    rows, ranks, next_ranks = 13, {0: 32, 1: 3, 2: 144}, {0: 16, 2: 64, 3: 7}
    gemms = TwoGemms(place, ranks, next_ranks, rows, 136, columns, dtype, gated=activation in GATES)
    added = place.normal(rows, columns, dtype=dtype) if residual else None
    out = place.poison(rows, columns, dtype=dtype)
    gemms.run(given, product=gemms.product, activation=activation, residual=added, out=out)
    assert_close("linear", out, activated64(gemms.wanted(), activation, added))
    gemms.check_next(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_modules_have_ranks_of_their_own(place: Place, dtype) -> None:
    """b is 0 outside one block per module (query, key and value)."""
    rows, inputs, outputs = 6, 256, 768
    table = make_table(place, {0: 48, 1: 30}, inputs, outputs, dtype, blocks=3)
    spans = spans_of(table.pairs[0][1].cpu()).tolist()
    assert [(span & 0xFFFF, span >> 16) for span in spans] == [(0, 16)] * 4 + [(16, 32)] * 4 + [(32, 48)] * 4
    slots = [0, 1, -1, 0, 1, 4]
    x, product = place.normal(rows, inputs, dtype=dtype), place.normal(rows, outputs, dtype=dtype)
    out = product.clone()
    place.settle()
    place.ops.add_adapters(x, table, make_slots(place, slots), product=out, out=out)
    assert_close("linear", out, sum64(x, table, slots, product))


def test_spans_of_zeros_are_empty() -> None:
    b = torch.zeros(5, 130)
    b[2, 128] = b[3, 129] = 1
    assert [(span & 0xFFFF, span >> 16) for span in spans_of(b).tolist()] == [(0, 0), (0, 0), (2, 4)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (4096, 28672), (14336, 4096), (4096, 4096)])
def test_adapters_are_read_while_the_gemm_runs(
    cuda_place: Place, rows: int, inputs: int, outputs: int
) -> None:
    """The kernel reads x and the adapters while the GEMM runs; repeated with new inputs."""
    place, dtype = cuda_place, torch.bfloat16
    ops = place.ops
    table = make_table(place, {0: 16, 1: 16, 2: 64}, inputs, outputs, dtype)
    weight = place.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    linear = ops.pack(Linear(weight))
    norm = Norm(place.normal(inputs, dtype=dtype) + 1, None, 1e-5)
    slots = random_slots(place, rows, every=True)
    batch, given = make_slots(place, slots), place.normal(20, rows, inputs, dtype=dtype)
    x = place.poison(rows, inputs, dtype=dtype)
    outs = place.poison(20, rows, outputs, dtype=dtype)
    place.settle()
    for source, out in zip(given, outs):
        ops.norm(source, norm, out=x)
        ops.linear(x, linear, out=out)
        ops.add_adapters(x, table, batch, product=out, out=out)
    place.settle()
    for source, out in zip(given, outs):
        ops.norm(source, norm, out=x)
        place.settle()
        plain = x.double() @ weight.double().t()
        for row, slot in enumerate(slots):
            if slot in table.pairs:
                a, b = table.pairs[slot]
                plain[row] += x[row].double() @ a.double().t() @ b.double()
        assert_close("two products", out, plain)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_slots_and_other_adapters(cuda_place: Place) -> None:
    place, dtype, rows, inputs, outputs = cuda_place, torch.bfloat16, 16, 512, 1024
    table = make_table(place, {0: 16, 1: 32}, inputs, outputs, dtype)
    other = make_table(place, {3: 8}, inputs, outputs, dtype)
    batch = make_slots(place, [-1] * rows)
    x, product = place.normal(rows, inputs, dtype=dtype), place.normal(rows, outputs, dtype=dtype)
    out = torch.empty_like(product)
    place.settle()
    place.ops.add_adapters(x, table, batch, product=product, out=out)
    place.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        place.ops.add_adapters(x, table, batch, product=product, out=out)
    for step, slots in enumerate([[0] * rows, [1, 0, -1, 2] * 4, [3, -1] * 8]):
        if step == 2:
            table.entries[3] = other.entries[3]
            table.pairs[3] = other.pairs[3]
        changed = make_slots(place, slots)
        batch.slots.copy_(changed.slots)
        batch.order.copy_(changed.order)
        out.fill_(float("nan"))
        place.settle()
        graph.replay()
        place.settle()
        assert_close("linear", out, sum64(x, table, slots, product))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
def test_sums_pass_through_the_gemms_of_a_layer(cuda_place: Place, rows: int) -> None:
    """Sums are read before the wait for the GEMM; repeated with new inputs."""
    place, dtype, width, inner, rounds = cuda_place, torch.bfloat16, 1024, 3584, 20
    ops = place.ops
    shapes = {"o": (width, width), "up": (width, 2 * inner), "down": (inner, width), "qkv": (width, 1536)}
    tables, linears = {}, {}
    for name, (inputs, outputs) in shapes.items():
        tables[name] = make_table(place, {0: 16, 1: 48, 2: 64}, inputs, outputs, dtype)
        linears[name] = ops.pack(Linear(place.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5)))
    norm = Norm(place.normal(width, dtype=dtype) + 1, None, 1e-5)
    slots = random_slots(place, rows)
    batch, given = make_slots(place, slots), place.normal(rounds, rows, width, dtype=dtype)

    def layer(x: Tensor, settle) -> dict[str, Tensor]:
        """The results of each GEMM of a layer with its adapters."""
        made = {name: place.poison(rows, outputs, dtype=dtype) for name, (_, outputs) in shapes.items()}
        normed = [place.poison(rows, width, dtype=dtype) for _ in range(2)]
        made["mlp"] = place.poison(rows, inner, dtype=dtype)
        to_up = room(place, tables["up"], rows, width, normed=True, gated=False)
        to_down = room(place, tables["down"], rows, inner, normed=False, gated=True)
        to_qkv = room(place, tables["qkv"], rows, width, normed=True, gated=False)
        steps = [
            lambda: ops.linear(x, linears["o"], out=made["o"]),
            lambda: ops.add_adapters(
                x, tables["o"], batch, product=made["o"], norm=norm, normed=normed[0], next_sums=to_up,
                out=made["o"],
            ),
            lambda: ops.linear(normed[0], linears["up"], out=made["up"]),
            lambda: ops.add_adapters(
                normed[0], tables["up"], batch, product=made["up"], activation="swiglu", sums=to_up.sums,
                next_sums=to_down, out=made["mlp"],
            ),
            lambda: ops.linear(made["mlp"], linears["down"], residual=made["o"], out=made["down"]),
            lambda: ops.add_adapters(
                made["mlp"], tables["down"], batch, product=made["down"], norm=norm, normed=normed[1],
                sums=to_down.sums, next_sums=to_qkv, out=made["down"],
            ),
            lambda: ops.linear(normed[1], linears["qkv"], out=made["qkv"]),
            lambda: ops.add_adapters(
                normed[1], tables["qkv"], batch, product=made["qkv"], sums=to_qkv.sums, out=made["qkv"]
            ),
        ]  # fmt: skip
        place.settle()
        for step in steps:
            step()
            settle()
        return made

    for x in given:
        found = layer(x, lambda: None)
        place.settle()
        wanted = layer(x, place.settle)
        place.settle()
        for name in found:
            assert_close("two products", found[name], wanted[name].double().cpu())


@pytest.mark.gpu
def test_what_does_not_fit_is_refused_before_a_launch(cuda_place: Place) -> None:
    place, dtype = cuda_place, torch.bfloat16
    table = make_table(place, {0: 8}, 64, 64, dtype)
    x, product, batch = place.normal(2, 64, dtype=dtype), place.normal(2, 64, dtype=dtype), [0, -1]
    with pytest.raises(ShapeError, match="60 inputs and 64 columns; wanted multiples of 8"):
        place.ops.add_adapters(x[:, :60], table, make_slots(place, batch), product=product, out=product)
    with pytest.raises(ShapeError, match=r"slots is \(3,\); wanted \(2,\)"):
        place.ops.add_adapters(x, table, make_slots(place, [0, 0, 0]), product=product, out=product)
    with pytest.raises(DtypeError, match="out is torch.float32"):
        place.ops.add_adapters(x, table, make_slots(place, batch), product=product, out=product.float())
    with pytest.raises(ShapeError, match="out has 64 columns; 64 outputs give 32"):
        place.ops.add_adapters(
            x, table, make_slots(place, batch), product=product, activation="swiglu", out=product
        )
