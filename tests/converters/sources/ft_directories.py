"""Weight directories as FasterTransformer's converters write them: numpy and the documented layout, no code
of ours. Each writer takes transformers' model and the number of ranks.

Source: FasterTransformer df4a753, examples/pytorch/{gpt,gptneox}/utils/*_convert.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

_NUMPY = {"fp32": np.float32, "fp16": np.float16}


class Writer:
    def __init__(self, directory: Path, ranks: int, dtype: str = "fp32"):
        directory.mkdir(parents=True)
        self.directory, self.ranks, self.dtype = directory, ranks, dtype

    def save(self, name: str, values: np.ndarray) -> None:
        np.ascontiguousarray(values.astype(_NUMPY[self.dtype])).tofile(self.directory / f"{name}.bin")

    def split(self, name: str, values: np.ndarray, axis: int) -> None:
        for rank, part in enumerate(np.split(values, self.ranks, axis)):
            self.save(f"{name}.{rank}", part)

    def norm(self, name: str, weight: np.ndarray, bias: np.ndarray) -> None:
        self.save(f"{name}.weight", weight)
        self.save(f"{name}.bias", bias)

    def ini(self, sections: dict[str, dict[str, object]], equals: str = " = ") -> None:
        lines = []
        for section, keys in sections.items():
            lines += [f"[{section}]", *(f"{key}{equals}{value}" for key, value in keys.items()), ""]
        (self.directory / "config.ini").write_text("\n".join(lines))


def arrays(model: PreTrainedModel) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}


def heads_apart(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows (heads, 3, head size) to (3, heads * head size)."""
    by_head = values.reshape(heads, 3, -1, *values.shape[1:])
    return by_head.swapaxes(0, 1).reshape(3, -1, *values.shape[1:])


def common(model: PreTrainedModel, dtype: str, inner: int) -> dict[str, object]:
    config = model.config
    return {
        "model_name": "model",
        "head_num": config.num_attention_heads,
        "size_per_head": config.hidden_size // config.num_attention_heads,
        "inter_size": inner,
        "num_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "start_id": config.bos_token_id,
        "end_id": config.eos_token_id,
        "weight_data_type": dtype,
    }


def gpt2(model: PreTrainedModel, directory: Path, ranks: int = 1, dtype: str = "fp32", **extra) -> Path:
    """huggingface_gpt_convert.py: no layernorm_eps, no lm_head."""
    out, state, config = Writer(directory, ranks, dtype), arrays(model), model.config
    hidden = config.n_embd
    out.save("model.wte", state["transformer.wte.weight"])
    out.save("model.wpe", state["transformer.wpe.weight"])
    out.norm("model.final_layernorm", state["transformer.ln_f.weight"], state["transformer.ln_f.bias"])
    for layer in range(config.n_layer):
        get = lambda name, prefix=f"transformer.h.{layer}.": state[prefix + name]  # noqa: E731
        to = f"model.layers.{layer}."
        out.norm(to + "input_layernorm", get("ln_1.weight"), get("ln_1.bias"))
        out.norm(to + "post_attention_layernorm", get("ln_2.weight"), get("ln_2.bias"))
        qkv = to + "attention.query_key_value"
        out.split(qkv + ".weight", get("attn.c_attn.weight").reshape(hidden, 3, hidden), 2)
        out.split(qkv + ".bias", get("attn.c_attn.bias").reshape(3, hidden), 1)
        out.split(to + "attention.dense.weight", get("attn.c_proj.weight"), 0)
        out.save(to + "attention.dense.bias", get("attn.c_proj.bias"))
        out.split(to + "mlp.dense_h_to_4h.weight", get("mlp.c_fc.weight"), 1)
        out.split(to + "mlp.dense_h_to_4h.bias", get("mlp.c_fc.bias"), 0)
        out.split(to + "mlp.dense_4h_to_h.weight", get("mlp.c_proj.weight"), 0)
        out.save(to + "mlp.dense_4h_to_h.bias", get("mlp.c_proj.bias"))
    keys = common(model, dtype, config.n_inner or 4 * hidden)
    keys.update(max_pos_seq_len=config.n_positions, tensor_para_size=ranks, **extra)
    out.ini({"gpt": keys})
    return directory


