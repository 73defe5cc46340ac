"""The benchmarks of each operation, with shapes of BLOOM-7B1 and LLaMA-3-8B, beside cuBLAS or torch."""

# ruff: noqa: B023  every closure below is called before its loop goes on

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tridecode.kernels.bench.measure import Result, microseconds, over
from tridecode.kernels.bench.shapes import SHAPES, ModelShape
from tridecode.kernels.cuda import Cuda
from tridecode.kernels.formats.kv_rounding import CACHE_DTYPES, rounded
from tridecode.kernels.formats.packed_weight import pack
from tridecode.kernels.formats.round_to_nearest import round_to_nearest
from tridecode.kernels.gemm.chain import MOST_TOKENS
from tridecode.kernels.gemm.plan import Gemm, Plan
from tridecode.kernels.gemm.table import choose_8_bit
from tridecode.kernels.operands import Batch, CacheLayer, DecoderLayer, Heads, Linear, Norm, Product, Rope
from tridecode.kernels.sampling_state import SamplingState

HALF = torch.float16


class Bench:
    """One method per operation; each yields results as it measures them."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.ops = Cuda(self.device)
        self.ops.reserve(8192, 32768, 256, 8192, 262144, context_bytes=8192 * 2 * 32 * 128 * 2)
        torch.manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(HALF)

    def ints(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self.device)

    def norm(self) -> Iterator[Result]:
        for tokens, columns in ((1, 4096), (64, 4096), (4096, 4096)):
            xs = [
                self.normal(tokens, columns) for _ in range(max(2, 2**27 // (tokens * columns * 2)) % 65 + 2)
            ]
            norm, out = Norm(self.normal(columns), self.normal(columns), 1e-5), self.normal(tokens, columns)
            mine = microseconds(over(xs, lambda x: self.ops.norm(x, norm, out=out)), len(xs))
            peer = microseconds(
                over(xs, lambda x: F.layer_norm(x, (columns,), norm.weight, norm.bias)), len(xs)
            )
            yield Result("norm", f"layer norm {tokens}x{columns}", mine, 4 * tokens * columns, peer=peer)

    def linear(self) -> Iterator[Result]:
        products = [
            product for model in ("bloom-7b1", "llama-3-8b") for product in SHAPES[model].products().values()
        ]
        shapes = dict.fromkeys((product.outputs, product.inputs) for product in products)
        for outputs, inputs in shapes:
            count = max(2, min(40, int(3e9 // (outputs * inputs * 2))))
            weights = [self.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(count)]
            norm = Norm(self.normal(inputs), self.normal(inputs), 1e-5)
            for tokens in (1, 2, 8, 16, 64):
                buffers = self.normal(tokens, max(outputs, inputs)), self.normal(tokens, max(outputs, inputs))

                def chain(product, buffers=buffers, weights=weights, inputs=inputs, outputs=outputs) -> None:
                    a, b = buffers
                    for weight in weights:
                        product(a[:, :inputs], weight, b[:, :outputs])
                        a, b = b, a

                peer = microseconds(lambda: chain(lambda x, w, y: torch.mm(x, w.t(), out=y)), count)
                for label, first in (("", None), (" with norm", norm)):
                    mine = microseconds(
                        lambda: chain(lambda x, w, y: self.ops.linear(x, Linear(w), norm=first, out=y)),
                        count,
                    )
                    case = f"{outputs}x{inputs} tokens {tokens}{label}"
                    yield Result(
                        "linear", case, mine, outputs * inputs * 2, 2.0 * outputs * inputs * tokens, peer
                    )
            weights.clear()
        yield from self._swiglu()

    def _swiglu(self) -> Iterator[Result]:
        """Gate and up of LLaMA-3-8B with SwiGLU, beside the product alone by cuBLAS."""
        outputs, inputs = 28672, 4096
        weights = [self.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(8)]
        for tokens in (8, 64, 256, 1024, 8192):
            chain = weights if tokens <= 256 else weights[:2]
            x, out = self.normal(tokens, inputs), self.normal(tokens, outputs // 2)
            both = self.normal(tokens, outputs)
            mine = microseconds(
                over(chain, lambda w: self.ops.linear(x, Linear(w), activation="swiglu", out=out)), len(chain)
            )
            peer = microseconds(over(chain, lambda w: torch.mm(x, w.t(), out=both)), len(chain))
            case, flops = f"swiglu {outputs}x{inputs} tokens {tokens}", 2.0 * outputs * inputs * tokens
            yield Result("linear", case, mine, outputs * inputs * 2, flops, peer)

    def packed_linear(self) -> Iterator[Result]:
        """Weights in 8 and 4 bit, beside 16 bit: products of LLaMA-3-8B with an RMSNorm at 1 and 2 tokens."""
        for format, group in (("int8", 0), ("int4", 128)):
            for outputs, inputs, activation in (
                (6144, 4096, None),
                (4096, 4096, None),
                (28672, 4096, "swiglu"),
                (4096, 14336, None),
            ):
                dense = [self.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(3)]
                made = [round_to_nearest(weight.float(), format, group) for weight in dense]
                packed = [self.ops.pack(Linear(weight), HALF) for weight in made]
                each = packed[0].weight.nbytes
                count = max(3, int(4e8 // each) // 3 * 3)  # more than the L2 cache holds
                packed = [self.ops.pack(Linear(weight), HALF) for _ in range(count // 3) for weight in made]
                columns = outputs // 2 if activation else outputs
                for tokens in (1, 2, 8, 16, 32, 64, 128, 256, 1024):
                    x, out = self.normal(tokens, inputs), self.normal(tokens, columns)

                    def one(linear: Linear, x: Tensor = x, out: Tensor = out) -> None:
                        self.ops.linear(x, linear, activation=activation, out=out)

                    mine = microseconds(over(packed, one), len(packed))
                    peer = microseconds(over([Linear(weight) for weight in dense], one), len(dense))
                    case = f"{format} {outputs}x{inputs} tokens {tokens}"
                    flops = 2.0 * outputs * inputs * tokens
                    yield Result("packed_linear", case, mine, each, flops, peer)
                packed.clear()
                dense.clear()

    def w8a8(self) -> Iterator[Result]:
        """The products of a layer of LLaMA-3-8B with both operands in 8 bit, the rounding of x included,
        beside the same product in 16 bit. Where matrix units bound, the share is of their 16-bit rate."""
        products = SHAPES["llama-3-8b"].products()
        for name in ("qkv", "dense", "up", "down"):
            outputs, inputs = products[name].outputs, products[name].inputs
            activation = "swiglu" if name == "up" else None
            count = max(2, int(6e8 // (outputs * inputs)))
            matrices = [self.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(count)]
            chains = {"16 bit": [Linear(matrix) for matrix in matrices]}
            for format in ("int8", "fp8"):
                rounded = [round_to_nearest(matrix, format, 0, format) for matrix in matrices]
                chains[format] = [self.ops.pack(Linear(weight), HALF) for weight in rounded]
            for tokens in (1, 8, 16, 64, 128, 256, 1024, 4096):
                x, out = self.normal(tokens, inputs), self.normal(tokens, outputs // (2 if activation else 1))
                times = {
                    label: microseconds(
                        over(chain, lambda w: self.ops.linear(x, w, activation=activation, out=out)), count
                    )
                    for label, chain in chains.items()
                }
                for format in ("int8", "fp8"):
                    case, flops = (
                        f"{format} {outputs}x{inputs} tokens {tokens}",
                        2.0 * outputs * inputs * tokens,
                    )
                    yield Result("w8a8", case, times[format], outputs * inputs, flops, times["16 bit"])

    def product_chain(self) -> Iterator[Result]:
        """Time the products after attention in a layer of LLaMA-3-8B and BLOOM-7B1, with the next layer's QKV
        projection, in one launch and one by one."""
        kinds = {
            "16 bit": ("", 0, ""),
            "int4": ("int4", 128, ""),
            "int8": ("int8", 0, ""),
            "w8a8-int8": ("int8", 0, "int8"),
        }
        for label in ("llama-3-8b", "bloom-7b1"):
            for kind in kinds:
                layers = [self._chain(SHAPES[label], *kinds[kind]) for _ in range(8)]
                each = sum(product.linear.weight.nbytes for product in layers[0](1))
                for tokens in (1, 2):
                    chains = [layer(tokens) for layer in layers]

                    def at_once(products: list[Product]) -> None:
                        assert self.ops.linears(products)

                    def one_by_one(products: list[Product]) -> None:
                        for product in products:
                            product.compute(self.ops)

                    self.ops.gemms.chain.most_tokens = MOST_TOKENS
                    mine = microseconds(over(chains, at_once), len(chains))
                    self.ops.gemms.chain.most_tokens = None
                    peer = microseconds(over(chains, one_by_one), len(chains))
                    flops = 2.0 * tokens * sum(math.prod(p.linear.weight.shape) for p in chains[0])
                    yield Result("product_chain", f"{label} {kind} tokens {tokens}", mine, each, flops, peer)

    def _chain(
        self, model: ModelShape, format: str, group: int, activations: str
    ) -> Callable[[int], list[Product]]:
        """The products of a layer, for a number of tokens."""
        shapes = model.products()

        def linear(name: str) -> Linear:
            outputs, inputs = shapes[name].outputs, shapes[name].inputs
            matrix = self.normal(outputs, inputs, scale=inputs**-0.5)
            bias = None if model.gated else self.normal(outputs, scale=0.1)
            if not format:
                return Linear(matrix, bias)
            return self.ops.pack(
                Linear(round_to_nearest(matrix.float(), format, group, activations), bias), HALF
            )

        def norm() -> Norm:
            return Norm(self.normal(model.hidden), None if model.gated else self.normal(model.hidden), 1e-5)

        dense, up, down, qkv = map(linear, ("dense", "up", "down", "qkv"))
        norms, activation = (norm(), norm()), "swiglu" if model.gated else "gelu_tanh"

        def products(tokens: int) -> list[Product]:
            attended, x = self.normal(tokens, model.hidden), self.normal(tokens, model.hidden)
            mlp = self.normal(tokens, model.inner)
            out = self.normal(tokens, qkv.weight.shape[0])
            return [
                Product(attended, dense, x, residual=x),
                Product(x, up, mlp, norm=norms[0], activation=activation),
                Product(mlp, down, x, residual=x),
                Product(x, qkv, out, norm=norms[1]),
            ]

        return products

    def two_parts(self) -> Iterator[Result]:
        """The products of a layer of LLaMA-3-8B and BLOOM-7B1, and LLaMA's head, with int8 weights, x in two
        int8 parts and its rounding included, beside the same product in 16 bit. "packed": weights expanded
        in registers; "expanded": in memory, before each product."""
        parts, few = self.ops.gpu.choose_gemm, (1, 8, 16, 64, 128, 256)

        def expands(gemm: Gemm) -> Plan:
            return Plan("expand_rows", "forced") if gemm.operand else parts(gemm)

        def never_expands(gemm: Gemm) -> Plan:
            plan = parts(gemm)
            return choose_8_bit(gemm, self.ops.gpu.gemm_device) if plan.kernel == "expand_rows" else plan

        shapes = [
            (product.outputs, product.inputs, name == "up" and model == "llama-3-8b")
            for model in ("llama-3-8b", "bloom-7b1")
            for name, product in SHAPES[model].products().items()
            if name != "head"
        ]
        for outputs, inputs, gated in dict.fromkeys([*shapes, (128256, 4096, False)]):
            activation = "swiglu" if gated else None
            count = max(2, int(4e8 // (outputs * inputs)))
            matrix = self.normal(outputs, inputs, scale=inputs**-0.5)
            weight = round_to_nearest(matrix, "int8")
            chains = {
                "16 bit": [Linear(matrix.clone()) for _ in range(count)],
                "packed": [Linear(pack(weight, HALF)) for _ in range(count)],
                "two parts": [
                    self.ops.pack(Linear(replace(weight, values=weight.values.clone())), HALF)
                    for _ in range(count)
                ],
            }
            for tokens in (*few, 512, 1024, 4096) if outputs < 128256 else few:
                x, out = self.normal(tokens, inputs), self.normal(tokens, outputs // (2 if gated else 1))
                plans = {"16 bit": parts, "two parts": never_expands}
                plans |= {"packed": parts} if tokens <= 256 else {"expanded": expands}
                times = {}
                for label, plan in plans.items():
                    self.ops.gpu.choose_gemm = plan  # type: ignore[assignment]
                    chain = chains["two parts" if label == "expanded" else label]
                    times[label] = microseconds(
                        over(chain, lambda w: self.ops.linear(x, w, activation=activation, out=out)), count
                    )
                self.ops.gpu.choose_gemm = parts
                flops = 2.0 * outputs * inputs * tokens
                for label in times.keys() - {"16 bit"}:
                    case = f"{label} {outputs}x{inputs} tokens {tokens}"
                    yield Result("two_parts", case, times[label], outputs * inputs, flops, times["16 bit"])
            chains.clear()

    def _batch(self, contexts: list[int], queries: list[int], tables: Tensor, decodes: int) -> Batch:
        starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
        tokens = starts[-1]
        return Batch(
            token_ids=self.ints([0] * tokens),
            positions=self.ints([0] * tokens),
            kv_slots=self.ints([-1] * tokens),
            block_tables=tables,
            context_lens=self.ints(contexts),
            query_starts=self.ints(starts),
            sample_tokens=self.ints([0]),
            sample_slots=self.ints([0]),
            num_decodes=decodes,
            max_query=max(queries) if decodes == 0 else 0,
            max_context=max(contexts),
            fresh_prompts=decodes == 0,
        )

    def decode_attention(self) -> Iterator[Result]:
        block = 32
        for label, heads, kv_heads, alibi in (("BLOOM", 32, 32, True), ("LLaMA", 32, 8, False)):
            shape = Heads(
                heads,
                kv_heads,
                128,
                128**-0.5,
                None,
                torch.rand(heads, device=self.device) if alibi else None,
            )
            for rows, context in (
                (1, 512),
                (1, 2048),
                (8, 512),
                (16, 512),
                (64, 512),
                (256, 512),
                (16, 2048),
                (64, 2048),
            ):
                columns = context // block + 1
                size = rows * columns * 2 * kv_heads * block * 128 * 2
                layers = max(2, min(30, int(2e9 // size)))
                tables = (
                    torch.randperm(rows * columns, device=self.device).to(torch.int32).view(rows, columns)
                )
                batch = self._batch([context] * rows, [1] * rows, tables, rows)
                qkv, out = self.normal(rows, shape.qkv_size), self.normal(rows, heads * 128)
                for name in ("", *CACHE_DTYPES):
                    blocks = (rows * columns, 2, kv_heads, block, 128)
                    caches = [self._cache(blocks, name) for _ in range(layers * (2 if name else 1))]
                    mine = microseconds(
                        over(caches, lambda c: self.ops.decode_attention(qkv, shape, batch, c, out=out)),
                        len(caches),
                    )
                    caches.clear()
                    yield Result(
                        "decode_attention",
                        f"{label} rows {rows} context {context}{name and ' ' + name}",
                        mine,
                        rows * context * kv_heads * 2 * (128 + 4 if name else 256),
                    )

    def _cache(self, shape: tuple[int, ...], name: str = "") -> CacheLayer:
        """Random keys and values, of 16 bits or in the 8-bit format `name`."""
        blocks = self.normal(*shape)
        return CacheLayer(*rounded(blocks, CACHE_DTYPES[name])) if name else CacheLayer(blocks)

    def prefill_attention(self) -> Iterator[Result]:
        for label, heads, kv_heads, size, alibi in (
            ("BLOOM-7B1", 32, 32, 128, True),
            ("LLaMA-3-8B", 32, 8, 128, False),
            ("BLOOM-560M", 16, 16, 64, True),
            ("LLaMA-3.2-1B", 32, 8, 64, False),
        ):
            slopes = torch.rand(heads, device=self.device) if alibi else None
            shape = Heads(heads, kv_heads, size, size**-0.5, None, slopes)
            cache = CacheLayer(self.normal(2, 2, kv_heads, 32, size))
            for rows, length in ((1, 512), (16, 512), (64, 512), (1, 2048), (8, 4096)):
                batch = self._batch([length] * rows, [length] * rows, self.ints([[0]] * rows), 0)
                qkv, out = (
                    self.normal(rows * length, shape.qkv_size),
                    self.normal(rows * length, heads * size),
                )
                mine = microseconds(lambda: self.ops.prefill_attention(qkv, shape, batch, cache, out=out), 1)
                flops = 4.0 * size * heads * rows * length * (length + 1) / 2
                yield Result(
                    "prefill_attention",
                    f"{label} {rows} prompts of {length}",
                    mine,
                    flops=flops,
                    peer=self._flash(qkv, shape, rows, length),
                )
            if size == 128:
                yield from self._continued(label, shape)

    def _continued(self, label: str, shape: Heads) -> Iterator[Result]:
        """Chunks of 512 tokens of prompts that have 1536 tokens in the cache, of 16 and of 8 bits."""
        rows, length, before, block = 4, 512, 1536, 32
        columns = (length + before) // block
        tables = torch.randperm(rows * columns, device=self.device).to(torch.int32).view(rows, columns)
        batch = self._batch([length + before] * rows, [length] * rows, tables, 0)
        batch.fresh_prompts = False
        heads = shape.num_heads
        qkv, out = self.normal(rows * length, shape.qkv_size), self.normal(rows * length, heads * 128)
        for name in ("", *CACHE_DTYPES):
            cache = self._cache((rows * columns, 2, shape.num_kv_heads, block, 128), name)
            mine = microseconds(lambda: self.ops.prefill_attention(qkv, shape, batch, cache, out=out), 1)
            yield Result(
                "prefill_attention",
                f"{label} {rows} chunks of {length} after {before}{name and ' ' + name}",
                mine,
                flops=4.0 * 128 * heads * rows * length * (before + (length + 1) / 2),
            )

    def _flash(self, qkv: Tensor, shape: Heads, rows: int, length: int) -> float | None:
        """torch's attention over the same ragged prompts, without ALiBi, which it does not support."""
        from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and newer

        size = shape.head_size
        sizes = [shape.num_heads * size, shape.num_kv_heads * size, shape.num_kv_heads * size]
        q, k, v = (part.unflatten(1, (-1, size)) for part in qkv.split(sizes, dim=1))
        starts = self.ints([row * length for row in range(rows + 1)])
        return microseconds(
            lambda: varlen_attn(q, k, v, starts, starts, length, length, window_size=(-1, 0)), 1
        )

    def sample(self) -> Iterator[Result]:
        vocab = 250880
        kinds: dict[str, dict[str, float]] = {
            "greedy": {"top_k": 1},
            "greedy, log-probs": {"top_k": 1, "return_log_probs": 1},
            "whole vocabulary": {},
            "top-k 50": {"top_k": 50},
            "top-k 50, top-p 0.9": {"top_k": 50, "top_p_now": 0.9},
            "top-p 0.9": {"top_p_now": 0.9},
            "greedy, penalties": {"top_k": 1, "presence_penalty": 1.0},
        }
        for rows in (1, 8, 64, 256):
            slots = self.ints(range(rows))
            tokens, log_probs = slots.clone(), torch.zeros(rows, device=self.device)
            # as a language model's logits: a few are far above the rest
            logits = [
                torch.randn(rows, vocab, device=self.device) * 2 for _ in range(max(2, min(40, 128 // rows)))
            ]
            for each in logits:
                each.scatter_add_(
                    1,
                    torch.randint(0, vocab, (rows, 64), device=self.device),
                    torch.rand(rows, 64, device=self.device) * 18,
                )
            peer = microseconds(over(logits, lambda each: each.argmax(-1)), len(logits))
            for name, columns in kinds.items():
                state = self._state(rows, vocab, **columns)
                mine = microseconds(
                    over(
                        logits,
                        lambda each: self.ops.sample(each, slots, state, tokens=tokens, log_probs=log_probs),
                    ),
                    len(logits),
                )
                yield Result(
                    "sample",
                    f"{rows} rows of {vocab}, {name}",
                    mine,
                    4 * rows * vocab,
                    peer=peer if columns == {"top_k": 1} else None,
                )

    def _state(self, slots: int, vocab: int, **columns: float) -> SamplingState:
        state = SamplingState.allocate(slots, 8, vocab, 8, self.device)
        for name, value in columns.items():
            state.column(name).fill_(value)
        return state

    def step(self) -> Iterator[Result]:
        """A whole decoding step with random weights, sampling included, as the engine's graphs replay it."""
        for label in ("BLOOM-7B1", "LLaMA-3-8B"):
            yield from self._steps(label, SHAPES[label.lower()])

    def _steps(self, label: str, model: ModelShape) -> Iterator[Result]:
        hidden, heads, kv_heads, inner = model.hidden, model.heads, model.kv_heads, model.inner
        num_layers, vocab, gated, block, context = model.layers, model.vocab, model.gated, 32, 544
        shape = Heads(
            heads, kv_heads, 128, 128**-0.5, None, None if gated else torch.rand(heads, device=self.device)
        )
        if gated:
            angles = torch.rand(1024, 64, device=self.device)
            shape = Heads(heads, kv_heads, 128, 128**-0.5, Rope(angles.cos(), angles.sin()))

        def linear(outputs: int, inputs: int) -> Linear:
            return Linear(
                self.normal(outputs, inputs, scale=0.01), None if gated else self.normal(outputs, scale=0.1)
            )

        def norm() -> Norm:
            return Norm(self.normal(hidden), None if gated else self.normal(hidden), 1e-5)

        layers = [
            DecoderLayer(
                attention_norm=norm(),
                qkv=linear(shape.qkv_size, hidden),
                dense=linear(hidden, hidden),
                mlp_norm=norm(),
                up=linear(inner * (1 + gated), hidden),
                down=linear(hidden, inner),
            )
            for _ in range(num_layers)
        ]
        head, last_norm = Linear(self.normal(vocab, hidden, scale=0.01)), norm()
        parts = [part for layer in layers for part in (layer.qkv, layer.dense, layer.up, layer.down)]
        layer_bytes = 2 * sum(part.dense.numel() for part in parts)
        activation = "swiglu" if gated else "gelu_tanh"
        for rows in (1, 2, 4, 8, 32, 64, 128, 256):
            columns = context // block + 1
            caches = [CacheLayer(self.normal(rows * columns, 2, kv_heads, block, 128)) for _ in layers]
            tables = torch.randperm(rows * columns, device=self.device).to(torch.int32).view(rows, columns)
            batch = self._batch([context] * rows, [1] * rows, tables, rows)
            batch.kv_slots.copy_(tables[:, (context - 1) // block] * block + (context - 1) % block)
            x, qkv, attended = (
                self.normal(rows, hidden),
                self.normal(rows, shape.qkv_size),
                self.normal(rows, heads * 128),
            )
            mlp, logits = self.normal(rows, inner), torch.zeros(rows, vocab, device=self.device)
            state, slots = self._state(rows, vocab, top_k=1), self.ints(range(rows))
            tokens, log_probs = slots.clone(), torch.zeros(rows, device=self.device)

            def one_by_one() -> None:
                for layer, cache in zip(layers, caches):
                    self.ops.project_qkv(x, layer.qkv, layer.attention_norm, shape, batch, cache, out=qkv)
                    self.ops.decode_attention(qkv, shape, batch, cache, out=attended)
                    self.ops.linear(attended, layer.dense, residual=x, out=x)
                    self.ops.linear(x, layer.up, norm=layer.mlp_norm, activation=activation, out=mlp)
                    self.ops.linear(mlp, layer.down, residual=x, out=x)

            def step() -> None:
                one_by_one()
                self.ops.linear(x, head, norm=last_norm, out=logits)
                self.ops.sample(logits, slots, state, tokens=tokens, log_probs=log_probs)

            case = f"{label} rows {rows} context {context}"
            moved = layer_bytes + num_layers * rows * context * kv_heads * 512
            moved += 2 * vocab * hidden
            yield Result(
                "step", case, microseconds(step, 1), moved, (layer_bytes + 2.0 * vocab * hidden) * rows
            )
            caches.clear()
