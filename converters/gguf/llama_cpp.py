"""llama.cpp's own split of texts by a GGUF file's vocabulary, where the xllamacpp package is installed.

llama.cpp runs in a separate process, on a copy of the file's tokenizer with a tiny model: a crash on damaged
metadata is contained, and the weights are not loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_SECONDS = 60
_HIDDEN = 32


def llama_cpp_ids(fields: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]] | None:
    """The token ids of each text, with the special tokens that are added to it. fields: metadata of the file.

    None: xllamacpp is not installed, or llama.cpp does not load the vocabulary.
    """
    if find_spec("xllamacpp") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        try:
            _write(path, fields)
            done = subprocess.run(
                [sys.executable, "-m", __name__, str(path)],
                input=json.dumps(list(texts)),
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
            return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
        except (OSError, ValueError, LookupError, subprocess.SubprocessError):
            return None


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    """A GGUF file with the tokenizer of `fields` and a LLaMA of one layer that holds zeros."""
    size = len(fields["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(size)
    writer.add_context_length(256)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_HIDDEN)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in fields.items():
        if key.startswith("tokenizer.ggml.") or key == "general.name":
            _add(writer, key, value)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", np.zeros((size, _HIDDEN), np.float16))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((_HIDDEN, _HIDDEN), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(_HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)


def _serve(path: str) -> None:
    """The child: texts as JSON on standard input, their ids as JSON in the last line of standard output."""
    import xllamacpp  # installed for tests only

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = path, 256, 1, 0
    params.port, params.warmup, params.verbosity, params.cpuparams.n_threads = 0, False, -1, 1
    server = xllamacpp.Server(params)
    ids = []
    for text in json.load(sys.stdin):
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            ids.append(json.load(answer)["tokens"])
    print(json.dumps(ids), flush=True)
    os._exit(0)  # the server's destructor can hang on a thread that has only just started


if __name__ == "__main__":
    _serve(sys.argv[1])
