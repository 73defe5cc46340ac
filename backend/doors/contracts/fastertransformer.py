"""Token ids in, token ids out: the tensors of FasterTransformer's backend (config.pbtxt of gpt, bloom)."""

from __future__ import annotations

from tridecode.backend.doors.contracts.field import (
    EVENTS,
    RESUME,
    SAMPLING_PARAMS,
    Contract,
    Field,
    Output,
    refused,
    with_parameters,
)

_INPUTS = (
    Field("input_ids", "UINT32", "prompts, padded to one width", dims=(-1,), kind="ids", required=True),
    Field("input_lengths", "UINT32", "tokens of each row; 0: the row starts from `start_id`", required=True),
    # FasterTransformer declares [-1] and reads B numbers; with [1] Triton refuses a request without rows,
    # which its python backend would neither execute nor answer
    Field("request_output_len", "UINT32", param="max_tokens", required=True, keeps_axis=True),
    Field("runtime_top_k", "UINT32", default="0", param="top_k"),
    Field("runtime_top_p", "FP32", default="0", param="top_p"),
    Field("beam_search_diversity_rate", "FP32", param="beam_search_diversity_rate"),
    Field("temperature", "FP32", param="temperature"),
    Field("len_penalty", "FP32", param="len_penalty"),
    Field("repetition_penalty", "FP32", param="repetition_penalty"),
    Field("random_seed", "UINT64", param="seed"),
    Field("is_return_log_probs", "BOOL", "false: `cum_log_probs` and `output_log_probs` are zeros", "false"),
    Field("is_return_context_embeddings", "BOOL", "return `context_embeddings`", "false"),
    Field("beam_width", "UINT32", param="beam_width"),
    Field("start_id", "UINT32", "first token of a row without a prompt", "`config.ini`'s"),
    Field("end_id", "UINT32", "token that ends a row and pads it to the full width", "`config.ini`'s"),
    Field("stop_words_list", "INT32", "words that end a row and stay in it", "none", (2, -1), "word_ids"),
    Field("bad_words_list", "INT32", "words that are never generated", "none", (2, -1), "word_ids"),
    Field(
        "prompt_learning_task_name_ids",
        "UINT32",
        "number of the row's task, see [prompt_learning.md](../guides/prompt_learning.md)",
        "none",
    ),
    Field(
        "request_prompt_embedding",
        "FP16",
        "a prompt table for this row only, instead of a task's; FP32 if config.pbtxt says so",
        "none",
        (-1, -1),
        "table",
    ),
    Field(
        "request_prompt_lengths", "UINT32", "positions of `request_prompt_embedding`; 0: no prompt", "none"
    ),
    Field("request_prompt_type", "UINT32", "0 none, 1 soft prompt, 2 prefix prompt, 3 p-tuning", "none"),
    Field("top_p_decay", "FP32", param="top_p_decay"),
    Field("top_p_min", "FP32", param="top_p_min"),
    Field("top_p_reset_ids", "UINT32", param="top_p_reset_id"),
    # FasterTransformer accepted these two where a user had added them to its config
    Field("presence_penalty", "FP32", param="presence_penalty"),
    Field("min_length", "UINT32", param="min_tokens"),
    # FasterTransformer read it where a user had added it
    Field(
        "is_return_context_cum_log_probs",
        "BOOL",
        "add the prompt's log probability to `cum_log_probs`",
        "false",
    ),
    # ours
    Field("return_context_logits", "BOOL", "return `context_logits`", "false"),
    Field("return_generation_logits", "BOOL", "return `generation_logits`", "false"),
    Field("priority", "INT32", "smaller values run first; one value for all rows", "0"),
    Field(
        "lora_name",
        "STRING",
        "name of the LoRA adapter of each row, see [adapters.md](../guides/adapters.md)",
        "the base model",
    ),
    RESUME,
    SAMPLING_PARAMS,
    refused("session_len", "UINT32", declared=False),
    refused("memory_len", "UINT32", declared=False),
)

_OUTPUTS = (
    Output(
        "output_ids",
        "UINT32",
        (-1, -1),
        "[B, K, W + longest]: prompt and answer, then `end_id`; best beam first",
    ),
    Output("sequence_length", "UINT32", (-1,), "[B, K]: tokens of prompt and answer"),
    Output("response_input_lengths", "INT32", (-1,), "[B, K]: tokens of the prompt"),
    Output("cum_log_probs", "FP32", (-1,), "[B, K]: sum of `output_log_probs` over the row"),
    Output("output_log_probs", "FP32", (-1, -1), "[B, K, longest]: log probability of each new token"),
    Output(
        "context_embeddings",
        "FP32",
        (-1, -1),
        "[B, K, hidden size]: sum over the prompt of the last layer's output, before the final norm",
    ),
    Output("context_logits", "FP32", (-1, -1), "[B, L, vocabulary]: logits at each token of the prompt"),
    Output("generation_logits", "FP32", (-1, -1, -1), "[B, 1, longest, vocabulary]: those of new tokens"),
    EVENTS,
)

FASTERTRANSFORMER = Contract(
    with_parameters(_INPUTS, "UINT32", without=("early_stopping", "num_return_sequences")),
    _OUTPUTS,
    reshape_scalars=True,
)
