"""Checkpoints of LLaMA's shape of any size that take no disk space: safetensors files of holes.

By hand, for a large one:  python -m tests.converters.sources.sparse_checkpoint FOLDER GiB
"""

from __future__ import annotations

import json
import math
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def config(hidden: int, layers: int, vocab: int, inner: int) -> dict[str, Any]:
    heads = hidden // 64
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def shapes(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """transformers' tensors of such a model."""
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    found = {"model.embed_tokens.weight": (settings["vocab_size"], hidden)}
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            found[f"{prefix}.self_attn.{name}_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            found[f"{prefix}.mlp.{name}_proj.weight"] = (inner, hidden)
        found[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{name}.weight"] = (hidden,)
    found["model.norm.weight"] = (hidden,)
    return found


def write(folder: Path, settings: dict[str, Any], dtype: str = "F32", shards: int = 3) -> int:
    """Write config.json and the shards; the bytes of the tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    tensors, weight_map, total = list(shapes(settings).items()), {}, 0
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header, size = {}, 0
        for tensor, shape in tensors[shard::shards]:
            end = size + math.prod(shape) * ITEM_BYTES[dtype]
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [size, end]}
            weight_map[tensor], size = name, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
        total += size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def resident() -> int:
    """Resident bytes of this process, mapped files included."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The largest `resident` so far, as the kernel counted it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class AnonymousPeak(threading.Thread):
    """The largest RssAnon, sampled: memory that is not pages of files, which the kernel can take back."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.start()

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, anonymous())
            time.sleep(0.002)


def anonymous() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def convert(checkpoint: Path, output: Path, dtype: str, ranks: int, small: bool) -> dict[str, float]:
    """Convert in this process; resident bytes before and at the peak, and the seconds."""
    from tridecode.converters import mapped_files, writer
    from tridecode.converters.checkpoint import open_checkpoint
    from tridecode.converters.convert import plan_conversion

    if small:  # in proportion to a small checkpoint
        writer._IN_FLIGHT_BYTES = mapped_files._RESIDENT_BYTES = 32 << 20
    before, started, sampled = resident(), time.monotonic(), AnonymousPeak()
    held = anonymous()
    plan_conversion(open_checkpoint(checkpoint), dtype).write(output, ranks)
    return {
        "before": before,
        "peak": peak(),
        "anonymous": sampled.bytes - held,
        "seconds": time.monotonic() - started,
    }


def load(weights: Path, ranks: int) -> dict[str, float]:
    """Read every shard of one rank and drop it, as an engine with a GPU does."""
    import torch

    from tridecode.backend.engine.device.file_weights import FileWeights
    from tridecode.backend.models import read_model_config
    from tridecode.backend.weights.reader import WeightReader
    from tridecode.kernels import select

    before, started, cpu = resident(), time.monotonic(), torch.device("cpu")
    sampled, held = AnonymousPeak(), anonymous()
    reader = WeightReader(weights, read_model_config(weights))
    reader.verify("sampled")
    specs = list(reader.specs.values())
    source = FileWeights(reader, specs, ranks - 1, ranks, reader.dtype, select(cpu), cpu)
    for spec in specs:
        source.tensor(spec.name)
    return {
        "before": before,
        "peak": peak(),
        "anonymous": sampled.bytes - held,
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    action, *arguments = sys.argv[1:]
    if action == "convert":
        source, output, dtype, ranks, *small = arguments
        print(json.dumps(convert(Path(source), Path(output), dtype, int(ranks), bool(small))))
    elif action == "load":
        print(json.dumps(load(Path(arguments[0]), int(arguments[1]))))
    else:
        hidden = 4096
        layers = max(int(float(arguments[0]) * (1 << 30) / (2 * 12 * hidden**2)), 1)
        print(f"{write(Path(action), config(hidden, layers, 262144, 4 * hidden - 2048), 'BF16'):,} bytes")


if __name__ == "__main__":
    main()
