"""The tensors of TensorRT-LLM's LLM API model: a text model `tensorrt_llm` without a batch axis.

Source: triton_backend/all_models/llmapi/tensorrt_llm/config.pbtxt of TensorRT-LLM.
"""

from __future__ import annotations

from tridecode.backend.doors.contracts.field import (
    CACHE_FIELDS,
    RESUME,
    Contract,
    Field,
    Output,
    refused,
    special_tokens_field,
)

_PREFIX = "sampling_param_"
_INPUTS = (
    Field(
        "text_input",
        "STRING",
        "prompts; no chat template is applied",
        dims=(-1,),
        kind="prompt",
        required=True,
    ),
    refused("image_url", "STRING", (b"",)),
    Field("streaming", "BOOL", "send pieces of the answer as they are generated", "false"),
    Field(
        _PREFIX + "best_of",
        "INT32",
        "sample this many answers to a prompt, return the one with the highest log probability; no stream",
        "1",
    ),
    Field(_PREFIX + "temperature", "FP32", param="temperature"),
    Field(_PREFIX + "top_k", "INT32", default="0", param="top_k"),
    Field(_PREFIX + "top_p", "FP32", default="1", param="top_p"),
    Field(_PREFIX + "frequency_penalty", "FP32", param="frequency_penalty"),
    Field(_PREFIX + "presence_penalty", "FP32", param="presence_penalty"),
    Field(_PREFIX + "max_tokens", "INT32", default="32", param="max_tokens"),
    Field(_PREFIX + "stop", "STRING", "texts that end the answer", "none", (-1,), "words"),
    Field(_PREFIX + "seed", "UINT64", param="seed"),
    Field(
        _PREFIX + "exclude_input_from_output",
        "BOOL",
        "leave the prompt out of a whole answer",
        "`config.pbtxt`'s",
    ),
    Field(
        _PREFIX + "return_perf_metrics", "BOOL", "return times and cache blocks with a whole answer", "false"
    ),
    Field("return_finish_reason", "BOOL", "return `finish_reason`", "false"),
    Field("return_stop_reason", "BOOL", "return `stop_reason`", "false"),
    Field("return_cumulative_logprob", "BOOL", "return `cumulative_logprob`", "false"),
    Field("stop", "BOOL", "stop the running request that has the same request id, see below", "false"),
    Field(
        "lora_name",
        "STRING",
        "name of the LoRA adapter, see [adapters.md](../guides/adapters.md)",
        "the base model",
    ),
    RESUME,
    Field("lora_id", "UINT64", "no effect: the name chooses the adapter"),
    refused("lora_path", "STRING", (b"",)),
    refused("lora_ckpt_source", "STRING", (b"", b"hf")),
    special_tokens_field(),  # ours
    *CACHE_FIELDS,
)

_OUTPUTS = (
    Output("text_output", "STRING", (-1,), "one text per prompt"),
    Output("finish_reason", "STRING", (-1,), "`stop`, `length` or `abort`; `None` while it is generated"),
    Output("stop_reason", "STRING", (-1,), "the stop text that ended the answer, else `None`"),
    Output("cumulative_logprob", "FP32", (-1,), "sum of the log probabilities of the new tokens so far"),
    Output("kv_cache_reused_block", "INT32", (1,), "cache blocks reused from an earlier request"),
    Output("kv_cache_hit_rate", "FP32", (1,), "share of reused blocks in the blocks of the prompt"),
    Output("kv_cache_alloc_new_blocks", "INT32", (1,), "cache blocks allocated for prompt and answer"),
    Output("kv_cache_alloc_total_blocks", "INT32", (1,), "reused and allocated cache blocks"),
    Output("kv_cache_missed_block", "INT32", (1,), "cache blocks of the prompt that were not reused"),
    Output(
        "arrival_time_ns",
        "INT64",
        (1,),
        "when the engine got the request; all times are since the Unix epoch",
    ),
    Output("first_scheduled_time_ns", "INT64", (1,), "when its first step began"),
    Output("first_token_time_ns", "INT64", (1,), "when its first new token was known"),
    Output("last_token_time_ns", "INT64", (1,), "when its last token was known"),
    Output("acceptance_rate", "FP32", (1,), "accepted drafts / drafts; 0 without drafts"),
    Output("total_accepted_draft_tokens", "INT32", (1,), "drafts that became tokens of the answer"),
    Output("total_draft_tokens", "INT32", (1,), "drafts that steps verified (`speculation`)"),
)

LLMAPI = Contract(_INPUTS, _OUTPUTS, batched=False)
