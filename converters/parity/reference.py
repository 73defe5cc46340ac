"""transformers' model of the source checkpoint, run on the fixed prompts, and the memory that it needs."""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import Module

from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.resolved_settings import choose_device
from tridecode.backend.models import family
from tridecode.backend.weights.reader import TORCH_DTYPES
from tridecode.converters.checkpoint import Checkpoint
from tridecode.converters.parity.files import is_tied

NEW_TOKENS = 8
Greedy = tuple[list[list[int]], list[np.ndarray]]  # tokens and logits (steps, V), prompt by prompt


def reference_dtype(checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> str:
    """fp32 if memory allows, else the dtype of the files."""
    return "fp32" if fits(checkpoint, torch.float32, device) else config.weight_dtype


def fits(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether twice the model's size in this dtype is free."""
    parameters = sum(int(np.prod(shape)) for shape in checkpoint.tensors.shapes.values())
    return 2 * dtype.itemsize * parameters < free_memory(device)


def free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def too_large(config: ModelConfig) -> str:
    """Return why the comparison does not fit in this machine's memory, as a clause; "" if it does.

    The reference is loaded on the CPU in the dtype of the files, or wider; after it the engine on its device,
    on a CPU in fp32.
    """
    parameters = sum(math.prod(spec.shape) for spec in family(config.family).weight_specs(config))
    device = choose_device(EngineConfig())
    item = TORCH_DTYPES[config.weight_dtype].itemsize
    sizes = {torch.device("cpu"): item * parameters}
    sizes[device] = parameters * (item if device.type == "cuda" else 4)
    for place, size in sizes.items():
        free = free_memory(place)
        if 1.1 * size > free:
            return (
                f"the comparison needs {size / 2**30:,.1f} GiB of memory ({place.type}), and "
                f"{free / 2**30:,.1f} GiB are available"
            )
    return ""


def reference_vocabulary(checkpoint: Checkpoint, config: ModelConfig) -> int:
    """Token ids of the checkpoint's model; those of `config` where it does not say."""
    if checkpoint.plan is not None:
        return checkpoint.plan(None, None)[0].vocab_size
    found = getattr(checkpoint.config, "vocab_size", None)
    return found if isinstance(found, int) and found > 0 else config.vocab_size


def shared_vocabulary(checkpoint: Checkpoint, config: ModelConfig) -> int:
    """Token ids that the checkpoint's model and ours have."""
    return min(reference_vocabulary(checkpoint, config), config.vocab_size)


def reference_greedy(
    checkpoint: Checkpoint,
    config: ModelConfig,
    prompts: list[list[int]],
    dtype: torch.dtype,
    device: torch.device,
    measure: Callable[[Module], None] | None = None,
    read: Callable[[Module, torch.device], None] | None = None,
) -> tuple[Greedy, bool | None]:
    """Return transformers' tokens and logits, both over the first config.vocab_size ids, and whether its head
    is tied.

    measure: called with the model on the CPU. read: called with the model on `device`, in `dtype`.
    """
    model: Module = checkpoint.reference_model(TORCH_DTYPES[config.weight_dtype])
    tied = is_tied(model)
    if measure is not None:
        measure(model)
    model = model.to(device=device, dtype=dtype)
    try:
        with torch.inference_mode():
            results = [_greedy(model, prompt, device, config.vocab_size) for prompt in prompts]
        if read is not None:
            read(model, device)
    finally:
        del model  # the engine needs its memory next
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return ([tokens for tokens, _ in results], [logits for _, logits in results]), tied


def _greedy(
    model: Module, prompt: list[int], device: torch.device, vocab_size: int
) -> tuple[list[int], np.ndarray]:
    """NEW_TOKENS greedy tokens below vocab_size, past any end id, and their logits (NEW_TOKENS, vocab_size)
    float32.
    """
    tokens, rows, cache = [], [], None
    name = _cache_argument(model)
    ids = torch.tensor([prompt], device=device)
    for _ in range(NEW_TOKENS):
        output = model(ids, use_cache=True, **{name: cache})
        cache = getattr(output, name)  # None: our own reference models recompute all tokens
        rows.append(output.logits[0, -1, :vocab_size].float().cpu().numpy())
        tokens.append(int(rows[-1].argmax()))
        newest = torch.tensor([tokens[-1:]], device=device)
        ids = newest if cache is not None else torch.cat([ids, newest], dim=1)
    return tokens, np.stack(rows)


def _cache_argument(model: Module) -> str:
    """The name of the KV cache in calls and outputs: `cache` from transformers 5.24 on, which warns of the
    older name.
    """
    forwards = [vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind)]
    known = any("cache" in inspect.signature(forward).parameters for forward in forwards)
    return "cache" if known else "past_key_values"
