"""Models of transformers as llama.cpp's converter writes them: names from gguf's own table, the metadata
and the changed tensors of each architecture.

Source: llama.cpp, conversion/*.py. test_gguf_families.py asks llama.cpp itself whether they are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MptConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from tests.converters.gguf.gguf_files import add_keys
from tests.converters.gguf.gguf_layouts import (
    Named,
    as_gemma,
    as_gpt2,
    as_llama,
    falcon,
    gemma2,
    gemma3,
    groups_together,
    heads,
    mpt,
    neox,
    parts_together,
    phi3,
    rope_keys,
    usual,
    vectors,
)

VOCABULARY = 320


@dataclass(frozen=True)
class GgufCase:
    """config, settings: of transformers' tiny model. architecture: llama.cpp's. write: metadata next to the
    usual. change: a tensor as llama.cpp keeps it. exact: llama.cpp computes the same up to float32 rounding;
    its GELUs come from tables of float16."""

    architecture: str
    config: type[PreTrainedConfig]
    settings: Mapping[str, Any]
    write: Callable[[PreTrainedConfig, gguf.GGUFWriter], None] = lambda hf, writer: None
    change: Callable[[str, np.ndarray, PreTrainedConfig], np.ndarray] = lambda name, weight, hf: weight
    exact: bool = True
    norm_centre: float = 1.0

    def model(self, **changes: Any) -> PreTrainedModel:
        """Weights are drawn wide, so that a wrong layout shows."""
        hf = self.config(**{"vocab_size": VOCABULARY, **self.settings, **changes})
        softcap = getattr(hf, "attn_logit_softcapping", None)
        model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager" if softcap else None)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                centre = 0.0 if name.endswith("bias") else self.norm_centre
                parameter.copy_(noise * 0.3 if parameter.ndim > 1 else centre + 0.1 * noise)
        return model.eval()


_DECODER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
_THETA = {"rope_type": "default", "rope_theta": 20000.0}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_LLAMA = {**_DECODER, "rope_parameters": _THETA}
_GEMMA = {**_DECODER, "head_dim": 24, "tie_word_embeddings": True}
_LONG = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 512, "attention_factor": 1.19,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LEARNED = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 96, "n_inner": 160}
_ALIBI = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}
_NEOX = {**_DECODER, "rope_parameters": {**_THETA, "partial_rotary_factor": 0.25}}

_BAICHUAN = {**_LLAMA, "hidden_size": 32, "num_hidden_layers": 32, "num_key_value_heads": 4}

CASES = {
    "llama": GgufCase("llama", LlamaConfig, _LLAMA, rope_keys, as_llama),
    "llama tied": GgufCase("llama", LlamaConfig, {**_LLAMA, "tie_word_embeddings": True},
        rope_keys, as_llama),
    "llama 3": GgufCase("llama", LlamaConfig, {**_LLAMA, "rope_parameters": _LLAMA3}, rope_keys, as_llama),
    "llama 3 of other parameters": GgufCase(
        "llama", LlamaConfig,
        {**_LLAMA, "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 24}},
        rope_keys, as_llama,
    ),
    "llama linear": GgufCase(
        "llama", LlamaConfig,
        {**_LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        rope_keys, as_llama,
    ),
    "llama yarn": GgufCase("llama", LlamaConfig, {**_LLAMA, "rope_parameters": _YARN}, rope_keys, as_llama),
    "qwen2": GgufCase("qwen2", Qwen2Config, _LLAMA, rope_keys),
    "qwen2 yarn": GgufCase("qwen2", Qwen2Config, {**_LLAMA, "rope_parameters": _YARN}, rope_keys),
    "qwen3": GgufCase(
        "qwen3", Qwen3Config, {**_LLAMA, "head_dim": 32}, lambda hf, w: (rope_keys(hf, w), heads(hf, w)),
    ),
    "gemma": GgufCase("gemma", GemmaConfig, _GEMMA, heads, as_gemma, exact=False, norm_centre=0.0),
    "gemma2": GgufCase(
        "gemma2", Gemma2Config, {**_GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 24},
        gemma2, as_gemma, exact=False, norm_centre=0.0,
    ),
    "gemma3": GgufCase(
        "gemma3", Gemma3TextConfig,
        {
            **_GEMMA, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        gemma3, as_gemma, exact=False, norm_centre=0.0,
    ),
    "phi3": GgufCase(
        "phi3", Phi3Config, {**_LLAMA, "sliding_window": None, "pad_token_id": 0,
                             "original_max_position_embeddings": 128}, phi3,
    ),
    "phi3 long": GgufCase(
        "phi3", Phi3Config,
        {
            **_LLAMA, "sliding_window": None, "pad_token_id": 0, "rope_parameters": _LONG,
            "original_max_position_embeddings": 512, "max_position_embeddings": 1024,
        },
        phi3,
    ),
    "gpt2": GgufCase("gpt2", GPT2Config, _LEARNED, change=as_gpt2, exact=False),
    "starcoder": GgufCase(
        "starcoder", GPTBigCodeConfig, {**_LEARNED, "multi_query": True},
        lambda hf, writer: writer.add_head_count_kv(1), exact=False,
    ),
    "gptneox": GgufCase("gptneox", GPTNeoXConfig, {**_NEOX, "num_key_value_heads": 4},
        neox, parts_together, exact=False),
    "gptneox sequential": GgufCase(
        "gptneox", GPTNeoXConfig,
        {**_NEOX, "num_key_value_heads": 4, "use_parallel_residual": False},
        neox, parts_together, exact=False,
    ),
    "bloom": GgufCase(
        "bloom", BloomConfig, {"hidden_size": 64, "n_head": 4, "n_layer": 2},
        lambda hf, writer: writer.add_head_count_kv(4), parts_together, exact=False,
    ),
    "mpt": GgufCase(
        "mpt", MptConfig,
        {**_ALIBI, "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": 2.0}}, mpt, exact=False,
    ),
    "falcon": GgufCase(
        "falcon", FalconConfig, {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
        falcon, groups_together, exact=False,
    ),
    "falcon 40b": GgufCase(
        "falcon", FalconConfig,
        {
            "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
        falcon, groups_together, exact=False,
    ),
    "phi2": GgufCase(
        "phi2", PhiConfig,
        {
            **_DECODER, "num_key_value_heads": 4, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        rope_keys, exact=False,
    ),
    "baichuan 7b": GgufCase("baichuan", LlamaConfig, _BAICHUAN, rope_keys, as_llama),
    "stablelm": GgufCase(
        "stablelm", StableLmConfig,
        {**_NEOX, "use_qkv_bias": True}, rope_keys,
    ),
    "stablelm 12b": GgufCase(
        "stablelm", StableLmConfig,
        {**_NEOX, "use_parallel_residual": True, "qk_layernorm": True}, rope_keys,
    ),
}  # fmt: skip


def tensors_of(model: PreTrainedModel, case: GgufCase) -> Named:
    """llama.cpp's names and arrays of a model."""
    hf = model.config
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    table = gguf.get_tensor_name_map(key, hf.num_hidden_layers)
    norms: dict[str, list[np.ndarray]] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if ".norms." in name:  # StableLM's heads, one matrix in llama.cpp
            stem, _, end = name.partition(".norms.")
            norms.setdefault(f"{stem}.weight", []).append(weight)
            continue
        short = name.removeprefix("transformer.") if case.architecture == "bloom" else name
        found = table.get_name(short, (".weight", ".bias"))
        assert found is not None, name
        yield found, case.change(name, weight, hf)
    for name, rows in norms.items():
        yield table.get_name(name, (".weight", ".bias")), np.stack(rows)
    yield from vectors(hf)