def _fused_layers(out: Writer, state: dict, layers: int, heads: int, source: str, attention: str) -> None:
    """What BLOOM and GPT-NeoX share: matrices (out, in), and queries, keys and values head by head."""
    for layer in range(layers):
        get = lambda name, prefix=source.format(layer): state[prefix + name]  # noqa: E731
        to = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out.norm(to + norm, get(f"{norm}.weight"), get(f"{norm}.bias"))
        qkv = heads_apart(get(f"{attention}.query_key_value.weight"), heads)  # (3, H, C)
        out.split(to + "attention.query_key_value.weight", qkv.transpose(2, 0, 1), 2)
        bias = heads_apart(get(f"{attention}.query_key_value.bias"), heads)
        out.split(to + "attention.query_key_value.bias", bias, 1)
        out.split(to + "attention.dense.weight", get(f"{attention}.dense.weight").T, 0)
        out.split(to + "mlp.dense_h_to_4h.weight", get("mlp.dense_h_to_4h.weight").T, 1)
        out.split(to + "mlp.dense_h_to_4h.bias", get("mlp.dense_h_to_4h.bias"), 0)
        out.split(to + "mlp.dense_4h_to_h.weight", get("mlp.dense_4h_to_h.weight").T, 0)


def bloom(model: PreTrainedModel, directory: Path, ranks: int = 1, dtype: str = "fp32") -> Path:
    """huggingface_bloom_convert.py: "=" without spaces; a head of its own is written transposed; a residual
    from the norm is called post_layernorm."""
    out, state, config = Writer(directory, ranks, dtype), arrays(model), model.config
    prefix = "transformer."
    out.save("model.wte", state[prefix + "word_embeddings.weight"])
    for ours, theirs in (
        ("pre_decoder_layernorm", "word_embeddings_layernorm"),
        ("final_layernorm", "ln_f"),
    ):
        out.norm(f"model.{ours}", state[f"{prefix}{theirs}.weight"], state[f"{prefix}{theirs}.bias"])
    _fused_layers(out, state, config.n_layer, config.n_head, "transformer.h.{}.", "self_attention")
    for layer in range(config.n_layer):
        for ours, theirs in (
            ("attention.dense", "self_attention.dense"),
            ("mlp.dense_4h_to_h", "mlp.dense_4h_to_h"),
        ):
            out.save(f"model.layers.{layer}.{ours}.bias", state[f"{prefix}h.{layer}.{theirs}.bias"])
    if not config.tie_word_embeddings:
        out.save("model.lm_head.weight", state["lm_head.weight"].T)
    form = "post" if config.apply_residual_connection_post_layernorm else "pre"
    keys = common(model, dtype, 4 * config.hidden_size)
    keys.update(
        model_variant=f"bloom-{form}",
        layernorm_eps=config.layer_norm_epsilon,
        layernorm_type=f"{form}_layernorm",
        activation_type="Gelu",
        has_positional_encoding=False,
        has_pre_decoder_layernorm=True,
        has_post_decoder_layernorm=True,
        use_attention_linear_bias=True,
        tensor_para_size=ranks,
    )
    out.ini({"gpt": keys}, equals="=")
    return directory


