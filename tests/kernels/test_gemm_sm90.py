"""gemm_sm90_split_k and gemm_sm90_stream_k against float64: every tile, split and epilogue.

The plan is forced, so that each kernel also runs on shapes for which another one would be chosen.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import Place
from tests.kernels.numeric import GATES, assert_close
from tests.kernels.test_linear import make_heads, make_linear, product64
from tridecode.kernels.gemm.plan import Device, Gemm, Plan, at_least
from tridecode.kernels.gemm.table import choose
from tridecode.kernels.gemm.table_sm90 import EVEN_SPLIT_TOKENS, SPLIT_K_TOKENS, stream_k_plan
from tridecode.kernels.operands import Linear, Norm

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]
TOKENS = [1, 5, 16, 17, 33, 64, 70, 150]
SWIGLU_TOKENS = [1, 17, 33, 64, 70, 97, 128, 150, 193, 257, 600]
#: tokens, and the split of gemm_sm90_split_k; 0: gemm_sm90_stream_k
WAYS = [(tokens, 0) for tokens in TOKENS]
WAYS += [(tokens, split) for tokens in TOKENS if tokens <= 64 for split in (1, 2, 3)]
#: (inputs, outputs): one stage, odd ends, many stages of few tiles, many tiles
SHAPES = [(64, 128), (72, 264), (520, 1000), (4096, 512), (512, 9216)]


@pytest.fixture(scope="module")
def ops():
    from tridecode.kernels.cuda import Cuda

    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("gemm_sm90 needs compute capability 9.0")
    return Cuda(device)


@pytest.fixture
def place(ops, request: pytest.FixtureRequest) -> Place:
    generator = torch.Generator().manual_seed(len(request.node.name))
    return Place(ops, torch.device("cuda", 0), generator)


def force_even(place: Place) -> None:
    def plan(gemm: Gemm) -> Plan:
        assert gemm.half and gemm.aligned and gemm.out_aligned
        return even_split(gemm, at_least(gemm.tokens, EVEN_SPLIT_TOKENS))

    place.ops.gpu.choose_gemm = plan


def even_split(gemm: Gemm, tile_tokens: int, kernel: str = "gemm_sm90_even_split", split: int = 4) -> Plan:
    tiles = -(-gemm.outputs // 256) * -(-gemm.tokens // tile_tokens)
    return Plan(kernel, "forced", 256, tile_tokens, split, split * tiles, stream_k=True)


def force(place: Place, split: int) -> None:
    device: Device = place.ops.gpu.gemm_device

    def plan(gemm: Gemm) -> Plan:
        assert gemm.half and gemm.aligned and gemm.out_aligned
        if split == 0:
            return stream_k_plan(gemm, device)
        tile_tokens = next(size for size in SPLIT_K_TOKENS if size >= gemm.tokens)
        stages = -(-gemm.inputs // 64)
        return Plan("gemm_sm90_split_k", "forced", 128, tile_tokens, min(split, stages), fuses_heads=True)

    place.ops.gpu.choose_gemm = plan


def run(place: Place, x: Tensor, linear: Linear, out: Tensor, split: int | None, **how) -> None:
    """Twice, because a launch leaves the flags of shared tiles to the next one."""
    place.settle()
    if split is not None:
        force(place, split)
    residual = how.get("residual")
    before = None if residual is None else residual.clone()
    place.ops.linear(x, linear, out=out, **how)
    first = out.clone()
    if residual is not None:
        residual.copy_(before)
        place.settle()
    place.ops.linear(x, linear, out=out, **how)
    assert torch.equal(first, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "split"), WAYS)
def test_bias_and_residual_are_added_in_place(
    place: Place, tokens: int, split: int, shape, dtype: torch.dtype
):
    linear = make_linear(place, *shape, dtype)
    x, out = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
    wanted = product64(x, linear) + out.double()
    run(place, x, linear, out, split, residual=out)
    assert_close("linear", out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize(("tokens", "split"), [(3, 0), (3, 2), (20, 0), (40, 0), (40, 1), (40, 3), (90, 0)])
def test_activations(place: Place, tokens: int, split: int, activation: str | None, dtype: torch.dtype):
    linear = make_linear(place, 520, 1000, dtype, bias=activation != "relu")
    x, out = place.normal(tokens, 520, dtype=dtype), place.poison(tokens, 1000, dtype=dtype)
    run(place, x, linear, out, split, activation=activation)
    wanted = product64(x, linear)
    if activation is not None:
        name = activation.removesuffix("_tanh")
        how = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
        wanted = getattr(F, name)(wanted, **how)
    assert_close("linear", out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 128), (520, 1000), (4096, 512), (14336, 2048)])
@pytest.mark.parametrize("tokens", [1, 33, 65, 128, 129, 192, 250, 300])
def test_four_clusters_finish_a_tile(place: Place, tokens: int, shape, dtype: torch.dtype):
    """Covers clusters whose share has no tokens, and more than one tile of tokens."""
    linear = make_linear(place, *shape, dtype)
    x, out = place.normal(tokens, shape[0], dtype=dtype), place.normal(tokens, shape[1], dtype=dtype)
    wanted = product64(x, linear) + out.double()
    force_even(place)
    run(place, x, linear, out, None, residual=out)
    assert_close("linear", out, wanted)


@pytest.mark.parametrize("activation", [None, "gelu_tanh", "relu"])
@pytest.mark.parametrize("tokens", [70, 256])
def test_four_clusters_finish_a_tile_of_float32_or_activated(place: Place, tokens: int, activation):
    linear = make_linear(place, 1024, 1000, torch.float16)
    x = place.normal(tokens, 1024, dtype=torch.float16)
    dtype = torch.float32 if activation is None else torch.float16
    out = place.poison(tokens, 1000, dtype=dtype)
    force_even(place)
    run(place, x, linear, out, None, activation=activation)
    wanted = product64(x, linear)
    if activation == "gelu_tanh":
        wanted = F.gelu(wanted, approximate="tanh")
    elif activation == "relu":
        wanted = F.relu(wanted)
    assert_close("logits" if activation is None else "linear", out, wanted)


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [8, 344, 11008])
@pytest.mark.parametrize("tokens", SWIGLU_TOKENS)
def test_swiglu(place: Place, tokens: int, inner: int, bias: bool, dtype: torch.dtype, activation: str):
    linear = make_linear(place, 264, 2 * inner, dtype, bias)
    x, out = place.normal(tokens, 264, dtype=dtype), place.poison(tokens, inner, dtype=dtype)
    run(place, x, linear, out, 0, activation=activation)
    both = product64(x, linear)
    assert_close("linear", out, GATES[activation](both[:, :inner]) * both[:, inner:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "split"), [(3, 0), (3, 1), (20, 0), (20, 2), (60, 3), (100, 0), (300, 0)])
def test_float32_results(place: Place, tokens: int, split: int, dtype: torch.dtype):
    linear = make_linear(place, 512, 1003, dtype, bias=False)
    x, out = place.normal(tokens, 512, dtype=dtype), place.poison(tokens, 1003, dtype=torch.float32)
    run(place, x, linear, out, split)
    assert_close("logits", out, product64(x, linear))


@pytest.mark.parametrize("split", [0, 1])
def test_rows_may_lie_apart(place: Place, split: int):
    linear = make_linear(place, 64, 48, torch.float16)
    wide, out = place.normal(50, 200, dtype=torch.float16), place.poison(50, 80, dtype=torch.float16)
    run(place, wide[:, 8:72], linear, out[:, :48], split)
    assert_close("linear", out[:, :48], product64(wide[:, 8:72], linear))
    assert torch.isnan(out[:, 48:]).all()


HEADS = [  # heads, kv heads, head size, rotary size
    (4, 4, 64, 0),
    (3, 3, 80, 0),
    (9, 3, 64, 64),
    (8, 2, 128, 128),
    (32, 8, 128, 128),
    (3, 1, 256, 256),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "split"), WAYS)
def test_heads_are_rotated_and_kept(place: Place, tokens: int, split: int, heads, dtype: torch.dtype):
    force(place, split)
    case = make_heads(place, tokens, 264, (*heads, False), dtype)
    out = case.project(place)
    assert_close("linear", out, case.wanted())
    cache, slots, unwritten = case.cache, case.slots, case.unwritten
    size, num_heads, num_kv_heads = case.heads.head_size, case.heads.num_heads, case.heads.num_kv_heads
    rows = torch.arange(tokens, device=place.device) != unwritten
    held = cache.blocks.transpose(1, 3).flatten(0, 1)  # (slots, kv head, k and v, size)
    kept = out.unflatten(1, (-1, size))[:, num_heads:].unflatten(1, (2, num_kv_heads)).transpose(1, 2)
    assert torch.equal(held[slots[rows].long()], kept[rows])
    others = torch.ones(held.shape[0], dtype=torch.bool, device=place.device)
    others[slots[rows].long()] = False
    assert torch.isnan(held[others]).all()


@pytest.mark.parametrize("split", [0, 3])
def test_captured_and_replayed(place: Place, split: int):
    """A graph of products that share tiles, replayed with other inputs."""
    force(place, split)
    linear = make_linear(place, 4096, 512, torch.float16)
    x, out = place.normal(40, 4096, dtype=torch.float16), place.poison(40, 512, dtype=torch.float16)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    place.settle()
    with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side):
        place.ops.linear(x, linear, out=out)
        place.ops.linear(x, linear, residual=out, out=out)
    for _ in range(3):
        x.copy_(place.normal(40, 4096, dtype=torch.float16))
        graph.replay()
        torch.cuda.synchronize()
        assert_close("linear", out, 2 * product64(x, linear))


@pytest.mark.parametrize("tokens", [3, 60])
def test_a_norm_lets_the_product_behind_it_start_but_not_read(place: Place, tokens: int):
    """A chain whose kernels overlap gives the bits of one that is synchronised after each."""
    place.ops.gpu.choose_gemm = lambda gemm: choose(gemm, place.ops.gpu.gemm_device)
    size = 4096
    narrow = make_linear(place, size, size, torch.float16)
    wide = make_linear(place, size, 4 * size, torch.float16, bias=False)
    norm = Norm(place.normal(size, dtype=torch.float16), place.normal(size, dtype=torch.float16), 1e-5)
    x, inner = (place.normal(tokens, columns, dtype=torch.float16) for columns in (size, 4 * size))

    def chain(after_each) -> Tensor:
        hidden = x.clone()
        for _ in range(20):
            place.ops.linear(hidden, wide, norm=norm, activation="gelu_tanh", out=inner)
            after_each()
            place.ops.linear(inner[:, :size], narrow, out=hidden)
            after_each()
        return hidden

    place.settle()
    wanted = chain(torch.cuda.synchronize)
    for _ in range(5):
        assert torch.equal(chain(lambda: None), wanted)