def write_model(
    path: Path,
    model: PreTrainedModel,
    case: GgufCase,
    keys: Mapping[str, Any],
    kind: gguf.GGMLQuantizationType | None = gguf.GGMLQuantizationType.F32,
    fuse: bool = False,
    split: Callable[[str, np.ndarray], dict[str, np.ndarray]] = lambda name, weight: {name: weight},
    changed: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model. keys: tokenizer metadata, as in gguf_files.write_vocabulary. kind: type of matrices;
    None: unchanged. fuse: write q, k and v as one. split: maps a tensor to those that are written. changed:
    metadata that replaces the model's, or is added to it."""
    changed = dict(changed or {})
    writer = gguf.GGUFWriter(path, changed.pop("general.architecture", case.architecture))
    usual(model.config, writer)
    case.write(model.config, writer)
    add_keys(writer, keys)
    for key in changed:
        writer.kv_data[0].pop(key, None)
    add_keys(writer, changed)
    tensors = dict(tensors_of(model, case))
    for layer in range(model.config.num_hidden_layers) if fuse else ():
        for end in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{part}.{end}" for part in "qkv"]
            if names[0] in tensors:
                tensors[f"blk.{layer}.attn_qkv.{end}"] = np.concatenate([tensors.pop(name) for name in names])
    written: dict[str, np.ndarray] = {}
    for name, weight in tensors.items():
        written |= split(name, weight)
    for name, weight in written.items():
        weight = np.ascontiguousarray(weight)
        quantised = kind is not None and weight.ndim == 2 and "position" not in name and "_norm" not in name
        data = gguf.quantize(weight, kind) if quantised else weight
        writer.add_tensor(name, data, raw_dtype=kind if quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