def gptneox(model: PreTrainedModel, directory: Path, ranks: int = 1, dtype: str = "fp32") -> Path:
    """huggingface_gptneox_convert.py: both dense biases divided by the ranks, and their sum if parallel; no
    layernorm_eps, no positions."""
    out, state, config = Writer(directory, ranks, dtype), arrays(model), model.config
    out.save("model.wte", state["gpt_neox.embed_in.weight"])
    head = "lm_head.weight" if "lm_head.weight" in state else "embed_out.weight"
    out.save("model.lm_head.weight", state[head])
    final = "gpt_neox.final_layer_norm"
    out.norm("model.final_layernorm", state[f"{final}.weight"], state[f"{final}.bias"])
    heads = config.num_attention_heads
    _fused_layers(out, state, config.num_hidden_layers, heads, "gpt_neox.layers.{}.", "attention")
    for layer in range(config.num_hidden_layers):
        source, to = f"gpt_neox.layers.{layer}", f"model.layers.{layer}"
        attention = state[f"{source}.attention.dense.bias"] / ranks
        mlp = state[f"{source}.mlp.dense_4h_to_h.bias"] / ranks
        out.save(f"{to}.attention.dense.bias", attention)
        out.save(f"{to}.mlp.dense_4h_to_h.bias", mlp)
        if config.use_parallel_residual:
            out.save(f"{to}.mlp.attention.bias.sum", attention + mlp)
    keys = common(model, dtype, config.intermediate_size)
    rotary = int(config.hidden_size // heads * config.rope_parameters.get("partial_rotary_factor", 1.0))
    keys.update(rotary_embedding=rotary, use_gptj_residual=int(config.use_parallel_residual))
    out.ini({"gptneox": keys})
    return directory


def gptj(model: PreTrainedModel, directory: Path, ranks: int = 1, dtype: str = "fp32", **extra) -> Path:
    """huggingface_gptj_ckpt_convert.py: the head always has a weight and a bias; no layernorm_eps, no
    positions."""
    out, state, config = Writer(directory, ranks, dtype), arrays(model), model.config
    out.save("model.wte", state["transformer.wte.weight"])
    out.norm("model.final_layernorm", state["transformer.ln_f.weight"], state["transformer.ln_f.bias"])
    out.norm("model.lm_head", state["lm_head.weight"], state["lm_head.bias"])
    for layer in range(config.n_layer):
        get = lambda name, prefix=f"transformer.h.{layer}.": state[prefix + name]  # noqa: E731
        to = f"model.layers.{layer}."
        out.norm(to + "input_layernorm", get("ln_1.weight"), get("ln_1.bias"))
        qkv = np.stack([get(f"attn.{name}_proj.weight").T for name in "qkv"], axis=1)  # (C, 3, C)
        out.split(to + "attention.query_key_value.weight", qkv, 2)
        out.split(to + "attention.dense.weight", get("attn.out_proj.weight").T, 0)
        out.split(to + "mlp.dense_h_to_4h.weight", get("mlp.fc_in.weight").T, 1)
        out.split(to + "mlp.dense_h_to_4h.bias", get("mlp.fc_in.bias"), 0)
        out.split(to + "mlp.dense_4h_to_h.weight", get("mlp.fc_out.weight").T, 0)
        out.save(to + "mlp.dense_4h_to_h.bias", get("mlp.fc_out.bias"))
    keys = common(model, dtype, config.n_inner or 4 * config.n_embd)
    keys.update(rotary_embedding=config.rotary_dim)  # the text None where transformers has None
    keys.update(extra)
    out.ini({"gptj": keys})
    return directory


def opt(model: PreTrainedModel, directory: Path, ranks: int = 1, dtype: str = "fp32") -> Path:
    """huggingface_opt_convert.py: projections multiplied into embedding and head, the head in any case, the
    first two rows of positions left out."""
    out, state, config = Writer(directory, ranks, dtype), arrays(model), model.config
    words, head = state["model.decoder.embed_tokens.weight"], state["lm_head.weight"]
    if "model.decoder.project_in.weight" in state:
        words = words @ state["model.decoder.project_in.weight"].T
        head = head @ state["model.decoder.project_out.weight"]
    out.save("model.wte", words)
    out.save("model.lm_head.weight", head)
    out.save("model.wpe", state["model.decoder.embed_positions.weight"][2:])
    final = "model.decoder.final_layer_norm"
    if f"{final}.weight" in state:
        out.norm("model.final_layernorm", state[f"{final}.weight"], state[f"{final}.bias"])
    for layer in range(config.num_hidden_layers):
        get = lambda name, prefix=f"model.decoder.layers.{layer}.": state[prefix + name]  # noqa: E731
        to = f"model.layers.{layer}."
        out.norm(to + "input_layernorm", get("self_attn_layer_norm.weight"), get("self_attn_layer_norm.bias"))
        out.norm(
            to + "post_attention_layernorm", get("final_layer_norm.weight"), get("final_layer_norm.bias")
        )
        qkv = np.stack([get(f"self_attn.{part}_proj.weight").T for part in "qkv"], axis=1)
        out.split(to + "attention.query_key_value.weight", qkv, 2)
        bias = np.stack([get(f"self_attn.{part}_proj.bias") for part in "qkv"])
        out.split(to + "attention.query_key_value.bias", bias, 1)
        out.split(to + "attention.dense.weight", get("self_attn.out_proj.weight").T, 0)
        out.save(to + "attention.dense.bias", get("self_attn.out_proj.bias"))
        out.split(to + "mlp.dense_h_to_4h.weight", get("fc1.weight").T, 1)
        out.split(to + "mlp.dense_h_to_4h.bias", get("fc1.bias"), 0)
        out.split(to + "mlp.dense_4h_to_h.weight", get("fc2.weight").T, 0)
        out.save(to + "mlp.dense_4h_to_h.bias", get("fc2.bias"))
    keys = common(model, dtype, config.ffn_dim)
    keys.update(
        max_pos_seq_len=config.max_position_embeddings,
        layernorm_eps=1e-5,
        layernorm_type="pre_layernorm" if config.do_layer_norm_before else "post_layernorm",
        activation_type="Relu",
        has_post_decoder_layernorm=int(f"{final}.weight" in state),
    )
    out.ini({"gpt": keys})
    return directory
