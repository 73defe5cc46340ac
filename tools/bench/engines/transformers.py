"""Measures transformers' generate with its default settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.file_weights import DTYPES
from tridecode.backend.engine.device.resolved_settings import choose_device
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.tools.bench.engines import BenchEngine
from tridecode.tools.bench.measure import Job, measure, one_length
from tridecode.tools.bench.shapes.hf_config import hf_config


def bench_transformers(job: Job) -> dict[str, Any]:
    """Run measure() on transformers. job.directory: a Hugging Face checkpoint or a .gguf file."""
    device = choose_device(EngineConfig(device=job.device))
    model = load_model(job, device)

    def generate(prompts: Sequence[Sequence[int]], output_tokens: int | Sequence[int]) -> float:
        size = len(prompts) if not job.prompts else job.at_a_time
        started = time.perf_counter()
        for first in range(0, len(prompts), size):
            _generate(model, prompts[first : first + size], one_length(output_tokens))
        return time.perf_counter() - started

    found = measure(generate, job, model.config.vocab_size)
    return {
        "engine": f"transformers {transformers.__version__}",
        "model": job.directory or job.preset,
        "device": str(device),
        "dtype": str(model.dtype).removeprefix("torch."),
        **found,
    }


def load_model(job: Job, device: torch.device) -> Any:
    """Return transformers' model of a job, in evaluation mode."""
    if job.directory.endswith(".gguf"):
        plain: Any = open_checkpoint(job.directory).reference_model(DTYPES[job.dtype or "fp32"])
        return plain.to(device)
    if job.directory:
        dtype = DTYPES[job.dtype] if job.dtype else "auto"
        loaded: Any = AutoModelForCausalLM.from_pretrained(job.directory, dtype=dtype)
        return loaded.to(device).eval()
    torch.manual_seed(job.seed)
    with device:
        model = AutoModelForCausalLM.from_config(hf_config(job.shape), dtype=DTYPES[job.chosen_dtype])
    return model.eval()


@torch.inference_mode()
def _generate(model: Any, prompts: Sequence[Sequence[int]], output_tokens: int) -> None:
    """Generate exactly output_tokens greedy tokens per prompt; shorter prompts are padded on the left."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        min_new_tokens=output_tokens,
        max_new_tokens=output_tokens,
        pad_token_id=0,
    )
    assert out.shape == (len(prompts), width + output_tokens), out.shape
    out.cpu()  # waits for the device


ENGINE = BenchEngine("transformers", ("compare", "beside"), bench_transformers)
