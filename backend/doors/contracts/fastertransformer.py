"""Token ids in, token ids out: the tensors of FasterTransformer's backend (config.pbtxt of gpt, bloom)."""

from __future__ import annotations

from tridecode.backend.doors.contracts.field import Contract, Field, Output, refused, with_parameters

_INPUTS = (
    Field("input_ids", "UINT32", "prompts, padded to one width", dims=(-1,), kind="ids", required=True),
    Field("input_lengths", "UINT32", "tokens of each row; 0: the row starts from `start_id`", required=True),
    Field("request_output_len", "UINT32", dims=(-1,), param="max_tokens", required=True),
    Field("runtime_top_k", "UINT32", default="0", param="top_k"),
    Field("runtime_top_p", "FP32", default="0", param="top_p"),
    refused("beam_search_diversity_rate", "FP32", (0.0,)),
    Field("temperature", "FP32", param="temperature"),
    Field("len_penalty", "FP32", "no effect: it compares beams"),
    Field("repetition_penalty", "FP32", param="repetition_penalty"),
    Field("random_seed", "UINT64", param="seed"),
    Field("is_return_log_probs", "BOOL", "false: `cum_log_probs` and `output_log_probs` are zeros", "false"),
    Field("is_return_context_embeddings", "BOOL", "return `context_embeddings`", "false"),
    refused("beam_width", "UINT32", (1,)),
    Field("start_id", "UINT32", "first token of a row without a prompt", "`config.ini`'s"),
    Field("end_id", "UINT32", "token that ends a row and fills it to the full width", "`config.ini`'s"),
    Field("stop_words_list", "INT32", "words that end a row and stay in it", "none", (2, -1), "word_ids"),
    Field("bad_words_list", "INT32", "words that are never generated", "none", (2, -1), "word_ids"),
    refused("prompt_learning_task_name_ids", "UINT32"),
    refused("request_prompt_embedding", "FP16", dims=(-1, -1)),
    refused("request_prompt_lengths", "UINT32"),
    refused("request_prompt_type", "UINT32"),
    Field("top_p_decay", "FP32", param="top_p_decay"),
    Field("top_p_min", "FP32", param="top_p_min"),
    Field("top_p_reset_ids", "UINT32", param="top_p_reset_id"),
    # FasterTransformer accepted these two where a user had added them to its config
    Field("presence_penalty", "FP32", param="presence_penalty"),
    Field("min_length", "UINT32", param="min_tokens"),
    # ours
    Field("priority", "INT32", "smaller is sooner; one value for all rows", "0"),
    Field(
        "lora_name",
        "STRING",
        "name of the LoRA adapter of each row, see [adapters.md](adapters.md)",
        "the base model",
    ),
    refused("is_return_context_cum_log_probs", "BOOL", (False,), declared=False),
    refused("session_len", "UINT32", declared=False),
    refused("memory_len", "UINT32", declared=False),
)

_OUTPUTS = (
    Output("output_ids", "UINT32", (-1, -1), "[B, 1, W + longest]: prompt and answer, then `end_id`"),
    Output("sequence_length", "UINT32", (-1,), "tokens of prompt and answer"),
    Output("response_input_lengths", "INT32", (-1,), "tokens of the prompt"),
    Output("cum_log_probs", "FP32", (-1,), "sum of `output_log_probs` over the row"),
    Output("output_log_probs", "FP32", (-1, -1), "[B, 1, longest]: log probability of each new token"),
    Output("context_embeddings", "FP32", (-1, -1), "[B, 1, hidden size]: last hidden states, summed"),
)

FASTERTRANSFORMER = Contract(
    with_parameters(_INPUTS, "UINT32", without=("frequency_penalty",)), _OUTPUTS, reshape_scalars=True
)
