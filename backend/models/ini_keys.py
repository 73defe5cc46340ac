"""The keys of config.ini: their meanings, and the errors for misspelt ones. No torch.

Types, defaults and families are not repeated here: `python -m tridecode.tools.generated_docs.config` reads
sections with every family and records the keys that it reads. Every key that a family reads has a row here,
and vice versa (`tests/tools/generated_docs/test_config_docs.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tridecode.backend.configuration.setting_values import Accepted

#: of the section of the model, e.g. [gpt]
KEYS = {
    "model_name": "name of the model, for messages",
    "model_variant": "`opt-…`: an OPT; `bloom-…`: a BLOOM of FasterTransformer's converter; default: none",
    "head_num": "query heads",
    "kv_head_num": "key/value heads; default: as many as query heads",
    "size_per_head": "size of a head",
    "hidden_units": "size of the residual stream; default: `head_num` * `size_per_head`",
    "inter_size": "inner size of the MLP",
    "num_layer": "layers",
    "vocab_size": "rows of the word embedding in its file",
    "max_pos_seq_len": "positions; mandatory where the model has a table of them",
    "start_id": "token that an empty prompt starts from",
    "end_id": "token that ends a sequence",
    "end_ids": "all tokens that end a sequence, `end_id` among them; default: `end_id` alone",
    "weight_data_type": "dtype of the weight files; the text contains fp32, fp16 or bf16",
    "embedding_size": "size of the word embedding, where a projection follows it; default: the hidden size",
    "layernorm_eps": "epsilon of the norms",
    "layernorm_type": "where the norms are: before attention and MLP, or after them",
    "layernorm_weights": "whether the norms have weights",
    "activation_type": "activation of the MLP; Gelu is the tanh form, gelu_erf the exact one",
    "has_positional_encoding": "whether positions are a learned table",
    "has_pre_decoder_layernorm": "whether a norm follows the embedding",
    "has_post_decoder_layernorm": "whether a norm precedes the head",
    "has_mlp_layernorm": "whether the MLP has a norm of its own, besides that of attention",
    "has_adapters": "NeMo's adapters in the network: refused",
    "expert_num": "experts of an MLP: more than one are refused",
    "moe_layers": "layers whose MLP has experts: refused",
    "use_attention_linear_bias": "ALiBi",
    "alibi_bias_max": "exponent of the ALiBi slopes",
    "use_gptj_residual": "attention and MLP both read the layer's input",
    "parallel_attention": "attention and MLP both read the layer's input",
    "residual_from_norm": "residuals are taken after the norm; default: as `layernorm_type` says",
    "attn_bias": "whether attention has biases",
    "mlp_bias": "whether the MLP has biases",
    "linear_bias": "whether attention and MLP have biases",
    "bias_sum": "whether the MLP's output bias includes attention's; default: as `use_gptj_residual`",
    "qk_layernorm": "whether query and key heads have norms",
    "attention_scale": "factor of the scores; default: 1 / sqrt(`size_per_head`)",
    "scale_attn_by_inverse_layer_idx": "layer l divides its scores by l + 1, counted from 0",
    "query_pre_attn_scalar": "scores are divided by its square root",
    "attn_logit_softcapping": "soft cap of the scores; 0: none",
    "final_logit_softcapping": "soft cap of the logits; 0: none",
    "clip_qkv": "limit of queries, keys and values; 0: none",
    "attention_windows": "tokens that a query of each layer sees, itself included; 0: all",
    "scale_embedding": "whether embeddings are multiplied by sqrt(hidden size)",
    "zero_position": "position whose embedding is zero; -1: none",
    "rotary_embedding": "rotated dimensions of a head; default: `size_per_head`, mandatory in four families",
    "rope_theta": "base of the rotary frequencies",
    "rope_scaling_type": "scaling of the rotary frequencies, by transformers' names",
    "rope_scaling_factor": "factor of the scaling",
    "rope_low_freq_factor": "llama3",
    "rope_high_freq_factor": "llama3",
    "rope_original_max_positions": "positions of the model before the scaling",
    "rope_beta_fast": "yarn",
    "rope_beta_slow": "yarn",
    "rope_truncate": "yarn",
    "rope_attention_factor": "factor of cos and sin",
    "rope_interleaved": "even dimensions are rotated against the next; else half against half",
    "rope_recompute": "longrope: a sequence that grows beyond the original positions is computed again",
    "rope_short_factors": "longrope: `rotary_embedding` / 2 numbers",
    "rope_long_factors": "longrope: `rotary_embedding` / 2 numbers",
    "head_num_per_layer": "query heads of each layer of a pruned model",
    "kv_head_num_per_layer": "key/value heads of each layer of a pruned model",
    "inter_size_per_layer": "MLP size of each layer of a pruned model",
    "kept_heads_per_layer": "query heads of each layer that pruning kept, lists separated by commas; -: all",
    "weight_quantization": "format of the layers' matrices in 8 or 4 bit (docs/guides/quantization.md)",
    "quantization_group": "inputs that share a scale; 0: all",
    "quantization_block_rows": "outputs that share a scale: 1, or 128 in blocks of fp8",
    "quantization_zeros": "int4: groups have zero points; else 8 stands for 0",
    "quantization_act_order": "the group of each input is in a file",
    "activation_quantization": "format that inputs of products are rounded to",
}
_POSITIVE = Accepted("more than 0", lambda value: value > 0)
_NOT_NEGATIVE = Accepted("0 or more", lambda value: value >= 0)
#: the values of a number, in every family that reads it
ACCEPTED = {
    "layernorm_eps": Accepted("0 to 1", lambda value: 0 <= value <= 1),
    "alibi_bias_max": _POSITIVE,
    "attention_scale": _POSITIVE,
    "query_pre_attn_scalar": _POSITIVE,
    "attn_logit_softcapping": _NOT_NEGATIVE,
    "final_logit_softcapping": _NOT_NEGATIVE,
    "clip_qkv": _NOT_NEGATIVE,
    "rope_theta": Accepted("more than 1", lambda value: value > 1),
    "rope_scaling_factor": _POSITIVE,
    "rope_low_freq_factor": _POSITIVE,
    "rope_high_freq_factor": _POSITIVE,
    "rope_beta_fast": _POSITIVE,
    "rope_beta_slow": _POSITIVE,
    "rope_attention_factor": _POSITIVE,
}
#: written by converters and ignored, in every family
NOT_READ = {
    "tensor_para_size": "degree that the files were written for: found from the files",
    "int8": "written by FasterTransformer's OPT converter",
    "adapter_inter_size": "of `has_adapters`",
    "num_tasks": "tasks of prompt learning",
    "prompt_learning_start_id": "of prompt learning",
    "prompt_learning_type": "of prompt learning",
}
#: of the sections [task_0], [task_1], … of prompt learning
TASK_KEYS = {
    "task_name": "name of the task",
    "prompt_length": "virtual tokens of the task",
}
#: prefix of the rotary keys of Gemma 3's layers with a window
LOCAL = "local_"
# minimum similarity; below it: layer_norm_epsilon, which converters copied from Hugging Face, and
# layernorm_eps
_CUTOFF = 0.88


def misspelt(name: str, absent: Iterable[str]) -> str | None:
    """Return the absent key that an unknown name resembles."""
    if name in KEYS or name in NOT_READ:
        return None
    return next(iter(difflib.get_close_matches(name[:64], list(absent), 1, _CUTOFF)), None)
