"""GEMMs through cuBLASLt compared with float64: number of roundings, unaligned addresses, refusals."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import Place
from tests.kernels.test_linear import make_linear, product64
from tridecode.kernels.gemm import cublas
from tridecode.kernels.gemm.plan import Plan
from tridecode.kernels.operands import Linear

#: half a unit in the last place, plus the error of the tensor cores' float32 sums of 4096 values
ROUNDED_ONCE = {torch.float16: 2**-11 * 1.8, torch.bfloat16: 2**-8 * 1.1}


def unit(wanted: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two not above each value, at least 1 / 16."""
    return torch.exp2(wanted.abs().clamp(min=2**-4).log2().floor())


def rounding(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error of `out`, in multiples of `unit`."""
    return ((out.double() - wanted).abs() / unit(wanted)).max().item()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDED_ONCE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("tokens", [65, 100, 256, 257, 1000])
def test_bias_and_residual_are_added(
    cuda_place: Place,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    in_place: bool,
    bias: bool,
    dtype: torch.dtype,
) -> None:
    """They are added before the only rounding; in place, after product and bias have been rounded."""
    linear = make_linear(cuda_place, 4096, 1024, dtype, bias)
    x, residual = cuda_place.normal(tokens, 4096, dtype=dtype), cuda_place.normal(tokens, 1024, dtype=dtype)
    product, out = product64(x, linear), residual.clone()
    wanted = product + residual.double()
    cuda_place.settle()
    monkeypatch.setattr(cuda_place.ops.gpu, "choose_gemm", lambda gemm: Plan("gemm_library", "this test"))
    cuda_place.ops.linear(x, linear, residual=out if in_place else residual, out=out)
    allowed = unit(wanted) * ROUNDED_ONCE[dtype]
    if in_place:
        allowed += unit(product) * ROUNDED_ONCE[dtype]
    assert ((out.double() - wanted).abs() <= allowed).all()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 7, 130])
def test_rows_at_odd_addresses(cuda_place: Place, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Strides and addresses that 16-byte loads cannot read."""
    held = cuda_place.normal(70, 264, dtype=torch.float16)
    x, weight = held[:, 1:257], cuda_place.normal(columns, 256, dtype=torch.float16, scale=0.06)
    linear, out = Linear(weight, None), cuda_place.poison(70, columns, dtype=torch.float16)
    wanted = product64(x, linear)
    cuda_place.settle()
    monkeypatch.setattr(cuda_place.ops.gpu, "choose_gemm", lambda gemm: Plan("gemm_library", "this test"))
    cuda_place.ops.linear(x, linear, out=out)
    assert rounding(out, wanted) <= ROUNDED_ONCE[torch.float16]


@pytest.mark.gpu
def test_an_algorithm_that_refuses_the_number_of_rows_is_asked_for_again(
    cuda_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = make_linear(cuda_place, 512, 256, torch.bfloat16)
    x = cuda_place.normal(70, 512, dtype=torch.bfloat16)
    out = cuda_place.poison(70, 256, dtype=torch.bfloat16)
    products = cuda_place.ops.gpu.library_products
    whole = products._algorithm
    refused = (cublas.ctypes.c_uint8 * 96)(*([255] * 96))

    def refuse(tokens: int, rows: int, fields: dict[str, float]) -> object:
        return refused if rows != tokens else whole(tokens, rows, fields)

    monkeypatch.setattr(products, "_algorithm", refuse)
    wanted = product64(x, linear)
    cuda_place.settle()
    monkeypatch.setattr(cuda_place.ops.gpu, "choose_gemm", lambda gemm: Plan("gemm_library", "this test"))
    cuda_place.ops.linear(x, linear, out=out)
    assert rounding(out, wanted) <= ROUNDED_ONCE[torch.bfloat16]


@pytest.mark.gpu
def test_torch_adds_up_in_float32_too(cuda_place: Place) -> None:
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_rows_of_a_choice_hold_the_tokens() -> None:
    for tokens in range(1, 3000):
        rows = cublas.rows_of_choice(tokens)
        assert tokens <= rows < tokens + (16 if tokens <= 256 else 128)


def test_without_cublaslt_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "addresses", lambda: None)
    products = cublas.LibraryProducts(None, 0)  # type: ignore[arg-type]
    assert not products.is_open and not products.run(0, 65, out=16, x=16, weight=16)


def test_a_build_of_torch_without_cuda_has_no_cublaslt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cublas.addresses() is None
    assert "cuBLASLt cannot be called" in caplog.text


@pytest.mark.parametrize(
    ("addresses", "alignment"),
    [((256, 512, 1024), 256), ((256, 48, 1024), 16), ((258, 512, 1024), 2), ((0, 0, 0), 256)],
)
def test_the_alignment_is_that_of_the_least_aligned_tensor(addresses, alignment) -> None:
    assert cublas._alignment(dict(zip(("out", "x", "weight"), addresses))) == alignment
