"""Shapes of published models, and the GEMMs of a decoder layer and of the head."""

from __future__ import annotations

from dataclasses import dataclass

from tridecode.kernels.gemm.plan import Gemm


@dataclass(frozen=True)
class ModelShape:
    """Widths of a decoder. gated: SwiGLU with an RMSNorm and without biases, as LLaMA; rotary: dims of a head
    that are rotated.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    gated: bool = False
    rotary: int = 0

    def products(self, tensor_size: int = 1) -> dict[str, Gemm]:
        """Return the GEMMs of one tensor-parallel rank, for one token.

        With several ranks the residual is added after the all-reduce. Raises ValueError if the ranks cannot
        share the heads.
        """
        if self.kv_heads % tensor_size or self.heads % tensor_size or self.inner % tensor_size:
            raise ValueError(f"{self.heads} heads and {self.kv_heads} kv heads on {tensor_size} ranks")
        queries = self.heads // tensor_size * self.head_size
        keys, inner = self.kv_heads // tensor_size * self.head_size, self.inner // tensor_size
        bias, residual = not self.gated, tensor_size == 1
        up, activation = (2 * inner, "swiglu") if self.gated else (inner, "linear")
        return {
            "qkv": Gemm(
                1,
                self.hidden,
                queries + 2 * keys,
                "qkv",
                bias,
                norm=True,
                head_size=self.head_size,
                rotary_size=self.rotary,
            ),
            "dense": Gemm(1, queries, self.hidden, bias=bias, residual=residual),
            "up": Gemm(1, self.hidden, up, activation, bias, norm=True),
            "down": Gemm(1, inner, self.hidden, bias=bias, residual=residual),
            "head": Gemm(1, self.hidden, self.vocab, norm=True, out_float32=True),
        }


def _bloom(layers: int, hidden: int, heads: int, vocab: int = 250880) -> ModelShape:
    return ModelShape(layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab)


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int) -> ModelShape:
    size = hidden // heads
    return ModelShape(layers, hidden, heads, kv_heads, size, inner, vocab, gated=True, rotary=size)


SHAPES = {
    "gpt2": _bloom(12, 768, 12, 50257),
    "gpt2-xl": _bloom(48, 1600, 25, 50257),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-1b7": _bloom(24, 2048, 16),
    "bloom-3b": _bloom(30, 2560, 32),
    "bloom-7b1": _bloom(30, 4096, 32),
    "bloom-176b": _bloom(70, 14336, 112),
    "opt-13b": _bloom(40, 5120, 40, 50272),
    "falcon-7b": ModelShape(32, 4544, 71, 1, 64, 4 * 4544, 65024, rotary=64),
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49152),
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, 49152),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, 49152),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
}
