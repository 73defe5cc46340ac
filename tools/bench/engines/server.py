"""Our engine behind tritonserver, streaming over gRPC."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import read_model_config
from tridecode.tools.bench.engines import BenchEngine
from tridecode.tools.bench.engines.ours import weight_directory
from tridecode.tools.bench.load.generator import TOKEN_MODEL, choose_processes, run_load
from tridecode.tools.bench.load.prompts import find_tokenizer, text_prompts
from tridecode.tools.bench.load.worker import LoadSpec, Prompt
from tridecode.tools.bench.measure import Job, Say, measure, one_length, silent
from tridecode.tools.bench.shapes.random_repo import write_random_repository
from tridecode.tools.client.generate import find_text_model
from tridecode.tools.serve.server_process import running_server

_READY_S = 900.0


def bench_server(
    job: Job, *, tokens_in: bool = False, door_python: str | None = None, say: Say = silent
) -> dict[str, Any]:
    """Run measure() through a server started for it; a batch is the same number of concurrent streams.

    job.directory: a model repository; without it, one with random weights is built. tokens_in: through
    FasterTransformer's streaming model, not the text model. door_python: see triton_install.prepare. Raises
    TridecodeError where the server does not start or a request fails.
    """
    with _repository(job) as directory:
        model = read_model_config(weight_directory(directory))
        say("starting tritonserver")
        with running_server(directory, _READY_S, door_python=door_python) as server:
            streams = _Streams(server.grpc_url, find_tokenizer(directory), tokens_in)
            found = measure(streams.generate, job, model.vocab_size, say)
    if "batches" in found:
        found["batches"] = [_with_responses(row, streams, job.output_tokens) for row in found["batches"]]
    return {
        "engine": f"tridecode behind Triton, {'token ids' if tokens_in else 'text'}",
        "model": model.model_name,
        "tensor_para_size": job.tensor_para_size,
        **found,
    }


def engine_settings(job: Job, model: ModelConfig) -> dict[str, object]:
    """EngineConfig parameters of a repository made for a job."""
    return {
        "data_type": job.chosen_dtype,
        "device": job.device,
        "tensor_para_size": job.tensor_para_size,
        "max_sequences": max(job.batches),
        "max_queued_requests": max(1024, *job.batches),
        "max_sequence_tokens": min(job.longest, model.max_positions),
        "prefix_cache": False,  # rounds repeat their prompts, and each is to compute them
    }


@contextmanager
def _repository(job: Job) -> Iterator[Path]:
    if job.directory:
        yield Path(job.directory)
        return
    with tempfile.TemporaryDirectory(prefix="tridecode-bench-") as folder:
        model = replace(job.shape, weight_dtype=job.chosen_dtype)
        yield write_random_repository(Path(folder, "repository"), model, engine_settings(job, model))


class _Streams:
    """Generates through the server, with one stream per prompt.

    responses: (streams, tokens) -> number of responses with tokens of each stream, over all runs.
    """

    def __init__(self, url: str, tokenizer: Tokenizer, tokens_in: bool):
        self._url, self._tokenizer, self._tokens_in = url, tokenizer, tokens_in
        self._model = TOKEN_MODEL if tokens_in else find_text_model(url).name
        self._seeds = itertools.count()
        self.responses: dict[tuple[int, int], list[int]] = {}

    def generate(self, prompts: Sequence[Sequence[int]], output_tokens: int | Sequence[int]) -> float:
        length = one_length(output_tokens)
        inputs: list[Prompt] = [np.asarray(prompt, np.int32) for prompt in prompts]
        if not self._tokens_in:
            seed = next(self._seeds)
            inputs = list(text_prompts(self._tokenizer, len(prompts), len(prompts[0]), seed))
        spec = LoadSpec(
            url=self._url,
            model=self._model,
            prompts=inputs,
            output_tokens=length,
            num_requests=len(prompts),
            concurrency=len(prompts),
            tokens_in=self._tokens_in,
            processes=choose_processes(len(prompts)),
        )
        records = run_load(spec)
        tokens = sum(count for record in records for _, count in record.responses)
        failures = [record.error for record in records if record.error]
        if failures:
            raise TridecodeError(f"{len(failures)} of {len(records)} requests failed: {failures[0]}")
        if tokens != len(prompts) * length:
            wanted = len(prompts) * length
            raise TridecodeError(f"{len(prompts)} requests gave {tokens} tokens; wanted {wanted}")
        counts = self.responses.setdefault((len(prompts), length), [])
        counts += [len(record.responses) for record in records]
        return max(record.ended for record in records) - min(record.sent for record in records)


def _with_responses(batch: dict[str, Any], streams: _Streams, output_tokens: int) -> dict[str, Any]:
    """Add the minimum, median and maximum number of responses per stream."""
    counts = sorted(streams.responses[batch["batch"], output_tokens])
    return {**batch, "responses_per_stream": [counts[0], counts[len(counts) // 2], counts[-1]]}


ENGINE = BenchEngine("behind Triton", ("beside",), bench_server, ours=True)
