"""The operations on an NVIDIA GPU: check, then launch. Contracts are in ops.py, the kernels in csrc/.

Products of few tokens, attention, norms and sampling are kernels of ours; larger products are cuBLAS's,
through torch, save SwiGLU on Hopper. Weights, norms, biases and rope tables are constants: kernels read them
ahead of the kernels before them, so whoever changes one in place synchronises the device before the next
operation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from tridecode.kernels.checks import DtypeError, LayoutError, ShapeError, indices, match, same_dtype
from tridecode.kernels.library import KernelError, Library, current_stream
from tridecode.kernels.ops import (
    NUM_FLOATS,
    NUM_INTS,
    Batch,
    CacheLayer,
    DecoderLayer,
    Heads,
    Linear,
    Norm,
    SamplingState,
)

#: above this many tokens a product is always cuBLAS's
SMALL_TOKENS = 16
#: up to this many decoding rows all layers are one launch, and with SwiGLU, whose products are wider
LAYER_TOKENS, GATED_LAYER_TOKENS = 4, 2
#: the most that this launch takes
MAX_LAYER_TOKENS = 8
#: stages of weights that it has on their way at once on a multiprocessor
LAYERS_IN_FLIGHT = 3
#: from 3 to this many tokens a product is csrc/linear_many_sm90a.cu's, where it takes it
MANY_TOKENS = 64
#: up to this many tokens a small product normalises its input itself: more would take every block longer
#: than a kernel
FUSED_NORM_TOKENS = 2
_ACTIVATIONS = {None: 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "swiglu": 4}
_PLAIN, _GATED, _QKV = 0, 1, 2
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: partial sums of small products, and the widest of them in tiles of 16 rows
_SUM_BYTES = 64 << 20
_NUM_COUNTERS = 1 << 17


class Cuda:
    """Every operation of kernels.ops.Ops. Used by one thread, for tensors of `device`.

    dependent_launch: let a kernel start before its predecessor ends (programmatic dependent launch, compute
    capability 9.0). None: on, unless TRIDECODE_DEPENDENT_LAUNCH=0. many: when csrc/linear_many_sm90a.cu
    computes a product that it can: "where faster", "always" or "never".
    """

    def __init__(
        self,
        device: torch.device,
        dependent_launch: bool | None = None,
        small_tokens: int = SMALL_TOKENS,
        layer_tokens: int | None = None,
        layers_in_flight: int = LAYERS_IN_FLIGHT,
        many: str = "where faster",
    ):
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        if dependent_launch is None:
            dependent_launch = os.environ.get("TRIDECODE_DEPENDENT_LAUNCH", "1") != "0"
        self.library = Library()
        torch.zeros(1, device=self.device)  # torch's context before ours
        properties = torch.zeros(3, dtype=torch.int32)
        self.library.initialize(self.device.index, int(dependent_launch), properties.data_ptr())
        self.multiprocessors, self.capability, self.shared_bytes = properties.tolist()
        self.small_tokens, self.layer_tokens = small_tokens, layer_tokens
        self.layers_in_flight, self.many = layers_in_flight, many
        self._layer_tables: dict[tuple[object, ...], Tensor] = {}
        self._layer_counters = torch.zeros(1 << 12, dtype=torch.int32, device=self.device)
        self._sums = self._bytes(_SUM_BYTES)
        self._counters = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=self.device)
        self._attention = self._bytes(self.library.decode_attention_scratch(256))
        self._sample: Tensor | None = None
        self._arenas: dict[str, Tensor] = {}

    def reserve(
        self, max_tokens: int, max_columns: int, max_rows: int, max_context: int, vocab_size: int
    ) -> None:
        self._arena("product", 2 * max_tokens * max_columns)
        self._arena("normed", 2 * max_tokens * max_columns // 2)
        self._sample = self._bytes(self.library.sample_scratch(max_rows, vocab_size))

    def pack(self, linear: Linear) -> Linear:
        """Rows of the weight contiguous, as both cuBLAS and the kernels read them."""
        return Linear(linear.weight.contiguous(), linear.bias)

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def _arena(self, name: str, size: int) -> Tensor:
        """A buffer of at least `size` bytes; it grows outside of graph capture only."""
        held = self._arenas.get(name)
        if held is None or held.numel() < size:
            if torch.cuda.is_current_stream_capturing():
                raise KernelError(
                    f"the {name} buffer needs {size:,} bytes within a capture; call reserve first"
                )
            held = self._arenas[name] = self._bytes(size)
        return held

    def _temporary(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        size = rows * columns * dtype.itemsize
        return self._arena(name, size)[:size].view(dtype).view(rows, columns)

    def resolve_tokens(self, token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> None:
        indices("resolve_tokens", ("token_ids", token_ids), ("slots", slots), ("last_tokens", last_tokens))
        if slots.shape[0] > token_ids.shape[0]:
            raise ShapeError(f"resolve_tokens: {slots.shape[0]} slots, but {token_ids.shape[0]} tokens")
        self.library.resolve_tokens(
            token_ids.data_ptr(),
            slots.data_ptr(),
            last_tokens.data_ptr(),
            slots.shape[0],
            current_stream(self.device),
        )

    def embed(
        self,
        token_ids: Tensor,
        table: Tensor,
        *,
        positions: Tensor | None = None,
        position_table: Tensor | None = None,
        out: Tensor,
    ) -> None:
        sizes = match("embed", ("VC", "table", table), ("TC", "out", out), ("T", "token_ids", token_ids))
        indices("embed", ("token_ids", token_ids))
        dtype = same_dtype("embed", ("table", table), ("out", out))
        _contiguous("embed", ("table", table), ("out", out))
        if position_table is not None and positions is not None:
            match(
                "embed",
                ("TC", "out", out),
                ("PC", "position_table", position_table),
                ("T", "positions", positions),
            )
            indices("embed", ("positions", positions))
            same_dtype("embed", ("table", table), ("position_table", position_table))
            _contiguous("embed", ("position_table", position_table))
        else:
            positions = position_table = None
        self.library.embed(
            out.data_ptr(),
            token_ids.data_ptr(),
            table.data_ptr(),
            _pointer(positions),
            _pointer(position_table),
            sizes["T"],
            sizes["C"],
            _DTYPES[dtype],
            current_stream(self.device),
        )

    def norm(self, x: Tensor, norm: Norm, *, out: Tensor) -> None:
        sizes = match("norm", ("TC", "x", x), ("C", "weight", norm.weight), ("TC", "out", out))
        dtype = same_dtype("norm", ("x", x), ("weight", norm.weight), ("out", out))
        if norm.bias is not None:
            match("norm", ("TC", "x", x), ("C", "bias", norm.bias))
            same_dtype("norm", ("x", x), ("bias", norm.bias))
        self.library.norm(
            out.data_ptr(),
            x.data_ptr(),
            norm.weight.data_ptr(),
            _pointer(norm.bias),
            norm.eps,
            sizes["T"],
            sizes["C"],
            x.stride(0),
            out.stride(0),
            _DTYPES[dtype],
            current_stream(self.device),
        )

    def linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> None:
        gated = activation == "swiglu"
        _check_linear("linear", x, linear, residual, out, gated)
        if x.shape[0] == 0:
            return
        if self._is_many(x, linear, activation, residual, out):
            self._many_linear(x, linear, norm, activation, residual, out)
        elif self._is_small(x, linear):
            self._small_linear(x, linear, norm, _GATED if gated else _PLAIN, activation, residual, out)
        else:
            self._library_linear(x, linear, norm, activation, residual, out)

    def project_qkv(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        heads: Heads,
        batch: Batch,
        cache: CacheLayer,
        *,
        out: Tensor,
    ) -> None:
        _check_linear("project_qkv", x, linear, None, out, False)
        if out.shape[1] != heads.qkv_size:
            raise ShapeError(f"project_qkv: out has {out.shape[1]} columns; the heads need {heads.qkv_size}")
        _check_cache("project_qkv", heads, cache, out)
        indices("project_qkv", ("kv_slots", batch.kv_slots), ("positions", batch.positions))
        rope = heads.rope
        rotation = (
            0 if rope is None else rope.cos.data_ptr(),
            0 if rope is None else rope.sin.data_ptr(),
            batch.positions.data_ptr(),
            batch.kv_slots.data_ptr(),
            cache.blocks.data_ptr(),
        )
        shape = (
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            0 if rope is None else rope.size,
            int(rope is not None and rope.interleaved),
            cache.block_tokens,
        )
        if x.shape[0] == 0:
            return
        fused = _fuses_heads(heads)
        if self._is_many(x, linear, None, None, out, qkv=True, fused=fused):
            rest = (*rotation, *shape[:3], shape[5]) if fused else ()
            self._many_linear(x, linear, norm, None, None, out, *rest)
            if fused:
                return
        elif self._is_small(x, linear, rope is not None):
            self._small_linear(x, linear, norm, _QKV, None, None, out, rotation, shape)
            return
        else:
            self._library_linear(x, linear, norm, None, None, out)
        cos, sin, positions, kv_slots, blocks = rotation
        self.library.rotate_and_cache(
            out.data_ptr(),
            cos,
            sin,
            positions,
            kv_slots,
            blocks,
            x.shape[0],
            *shape,
            out.stride(0),
            _DTYPES[out.dtype],
            current_stream(self.device),
        )

    def _is_small(self, x: Tensor, linear: Linear, rotated: bool = False) -> bool:
        """Whether csrc/linear.cu takes the product: 16-bit, every row at a multiple of 16 bytes, and few
        tokens.

        By what measured faster on an H200, all that is fused counted in. One or two tokens are ours, save
        long sums
        without a bias; up to small_tokens are matrices that cuBLAS does not spread over the chip, and the
        widest.
        """
        weight = linear.weight
        tokens, inputs, outputs = x.shape[0], x.shape[1], weight.shape[0]
        aligned = (inputs | x.stride(0) | weight.stride(0)) % 8 == 0 and (
            x.data_ptr() | weight.data_ptr()
        ) % 16 == 0
        if not aligned or x.dtype == torch.float32 or tokens > self.small_tokens:
            return False
        if tokens <= FUSED_NORM_TOKENS:
            return linear.bias is not None or not outputs <= 8192 < inputs
        return self.capability == 90 and not rotated and (outputs > 20480 or outputs * inputs <= 1 << 24)

    def _is_many(
        self,
        x: Tensor,
        linear: Linear,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        qkv: bool = False,
        fused: bool = False,
    ) -> bool:
        """Whether csrc/linear_many_sm90a.cu computes the product: on Hopper, in 16 bit, everything that it
        copies in boxes at multiples of 16 bytes."""
        if self.capability != 90 or self.many == "never" or x.dtype == torch.float32:
            return False
        outputs, inputs = linear.weight.shape
        gated = activation == "swiglu"
        if self.many != "always" and not gains_by_many(
            x.shape[0], inputs, outputs, gated=gated, qkv=qkv, fused=fused
        ):
            return False
        if out.dtype != x.dtype and (gated or residual is not None):
            return False
        if gated and (residual is not None or outputs % 16):
            return False
        boxes = [x, linear.weight, *([] if residual is None else [residual])]
        boxes += [out] if out.dtype == x.dtype else []
        return not any(box.stride(0) % 8 or box.data_ptr() % 16 for box in boxes)

    def _many_linear(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        *heads: int,
    ) -> None:
        """heads: none, or cos, sin, positions, kv_slots, cache, heads, kv_heads, head_size, block_tokens."""
        if norm is not None:
            x = self._normed(x, norm)
        self.library.linear_many(
            out.data_ptr(),
            x.data_ptr(),
            linear.weight.data_ptr(),
            _pointer(linear.bias),
            _pointer(residual),
            *x.shape,
            linear.weight.shape[0],
            x.stride(0),
            linear.weight.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            _ACTIVATIONS[activation],
            int(out.dtype == torch.float32),
            *(heads or (0,) * 9),
            self._sums.data_ptr(),
            _SUM_BYTES,
            self._counters.data_ptr(),
            _NUM_COUNTERS,
            _DTYPES[x.dtype],
            current_stream(self.device),
        )

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        normed = self._temporary("normed", x.shape[0], x.shape[1], x.dtype)
        self.norm(x, norm, out=normed)
        return normed

    def _small_linear(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        mode: int,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        rotation: tuple[int, ...] = (0, 0, 0, 0, 0),
        shape: tuple[int, ...] = (0, 0, 1, 0, 0, 1),
    ) -> None:
        tokens, inputs = x.shape
        if norm is not None and (tokens > FUSED_NORM_TOKENS or not self._fits(tokens, inputs)):
            x, norm = self._normed(x, norm), None
        weight, bias = linear.weight, linear.bias
        self.library.linear(
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            _pointer(bias),
            0 if norm is None else norm.weight.data_ptr(),
            0 if norm is None else _pointer(norm.bias),
            0.0 if norm is None else norm.eps,
            _pointer(residual),
            tokens,
            inputs,
            weight.shape[0],
            x.stride(0),
            weight.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            mode,
            _ACTIVATIONS[activation],
            int(out.dtype == torch.float32),
            *rotation,
            *shape,
            self._sums.data_ptr(),
            _SUM_BYTES,
            self._counters.data_ptr(),
            _NUM_COUNTERS,
            _DTYPES[x.dtype],
            current_stream(self.device),
        )

    def _fits(self, tokens: int, inputs: int) -> bool:
        """Whether the whole input of a small product, padded as csrc/linear.cu pads it, fits in shared
        memory."""
        sums = 16 * 16 * 8 * 4 * 2 * (1 if tokens <= 8 else 2)
        return -(-inputs // 4096) * 4096 * 2 * tokens + sums + 3072 <= self.shared_bytes

    def _library_linear(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        """The product by cuBLAS; what its epilogues cannot do follows in one kernel."""
        tokens, columns = x.shape[0], linear.weight.shape[0]
        if norm is not None:
            x = self._normed(x, norm)
        weight, bias = linear.weight.t(), linear.bias
        if out.dtype == x.dtype and residual is None and activation in (None, "gelu_tanh", "relu"):
            if bias is None and activation is None:
                torch.mm(x, weight, out=out)
                return
            if bias is not None and activation is None:
                torch.addmm(bias, x, weight, out=out)
                return
            if bias is not None and x.dtype != torch.float32:
                torch._addmm_activation(bias, x, weight, use_gelu=activation == "gelu_tanh", out=out)
                return
        if out.dtype == x.dtype and residual is not None and activation is None:
            torch.addmm(residual, x, weight, out=out)
            if bias is not None:
                self._finish(out, bias, None, None, out, x.dtype)
            return
        if out.dtype == x.dtype and activation != "swiglu":
            product = out if residual is None else self._temporary("product", tokens, columns, x.dtype)
            torch.mm(x, weight, out=product)
        elif out.dtype == x.dtype:
            product = self._temporary("product", tokens, columns, x.dtype)
            torch.mm(x, weight, out=product)
        else:
            product = (
                out if activation != "swiglu" else self._temporary("product", tokens, columns, out.dtype)
            )
            torch.mm(x, weight, out_dtype=out.dtype, out=product)
        if product is not out or bias is not None or activation is not None or residual is not None:
            self._finish(product, bias, activation, residual, out, x.dtype)

    def _finish(
        self,
        product: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.library.finish_linear(
            out.data_ptr(),
            product.data_ptr(),
            _pointer(bias),
            _pointer(residual),
            out.shape[0],
            out.shape[1],
            out.stride(0),
            product.stride(0),
            0 if residual is None else residual.stride(0),
            _ACTIVATIONS[activation],
            int(product.dtype == torch.float32),
            int(out.dtype == torch.float32),
            _DTYPES[dtype],
            current_stream(self.device),
        )

    def decode_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        rows = batch.num_decodes
        _check_attention("decode_attention", qkv, heads, batch, cache, out, rows)
        if rows == 0:
            return
        self.library.decode_attention(
            out.data_ptr(),
            qkv.data_ptr(),
            cache.blocks.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.context_lens.data_ptr(),
            _pointer(heads.slopes),
            heads.scale,
            rows,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            cache.block_tokens,
            qkv.stride(0),
            out.stride(0),
            batch.block_tables.stride(0),
            self._attention.data_ptr(),
            self._counters.data_ptr(),
            _NUM_COUNTERS,
            _DTYPES[qkv.dtype],
            current_stream(self.device),
        )

    def prefill_attention(
        self, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, *, out: Tensor
    ) -> None:
        tokens = batch.num_tokens - batch.num_decodes
        _check_attention("prefill_attention", qkv, heads, batch, cache, out, tokens)
        if tokens == 0:
            return
        self.library.prefill_attention(
            out.data_ptr(),
            qkv.data_ptr(),
            cache.blocks.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.query_starts.data_ptr(),
            _pointer(heads.slopes),
            heads.scale,
            batch.num_decodes,
            batch.num_rows,
            batch.max_query,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            cache.block_tokens,
            qkv.stride(0),
            out.stride(0),
            batch.block_tables.stride(0),
            _DTYPES[qkv.dtype],
            current_stream(self.device),
        )

    def decoder_layers(
        self,
        x: Tensor,
        layers: Sequence[DecoderLayer],
        heads: Heads,
        activation: str,
        batch: Batch,
        caches: Sequence[CacheLayer],
    ) -> bool:
        if not self._runs_layers(x, layers, heads, activation, batch):
            return False
        first = layers[0]
        hidden, inner = x.shape[1], first.down.weight.shape[1]
        columns = heads.num_heads * heads.head_size
        table = self._layer_table(layers, heads, caches)
        rope = heads.rope
        self.library.decoder_layers(
            table.data_ptr(),
            len(layers),
            x.data_ptr(),
            self._temporary("queries", MAX_LAYER_TOKENS, columns, x.dtype).data_ptr(),
            self._temporary("context", MAX_LAYER_TOKENS, columns, x.dtype).data_ptr(),
            self._temporary("inner", MAX_LAYER_TOKENS, inner, x.dtype).data_ptr(),
            batch.positions.data_ptr(),
            batch.kv_slots.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.block_tables.stride(0),
            0 if rope is None else rope.cos.data_ptr(),
            0 if rope is None else rope.sin.data_ptr(),
            _pointer(heads.slopes),
            heads.scale,
            first.attention_norm.eps,
            x.shape[0],
            hidden,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            inner,
            0 if rope is None else rope.size,
            _ACTIVATIONS[activation],
            caches[0].block_tokens,
            self._sums.data_ptr(),
            _SUM_BYTES,
            self._layer_counters.data_ptr(),
            self._layer_counters.numel(),
            self.layers_in_flight,
            _DTYPES[x.dtype],
            current_stream(self.device),
        )
        return True

    def _runs_layers(
        self, x: Tensor, layers: Sequence[DecoderLayer], heads: Heads, activation: str, batch: Batch
    ) -> bool:
        """Whether csrc/decoder_layers_sm90a.cu takes the step: few decoding rows, on Hopper, in 16 bit."""
        tokens = x.shape[0]
        if self.capability != 90 or x.dtype == torch.float32 or tokens != batch.num_decodes:
            return False
        usual = GATED_LAYER_TOKENS if activation == "swiglu" else LAYER_TOKENS
        if not 1 <= tokens <= (usual if self.layer_tokens is None else self.layer_tokens) or not layers:
            return False
        rope = heads.rope
        if heads.head_size not in (64, 128):
            return False
        if rope is not None and (rope.interleaved or rope.size != heads.head_size):
            return False
        inner = layers[0].down.weight.shape[1]
        return (x.shape[1] | heads.num_heads * heads.head_size | inner) % 64 == 0 and x.is_contiguous()

    def _layer_table(
        self, layers: Sequence[DecoderLayer], heads: Heads, caches: Sequence[CacheLayer]
    ) -> Tensor:
        """Where csrc/decoder_layers_sm90a.cu finds the tensors of these layers, made once for the same
        addresses, outside of graph capture."""
        addresses, first = [], layers[0]
        for layer, cache in zip(layers, caches):
            products = (layer.qkv, layer.dense, layer.up, layer.down)
            for norm in (layer.attention_norm, layer.mlp_norm):
                addresses += [norm.weight.data_ptr(), _pointer(norm.bias)]
            addresses += [product.weight.data_ptr() for product in products]
            addresses += [_pointer(product.bias) for product in products]
            addresses.append(cache.blocks.data_ptr())
        weight = first.qkv.weight
        inner, up_rows = first.down.weight.shape[1], first.up.weight.shape[0]
        shape = (weight.shape[1], heads.num_heads * heads.head_size, heads.qkv_size, inner, up_rows)
        key = (*addresses, *shape, weight.dtype)
        held = self._layer_tables.get(key)
        if held is None:
            tensors = torch.tensor(addresses, dtype=torch.int64)
            table = torch.zeros(self.library.decoder_table_bytes(len(layers)), dtype=torch.uint8)
            dtype = _DTYPES[weight.dtype]
            self.library.decoder_table(table.data_ptr(), tensors.data_ptr(), len(layers), *shape, dtype)
            held = self._layer_tables[key] = table.to(self.device)
        return held

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        match("gather_rows", ("TC", "x", x), ("RC", "out", out), ("R", "rows", rows))
        indices("gather_rows", ("rows", rows))
        same_dtype("gather_rows", ("x", x), ("out", out))
        size = x.element_size()
        self.library.gather_rows(
            out.data_ptr(),
            x.data_ptr(),
            rows.data_ptr(),
            out.shape[0],
            out.shape[1] * size,
            x.stride(0) * size,
            out.stride(0) * size,
            current_stream(self.device),
        )

    def sample(
        self, logits: Tensor, slots: Tensor, state: SamplingState, *, tokens: Tensor, log_probs: Tensor
    ) -> None:
        sizes = match(
            "sample",
            ("RV", "logits", logits),
            ("R", "slots", slots),
            ("R", "tokens", tokens),
            ("R", "log_probs", log_probs),
        )
        indices("sample", ("slots", slots), ("tokens", tokens))
        if logits.dtype != torch.float32 or log_probs.dtype != torch.float32:
            raise DtypeError(
                f"sample: logits are {logits.dtype}, log_probs {log_probs.dtype}; wanted float32"
            )
        if state.ints.shape[1] != NUM_INTS or state.floats.shape[1] != NUM_FLOATS:
            raise ShapeError(
                f"sample: ints has {state.ints.shape[1]} columns, floats {state.floats.shape[1]}"
            )
        needed = self.library.sample_scratch(sizes["R"], sizes["V"])
        if self._sample is None or self._sample.numel() < needed:
            raise KernelError(
                f"sample: {sizes['R']} rows of {sizes['V']} logits need {needed:,} bytes; call reserve first"
            )
        self.library.sample(
            logits.data_ptr(),
            slots.data_ptr(),
            state.ints.data_ptr(),
            state.floats.data_ptr(),
            state.top_p.data_ptr(),
            state.generated.data_ptr(),
            state.last_tokens.data_ptr(),
            state.history.data_ptr(),
            state.history_lens.data_ptr(),
            state.counts.data_ptr(),
            state.bad_ids.data_ptr(),
            state.bad_ends.data_ptr(),
            tokens.data_ptr(),
            log_probs.data_ptr(),
            sizes["R"],
            sizes["V"],
            state.history.shape[1],
            state.bad_ids.shape[1],
            logits.stride(0),
            self._sample.data_ptr(),
            self._counters.data_ptr(),
            current_stream(self.device),
        )


def _fuses_heads(heads: Heads) -> bool:
    """Whether csrc/linear_many_sm90a.cu rotates such heads and writes them to the cache itself."""
    if heads.rope is None:
        return heads.head_size % 8 == 0
    whole = heads.rope.size == heads.head_size and not heads.rope.interleaved
    return whole and heads.head_size in (64, 128, 256)


def gains_by_many(tokens: int, inputs: int, outputs: int, *, gated: bool, qkv: bool, fused: bool) -> bool:
    """Where csrc/linear_many_sm90a.cu measured faster on an H200 than the other products, with all that each
    leaves to kernels after it. fused: heads are rotated and kept at once.

    Long prompts are bound by power, where cuBLAS does as much with less; SwiGLU saves a pass there.
    """
    if tokens <= 2 or outputs * inputs < 1 << 24:
        return False
    if tokens <= MANY_TOKENS:
        return fused or not qkv
    return gated and not 256 < tokens < 1024


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _contiguous(operation: str, *tensors: tuple[str, Tensor]) -> None:
    for name, tensor in tensors:
        if not tensor.is_contiguous():
            raise LayoutError(f"{operation}: {name} is not contiguous (strides {tensor.stride()})")


def _check_linear(
    operation: str, x: Tensor, linear: Linear, residual: Tensor | None, out: Tensor, gated: bool
) -> None:
    sizes = match(operation, ("TI", "x", x), ("WI", "weight", linear.weight), ("TO", "out", out))
    dtype = same_dtype(operation, ("x", x), ("weight", linear.weight))
    wanted = sizes["W"] // 2 if gated else sizes["W"]
    if sizes["O"] != wanted:
        raise ShapeError(f"{operation}: out has {sizes['O']} columns; {sizes['W']} weight rows give {wanted}")
    if out.dtype not in (dtype, torch.float32):
        raise DtypeError(f"{operation}: out is {out.dtype}; wanted {dtype} or float32")
    if linear.bias is not None:
        match(operation, ("WI", "weight", linear.weight), ("W", "bias", linear.bias))
        same_dtype(operation, ("x", x), ("bias", linear.bias))
    if residual is not None:
        match(operation, ("TO", "out", out), ("TO", "residual", residual))
        same_dtype(operation, ("x", x), ("residual", residual))
    if x.data_ptr() == out.data_ptr():
        raise LayoutError(f"{operation}: out may not be x")


def _check_cache(operation: str, heads: Heads, cache: CacheLayer, like: Tensor) -> None:
    sizes = match(operation, ("NTKPD", "cache.blocks", cache.blocks))
    if (sizes["T"], sizes["K"], sizes["D"]) != (2, heads.num_kv_heads, heads.head_size):
        raise ShapeError(
            f"{operation}: cache.blocks is {tuple(cache.blocks.shape)}; "
            f"wanted (N, 2, {heads.num_kv_heads}, P, {heads.head_size})"
        )
    same_dtype(operation, ("activations", like), ("cache.blocks", cache.blocks))
    _contiguous(operation, ("cache.blocks", cache.blocks))


def _check_attention(
    operation: str, qkv: Tensor, heads: Heads, batch: Batch, cache: CacheLayer, out: Tensor, tokens: int
) -> None:
    if qkv.shape != (tokens, heads.qkv_size):
        raise ShapeError(f"{operation}: qkv is {tuple(qkv.shape)}; wanted ({tokens}, {heads.qkv_size})")
    if out.shape != (tokens, heads.num_heads * heads.head_size):
        raise ShapeError(
            f"{operation}: out is {tuple(out.shape)}; wanted ({tokens}, {heads.num_heads * heads.head_size})"
        )
    match(operation, ("TQ", "qkv", qkv), ("TO", "out", out), ("BM", "block_tables", batch.block_tables))
    same_dtype(operation, ("qkv", qkv), ("out", out))
    indices(
        operation,
        ("block_tables", batch.block_tables),
        ("context_lens", batch.context_lens),
        ("query_starts", batch.query_starts),
    )
    _check_cache(operation, heads, cache, qkv)
