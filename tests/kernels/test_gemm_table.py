"""The choice of GEMM kernels, replayed for published models: every plan has an instance in csrc, and every
instance is chosen. No GPU needed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tridecode.kernels.bench.shapes import SHAPES, ModelShape
from tridecode.kernels.build import source, sources
from tridecode.kernels.explain import DEVICES, lines
from tridecode.kernels.gemm.chain_table import chain_tokens
from tridecode.kernels.gemm.plan import ADAPTED_TOKENS, KEPT_TOKENS, SENT_TOKENS, Device, Gemm, Plan
from tridecode.kernels.gemm.table import choose
from tridecode.kernels.gemm.table_sm90 import library_rows
from tridecode.tools.bench.shapes.presets import PRESETS

H200 = DEVICES["h200"]
#: of weights in 8 and 4 bit; packed_table.py chooses them (test_packed_weight.py)
PACKED = {
    *("gemm_packed_mma", "gemm_packed_sm90", "gemm_packed_wide_sm90", "gemm_packed_even_split_sm90"),
    *("gemm_int4_sm90", "gemm_int4_stream_k_sm90"),
}
TENSOR_SIZES = range(1, 9)
TOKENS = range(1, 301)


def replay(devices: list[Device]) -> Iterator[tuple[Gemm, Plan]]:
    for shape in SHAPES.values():
        for tensor_size in TENSOR_SIZES:
            try:
                products = shape.products(tensor_size)
            except ValueError:
                continue
            for product in products.values():
                for tokens in TOKENS:
                    gemm = product._replace(tokens=tokens)
                    for device in devices:
                        yield gemm, choose(gemm, device)
                        for operand in operands(device):
                            in_8_bit = as_8_bit(gemm, operand)
                            if device.capability != 90 and gemm.epilogue == "qkv":
                                in_8_bit = in_8_bit._replace(epilogue="linear")
                            yield in_8_bit, choose(in_8_bit, device)


def operands(device: Device) -> tuple[str, ...]:
    """Return the operands that quantized.stays_in_8_bit allows."""
    if device.capability == 90:
        return "int8", "fp8", "two_parts"
    return ("int8", "fp8") if device.capability >= 89 else ("int8",) if device.capability >= 80 else ()


def as_8_bit(gemm: Gemm, operand: str) -> Gemm:
    """The same product with 8-bit operands: the norm comes first, in the kernel that rounds."""
    return gemm._replace(operand=operand, norm=False, bias=False, residual=False)


def instances(kernel: str) -> set[tuple[str, ...]]:
    """The arguments of each entry of TRIDECODE_INSTANCES in the kernel's file, or of its kind's header."""
    pattern = r"#define TRIDECODE_INSTANCES\(_\)((?:.*\\\n)*.*\n)"
    kind = kernel.removesuffix("_adapted").replace("_8bit", "").removesuffix("_two_parts")
    listed = re.search(pattern, source(f"{kernel}.cu").read_text())
    listed = listed or re.search(pattern, source(f"{kind}.cuh").read_text())
    assert listed is not None
    found = [tuple(entry.split(", ")) for entry in re.findall(r"\b_\(([^)]*)\)", listed.group(1))]
    assert found and len(found) == len(set(found))
    return set(found)


def instance_of(gemm: Gemm, plan: Plan) -> tuple[str, ...]:
    heads = ("kQkvRotary" if gemm.rotary_size else "kQkv") if plan.fuses_heads else "kPlain"
    mode = {"linear": "kPlain", "swiglu": "kGated", "qkv": heads}[gemm.epilogue]
    at_run_time = "kQkv" if mode == "kQkvRotary" else mode  # one instance, with or without rotation
    if plan.kernel == "gemv":
        return str(gemm.tokens), at_run_time
    if plan.kernel == "gemm_mma":
        return (at_run_time,)
    if plan.kernel.startswith("gemm_mma_tiles"):
        return str(plan.tile_tokens), at_run_time
    if plan.kernel == "gemm_sm90_data_parallel":
        return str(plan.tile_outputs), mode
    if plan.kernel.startswith(("gemm_sm90_split_k", "gemm_sm90_even_split", "gemm_packed_even_split")):
        return str(plan.tile_tokens), mode, str(plan.split)
    return str(plan.tile_tokens), mode


def test_every_choice_has_an_instance_and_every_instance_is_chosen():
    chosen: dict[str, set[tuple[str, ...]]] = {}
    for gemm, plan in replay(list(DEVICES.values())):
        if plan.kernel not in ("gemm_library", "expand_rows", "library_8_bit"):
            chosen.setdefault(plan.kernel, set()).add(instance_of(gemm, plan))
            if plan.adapts and gemm.tokens <= ADAPTED_TOKENS:
                chosen.setdefault(f"{plan.kernel}_adapted", set()).add(instance_of(gemm, plan))
            if plan.keeps and gemm.tokens <= KEPT_TOKENS:
                chosen.setdefault(f"{plan.kernel}_kept", set()).add(instance_of(gemm, plan))
            if plan.sends and gemm.tokens <= SENT_TOKENS and gemm.epilogue == "linear":
                chosen.setdefault(f"{plan.kernel}_sent", set()).add(instance_of(gemm, plan))
    library = {"gemm_library", "gemm_library_epilogue", "gemm_expanded"}
    assert set(chosen) == {path.stem for path in sources("gem*.cu")} - library - PACKED
    for kernel, reached in chosen.items():
        assert reached == instances(kernel), kernel


@pytest.mark.parametrize("name", DEVICES)
def test_a_plan_keeps_to_what_its_kernel_can(name: str):
    device = DEVICES[name]
    for gemm, plan in replay([device]):
        assert device.capability == 90 or "sm90" not in plan.kernel
        if plan.kernel in ("gemv", "gemm_mma"):
            assert gemm.tokens <= 2
            assert plan.fuses_norm == gemm.norm or plan.split > 1
        elif plan.kernel.startswith("gemm_mma_tiles"):
            assert (device.capability < 90 or gemm.operand) and gemm.tokens <= plan.tile_tokens
            assert device.capability != 90
            assert 1 <= plan.split <= max(1, gemm.inputs // 256)
        elif plan.kernel.startswith(("gemm_sm90_data_parallel", "gemm_sm90_split_k")):
            assert gemm.tokens <= plan.tile_tokens
        assert not plan.fuses_norm or gemm.norm
        assert plan.kernel.endswith(("_8bit", "_8_bit")) == (gemm.operand in ("int8", "fp8"))
        assert plan.kernel.endswith(("_two_parts", "expand_rows")) == (gemm.operand == "two_parts")
        assert gemm.operand != "fp8" or plan.tile_tokens <= 128
        if plan.kernel.startswith("gemm_sm90_split_k"):
            assert -(-gemm.outputs // 128) <= device.clusters[plan.split - 1]
        if plan.kernel.startswith("gemm_sm90_even_split"):
            assert gemm.tokens <= plan.tile_tokens or gemm.operand == "two_parts" or plan.split == 2
            tiles = -(-gemm.outputs // 256) * -(-gemm.tokens // plan.tile_tokens)
            assert plan.clusters == tiles * plan.split
        if plan.kernel.startswith(("gemm_sm90_stream_k", "gemm_sm90_even_split")):
            assert 1 <= plan.clusters <= device.multiprocessors // 2


@pytest.mark.parametrize(
    ("model", "product", "tokens", "kernel", "tile", "split"),
    [  # on an H200
        ("bloom-7b1", "dense", 8, "gemm_sm90_split_k", (128, 16), 3),
        ("bloom-7b1", "qkv", 64, "gemm_sm90_split_k", (128, 64), 1),
        ("bloom-7b1", "down", 64, "gemm_sm90_stream_k", (256, 64), 0),
        ("bloom-7b1", "qkv", 65, "gemm_library", (0, 0), 0),
        ("llama-3-8b", "down", 65, "gemm_sm90_even_split", (256, 128), 4),
        ("llama-3-8b", "down", 257, "gemm_library", (0, 0), 0),
        ("llama-3-8b", "up", 256, "gemm_sm90_stream_k", (256, 256), 0),
        ("llama-3-8b", "up", 257, "gemm_library", (0, 0), 0),
        ("bloom-560m", "up", 1, "gemm_sm90_data_parallel", (32, 8), 0),
        ("bloom-560m", "up", 2, "gemm_sm90_data_parallel", (32, 8), 0),
        ("bloom-560m", "up", 17, "gemm_sm90_data_parallel", (32, 32), 0),
        ("bloom-560m", "up", 65, "gemm_library", (0, 0), 0),
        ("smollm2-135m", "qkv", 3, "gemm_sm90_data_parallel", (32, 8), 0),
        ("gpt2", "head", 1, "gemm_sm90_stream_k", (256, 16), 0),
    ],
)
def test_choices_of_published_models(
    model: str, product: str, tokens: int, kernel: str, tile: tuple[int, int], split: int
):
    plan = choose(SHAPES[model].products()[product]._replace(tokens=tokens), H200)
    assert (plan.kernel, (plan.tile_outputs, plan.tile_tokens), plan.split) == (kernel, tile, split)


def test_what_a_kernel_cannot_read_goes_to_the_library():
    large, small = Gemm(8, 4096, 12288, bias=True), Gemm(1, 1024, 1024, bias=True)
    for gemm in (large, small):
        assert choose(gemm, H200).kernel != "gemm_library"
        for other in (gemm._replace(half=False), gemm._replace(aligned=False)):
            assert choose(other, H200).kernel == "gemm_library"
    assert choose(large._replace(out_aligned=False), H200).kernel == "gemm_library"
    assert choose(small._replace(inputs=1020), H200).kernel == "gemm_library"


@pytest.mark.parametrize(("outputs", "inputs"), [(3584, 3584), (4096, 2560), (4608, 3584), (3584, 4096)])
def test_medium_weights_take_kernels_that_prefetch_them(outputs: int, inputs: int):
    """From 3 to 64 tokens, all blocks of their tiles resident; with a gate or fewer weights as before."""
    gemm = Gemm(8, inputs, outputs, residual=True)
    for tokens in (3, 8, 17, 64):
        plan = choose(gemm._replace(tokens=tokens), H200)
        assert (plan.kernel, plan.split) == ("gemm_sm90_split_k", 3)
    for tokens in (1, 2, 65):
        assert choose(gemm._replace(tokens=tokens), H200).kernel != "gemm_sm90_split_k"
    assert choose(gemm._replace(inputs=1024), H200).kernel != "gemm_sm90_split_k"
    assert choose(gemm._replace(epilogue="swiglu", residual=False), H200).kernel != "gemm_sm90_split_k"


def test_two_ranks_split_the_inputs_of_their_part_of_the_output_projection():
    """Of LLaMA-3-8B and BLOOM-7B1, from 3 to 64 tokens. With a bias (BLOOM-1B7's MLP), a residual or another
    shape (Phi-3-mini's output projection on one GPU) the kernel is the one for small weights."""
    gemm = Gemm(8, 2048, 4096)
    for tokens in (3, 8, 17, 64):
        plan = choose(gemm._replace(tokens=tokens), H200)
        assert (plan.kernel, plan.split) == ("gemm_sm90_split_k", 3)
    others = [gemm._replace(tokens=2), gemm._replace(bias=True), gemm._replace(residual=True)]
    others += [gemm._replace(inputs=3072, outputs=3072), gemm._replace(inputs=4096, outputs=2048)]
    for other in others:
        assert choose(other, H200).kernel == "gemm_sm90_data_parallel"
    assert choose(gemm._replace(tokens=65), H200).kernel == "gemm_library"


def test_wide_products_are_not_chained():
    """Down projections of GPT-NeoX-20B, Qwen2-7B, Gemma-2-27B and 9B; matrices in 8 and 4 bit have no
    limit."""
    assert chain_tokens("dense", 6144, 24576, False) == chain_tokens("dense", 4608, 36864, True) == 0
    assert chain_tokens("dense", 3584, 18944, False) == chain_tokens("int8", 6144, 24576, False) == 1
    assert chain_tokens("dense", 3584, 14336, True) == 1 and chain_tokens("dense", 768, 3072, False) == 4


def test_explain_prints_a_line_for_each_product_and_number_of_tokens():
    text = list(lines("llama-3-8b", [1, 64], 2, "h200"))
    assert len(text) == 2 + 2 * len(SHAPES["llama-3-8b"].products(2))
    assert "llama-3-8b" in text[0] and "tensor size 2" in text[0]
    row = next(line for line in text if line.split()[:2] == ["down", "64"])
    assert "4096" in row and "7168" in row and "gemm_sm90_split_k" in row


def test_shapes_are_those_of_the_benchmarks_presets():
    shared = PRESETS.keys() & SHAPES.keys()
    tuned = {name for name, chosen in PRESETS.items() if chosen.model.family in ("bloom", "gpt", "llama")}
    assert shared >= tuned - {"toy"}
    for name in shared:
        config = PRESETS[name].model
        rotary = 0 if config.rope is None else config.rope.size
        wanted = ModelShape(
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            config.mlp_size,
            config.vocab_size,
            config.family == "llama",
            rotary,
        )
        assert SHAPES[name] == wanted, name


def test_many_tokens_of_fp8_go_to_a_library_that_takes_them() -> None:
    takes = H200._replace(fp8_library=True)
    gemm = Gemm(4096, 4096, 6144, operand="fp8")
    assert choose(gemm, takes).kernel == "gemm_library"
    others = [gemm._replace(tokens=64), gemm._replace(operand="int8"), gemm._replace(outputs=6152)]
    assert all(choose(each, takes).kernel.endswith("_8bit") for each in others)
    assert choose(gemm, H200).kernel == "gemm_sm90_stream_k_8bit"


def test_many_tokens_of_fp8_in_blocks_go_to_a_library_that_takes_their_scales() -> None:
    takes = H200._replace(fp8_block_library=True)
    gemm = Gemm(68, 4096, 6144, operand="fp8_blocks")
    assert choose(gemm, takes).kernel == "gemm_library"
    others = [gemm._replace(tokens=64), gemm._replace(inputs=4224), gemm._replace(outputs=6152)]
    others.append(gemm._replace(tokens=70))
    assert all(choose(each, takes).kernel.endswith("_8bit") for each in others)
    assert choose(gemm, H200._replace(fp8_library=True)).kernel == "gemm_sm90_stream_k_8bit"


def test_rows_of_fp8_in_blocks_are_split_where_the_library_takes_most_of_them() -> None:
    takes = H200._replace(fp8_block_library=True)
    gemm = Gemm(1, 4096, 6144, operand="fp8_blocks")

    def rows(tokens: int) -> int:
        return library_rows(gemm._replace(tokens=tokens), takes)

    assert [rows(tokens) for tokens in (69, 70, 142, 4095)] == [68, 68, 140, 4092]
    assert [rows(tokens) for tokens in (1, 2, 3, 64, 66, 67, 68, 4096)] == [0] * 8
    many = gemm._replace(tokens=142)
    without = [many._replace(operand="fp8"), many._replace(inputs=4224), many._replace(outputs=6152)]
    assert [library_rows(each, takes) for each in without] == [0] * 3
    assert library_rows(many, H200) == 0
