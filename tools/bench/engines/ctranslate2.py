"""ctranslate2 on the CPU, where it is installed: the fastest other fp32 CPU engine."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tridecode.tools.bench.engines import BenchEngine
from tridecode.tools.bench.engines.transformers import load_model
from tridecode.tools.bench.measure import Job, measure, one_length

_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def bench_ctranslate2(job: Job) -> dict[str, Any]:
    """measure() of ctranslate2, or {"error": "ctranslate2 is not installed"}. job.directory: as for
    transformers."""
    if importlib.util.find_spec("ctranslate2") is None:
        return {"error": "ctranslate2 is not installed"}
    ctranslate2 = importlib.import_module("ctranslate2")  # here, because it is optional
    dtype = _TYPES[job.dtype or "fp32"]
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = _convert(job, Path(folder), dtype)
        threads = torch.get_num_threads()  # the other engines' number
        engine = ctranslate2.Generator(folder, device="cpu", compute_type=dtype, intra_threads=threads)

    def generate(prompts: Sequence[Sequence[int]], output_tokens: int | Sequence[int]) -> float:
        length = one_length(output_tokens)
        inputs = [[str(token) for token in prompt] for prompt in prompts]
        started = time.perf_counter()
        answers = engine.generate_batch(
            inputs,
            beam_size=1,
            sampling_topk=1,
            min_length=length,
            max_length=length,
            include_prompt_in_result=False,
            max_batch_size=0,
        )
        seconds = time.perf_counter() - started
        assert all(len(one.sequences_ids[0]) == length for one in answers)
        return seconds

    return {
        "engine": f"ctranslate2 {ctranslate2.__version__}",
        "model": job.directory or job.preset,
        "device": "cpu",
        "dtype": dtype,
        **measure(generate, job, vocab_size),
    }


def _convert(job: Job, folder: Path, dtype: str) -> int:
    """Write ctranslate2's model into `folder`; the size of its vocabulary. Tokens are called by their ids."""
    base: Any = importlib.import_module("ctranslate2.converters").TransformersConverter
    model = load_model(job, torch.device("cpu"))
    vocab_size = model.config.get_text_config().vocab_size
    names = {str(token): token for token in range(vocab_size)}
    tokenizer = SimpleNamespace(get_vocab=lambda: names, bos_token="0", eos_token="0", unk_token="0")

    class Converter(base):
        def load_model(self, *_arguments: Any, **_options: Any) -> Any:
            return model

        def load_tokenizer(self, *_arguments: Any, **_options: Any) -> Any:
            return tokenizer

    with tempfile.TemporaryDirectory() as source:
        model.config.save_pretrained(source)
        Converter(source).convert(str(folder), quantization=dtype, force=True)
    return vocab_size


ENGINE = BenchEngine("ctranslate2", ("beside",), bench_ctranslate2)
