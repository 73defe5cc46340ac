"""llama.cpp itself, from the xllamacpp package: the truth about what a GGUF file means."""

from __future__ import annotations

import ctypes
import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

_CONTEXT = 256


class LlamaCpp:
    """A GGUF file served by llama.cpp on one CPU thread, with a float32 cache."""

    def __init__(self, path: Path):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = _CONTEXT, 1, 0
        params.port, params.warmup, params.verbosity = 0, False, -1
        params.cpuparams.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)
        # Never destroyed: its destructor can hang on a thread that has only just started.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._server))

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """The ids of a text; special tokens in it are taken whole."""
        body = {"content": text, "add_special": add_special, "parse_special": True}
        return self._post("/tokenize", body)["tokens"]

    def greedy(
        self, prompt: list[int], new_tokens: int, vocab_size: int
    ) -> tuple[list[int], list[list[float]]]:
        """The most likely tokens, and all log-probabilities at each of them, by id."""
        body = {
            "prompt": prompt, "n_predict": new_tokens, "temperature": 0, "samplers": ["temperature"],
            "n_probs": vocab_size, "return_tokens": True, "cache_prompt": False, "ignore_eos": False,
        }  # fmt: skip
        found = self._post("/completion", body)
        rows = []
        for step in found["completion_probabilities"]:
            row = [float("-inf")] * vocab_size
            for entry in step["top_logprobs"]:
                row[entry["id"]] = entry["logprob"]
            rows.append(row)
        return found["tokens"], rows

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self._server.listening_address}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
