"""A decode step of any family consists of our kernels, cuBLAS's products and copies: nothing of torch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.autograd import DeviceType

from tests.backend.engine.offline_models import offline_engine
from tests.checkpoints import variants
from tridecode.backend.engine.step.decode_graphs import decode_plan
from tridecode.tools.bench.kernel_classes import OURS, plain_name

pytestmark = pytest.mark.gpu

VARIANTS = variants()


def kernels_of_a_step(variant: str, dtype: str, rows: int) -> Counter[str]:
    """Count the kernels of a decode step that is launched operation by operation."""
    offline = offline_engine(
        VARIANTS[variant](), "cuda", keep_logits=False, data_type=dtype, max_sequences=8, block_tokens=16
    )
    engine = offline.engine
    assert engine.graphs is not None, f"{variant} runs without CUDA graphs"
    batch = engine.buffers.load(decode_plan(rows))
    engine.run(batch)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.run(batch)
        torch.cuda.synchronize()
    return Counter(event.name for event in profiler.events() if event.device_type == DeviceType.CUDA)


def is_expected(name: str) -> bool:
    """Return whether a kernel is ours, or a product of cuBLAS or a copy, which have names of many kinds."""
    if "tridecode::" in name:
        return plain_name(name) in OURS
    return not any(space in name for space in ("at::", "at_cuda", "c10::", "cub::"))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decode_step_has_no_operation_of_torch(variant: str, rows: int) -> None:
    found = kernels_of_a_step(variant, "bf16", rows)
    assert any("decode_attention" in name for name in found)
    others = {name: count for name, count in found.items() if not is_expected(name)}
    assert others == {}


def test_a_sandwich_layer_has_few_launches() -> None:
    """A layer of Gemma 3 has four products, two sums with norms, one finish of the heads and one attention;
    products of few outputs may take a second launch."""
    found = kernels_of_a_step("gemma3_text", "bf16", 8)
    counts: Counter[str] = Counter()
    for name, count in found.items():  # several instances of a template have one plain name
        if "tridecode::" in name:
            counts[plain_name(name)] += count
    layers = counts["finish_heads"]
    assert layers > 0 and counts["add_normed"] + counts["add_normed_any"] == 2 * layers
    attention = sum(count for name, count in counts.items() if name.startswith("decode_attention"))
    assert attention == layers and counts["activate_rows"] == 0
