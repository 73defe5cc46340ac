"""vLLM, where it is installed. Prefix caching is off, because prompts never repeat."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig

from tridecode.tools.bench.engines import BenchEngine
from tridecode.tools.bench.measure import Job, measure, output_lengths
from tridecode.tools.bench.shapes.hf_config import hf_config

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_MEMORY_FRACTION = 0.9


def bench_vllm(job: Job) -> dict[str, Any]:
    """measure() of vLLM, or {"error": "vllm is not installed"}. job.directory: a Hugging Face checkpoint."""
    if importlib.util.find_spec("vllm") is None:
        return {"error": "vllm is not installed"}
    if job.rate:
        return {"error": "vLLM is measured with all requests at once, not with --rate"}
    vllm = importlib.import_module("vllm")  # here, because it is optional
    with tempfile.TemporaryDirectory() as folder:
        if not job.directory:
            hf_config(job.shape).save_pretrained(folder)
        engine = vllm.LLM(
            model=job.directory or folder,
            load_format="auto" if job.directory else "dummy",
            skip_tokenizer_init=True,
            dtype=_DTYPES.get(job.dtype or ("" if job.directory else job.chosen_dtype), "auto"),
            tensor_parallel_size=job.tensor_para_size,
            max_model_len=job.longest,
            max_num_seqs=job.at_a_time,
            gpu_memory_utilization=_MEMORY_FRACTION,
            enable_prefix_caching=False,
            seed=job.seed,
        )

    def generate(prompts: Sequence[Sequence[int]], output_tokens: int | Sequence[int]) -> float:
        lengths = output_lengths(prompts, output_tokens)
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in lengths
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        started = time.perf_counter()
        answers = engine.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert [len(one.outputs[0].token_ids) for one in answers] == list(lengths)
        return seconds

    if job.directory:
        vocab_size = AutoConfig.from_pretrained(job.directory).get_text_config().vocab_size
    else:
        vocab_size = job.shape.vocab_size
    return {
        "engine": f"vLLM {vllm.__version__}",
        "model": job.directory or job.preset,
        "device": "cuda",
        "dtype": job.dtype or ("the checkpoint's" if job.directory else job.chosen_dtype),
        "tensor_para_size": job.tensor_para_size,
        **measure(generate, job, vocab_size),
    }


ENGINE = BenchEngine("vLLM", ("compare", "mix"), bench_vllm)
