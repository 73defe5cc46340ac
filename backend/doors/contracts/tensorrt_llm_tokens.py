"""TensorRT-LLM's model `tensorrt_llm`, token ids in and out, and the models around it in its ensemble."""

from __future__ import annotations

from dataclasses import replace

from tridecode.backend.doors.contracts.field import (
    EVENTS,
    GUIDE_FIELDS,
    RESUME,
    SAMPLING_PARAMS,
    Contract,
    Field,
    Output,
    refused,
    special_tokens_field,
    with_parameters,
)
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM

_ENCODER = "no effect: only for models with an encoder"

_INPUTS = (
    Field("input_ids", "INT32", "prompts, padded to one width", "required", (-1,), "ids"),
    refused("encoder_input_features", "FP16", dims=(-1, -1)),
    refused("encoder_output_lengths", "INT32"),
    Field(
        "input_lengths",
        "INT32",
        "tokens of each row; 0: the row starts from the model's start id",
        required=True,
    ),
    Field("request_output_len", "INT32", param="max_tokens", required=True, keeps_axis=True),
    Field("num_return_sequences", "INT32", param="num_return_sequences"),
    Field(
        "draft_input_ids",
        "INT32",
        "ids that the answer probably contains, from which drafts are taken (`speculation`); -1 pads the end "
        "of a row. They do not change the answer",
        "none",
        (-1,),
        "ids",
    ),
    # TensorRT-LLM's preprocessing always makes these two
    Field("decoder_input_ids", "INT32", _ENCODER, dims=(-1,), kind="ids"),
    Field("decoder_input_lengths", "INT32", _ENCODER),
    refused("draft_logits", "FP32", dims=(-1, -1)),
    Field("draft_acceptance_threshold", "FP32", "no effect: a draft counts if it is the token that is drawn"),
    Field("end_id", "INT32", "token that ends a row; -1: none", "the model's"),
    Field("pad_id", "INT32", "fills the shorter rows of a whole answer", "`end_id`"),
    Field("stop_words_list", "INT32", "words that end a row and stay in it", "none", (2, -1), "word_ids"),
    Field("bad_words_list", "INT32", "words that are never generated", "none", (2, -1), "word_ids"),
    Field("embedding_bias", "FP32", "added to the logits of the ids from 0 on", "none", (-1,), "ids"),
    Field("beam_width", "INT32", param="beam_width"),
    Field("temperature", "FP32", param="temperature"),
    Field("runtime_top_k", "INT32", default="0", param="top_k"),
    Field("runtime_top_p", "FP32", default="0", param="top_p"),
    Field("runtime_top_p_min", "FP32", param="top_p_min"),
    Field("runtime_top_p_decay", "FP32", param="top_p_decay"),
    Field("runtime_top_p_reset_ids", "INT32", param="top_p_reset_id"),
    Field("len_penalty", "FP32", param="len_penalty"),
    Field(
        "early_stopping", "BOOL", "stop as soon as the pool of beams is full", "true", param="early_stopping"
    ),
    Field("repetition_penalty", "FP32", param="repetition_penalty"),
    Field("min_tokens", "INT32", param="min_tokens"),
    Field("beam_search_diversity_rate", "FP32", param="beam_search_diversity_rate"),
    Field("presence_penalty", "FP32", param="presence_penalty"),
    Field("frequency_penalty", "FP32", param="frequency_penalty"),
    Field("seed", "UINT64", param="seed"),
    Field("return_log_probs", "BOOL", "return `cum_log_probs` and `output_log_probs`", "false"),
    Field("return_context_logits", "BOOL", "return `context_logits`", "false"),
    Field("return_generation_logits", "BOOL", "return `generation_logits`", "false"),
    Field("return_perf_metrics", "BOOL", "return times, cache blocks and draft counts of each row", "false"),
    Field("exclude_input_in_output", "BOOL", "leave the prompt out of a whole answer", "`config.pbtxt`'s"),
    Field("stop", "BOOL", "stop the running request that has the same request id, see below", "false"),
    Field("streaming", "BOOL", "send new tokens as they are generated", "false"),
    refused("prompt_embedding_table", "FP16", dims=(-1, -1)),
    Field("prompt_table_extra_ids", "UINT64", dims=(-1,), kind="ids", refused=True, neutral=(0,)),
    refused("prompt_vocab_size", "INT32", (0,)),
    refused("cross_attention_mask", "BOOL", dims=(-1, -1)),
    refused("mrope_rotary_cos_sin", "FP32", dims=(-1,)),
    refused("mrope_position_deltas", "INT64"),
    refused("lora_task_id", "UINT64", (0,)),
    refused("lora_weights", "FP16", dims=(-1, -1)),
    refused("lora_config", "INT32", dims=(-1, 3)),
    refused("context_phase_params", "UINT8", dims=(-1,)),
    refused("skip_cross_attn_blocks", "BOOL", (False,)),
    refused("retention_token_range_starts", "INT32", dims=(-1,)),
    refused("retention_token_range_ends", "INT32", dims=(-1,)),
    refused("retention_token_range_priorities", "INT32", dims=(-1,)),
    refused("retention_token_range_durations_ms", "INT32", dims=(-1,)),
    refused("retention_decode_priority", "INT32"),
    refused("retention_decode_duration_ms", "INT32"),
    *GUIDE_FIELDS,
    refused("lookahead_window_size", "INT32", (0,)),
    refused("lookahead_ngram_size", "INT32", (0,)),
    refused("lookahead_verification_set_size", "INT32", (0,)),
    # in its last version
    Field("return_num_input_tokens", "BOOL", "return `num_input_tokens`", "true"),
    Field("return_num_output_tokens", "BOOL", "return `num_output_tokens`", "true"),
    # ours
    Field("priority", "INT32", "smaller values run first; one value per row", "0"),
    Field(
        "lora_name",
        "STRING",
        "name of the LoRA adapter of each row, see [adapters.md](../guides/adapters.md)",
        "the base model",
    ),
    RESUME,
    SAMPLING_PARAMS,
    # older names, which clients still send
    Field("min_length", "INT32", alias_of="min_tokens"),
    Field("random_seed", "UINT64", alias_of="seed"),
    Field("output_log_probs", "BOOL", alias_of="return_log_probs"),
)

_MEANINGS = {"sequence_index": "sample of the row; beams are in `output_ids`"}

_OUTPUTS = (
    # first, because benchmark_core_model.py counts the tokens of the first output, whatever its name
    Output("output_ids", "INT32", (-1, -1), "[B, K, n]: prompt and answer; in a stream, the new tokens"),
    Output("sequence_length", "INT32", (-1,), "[B, K]: ids of each sequence in `output_ids`"),
    *(
        replace(output, meaning=_MEANINGS.get(output.name, output.meaning))
        for output in TENSORRT_LLM.outputs
        if output.name not in ("text_output", "finish_reason")
    ),
    Output("context_phase_params", "UINT8", (-1,)),
    Output("finish_reason", "STRING", (1,), "`stop`, `length` or `abort`, with the last response of a row"),
    EVENTS,
)

#: "Streaming": a parameter that inflight_batcher_llm_client.py adds to its requests
TENSORRT_LLM_TOKENS = Contract(
    with_parameters(_INPUTS, "INT32"), _OUTPUTS, reshape_scalars=True, parameters=("Streaming",)
)

_WORDS = "words, one an element; empty ones are ignored"

TENSORRT_LLM_PREPROCESSING = Contract(
    (
        Field("QUERY", "STRING", "prompt; no chat template is applied", kind="prompt", required=True),
        refused("DECODER_QUERY", "STRING", (b"",), kind="prompt"),
        refused("IMAGE_BYTES", "UINT8", dims=(-1, -1, -1, -1)),
        refused("IMAGE_URL", "STRING", (b"",)),
        refused("VIDEO_BYTES", "UINT8", dims=(-1, -1, -1, -1)),
        Field("REQUEST_OUTPUT_LEN", "INT32", "number of new tokens", required=True),
        Field("BAD_WORDS_DICT", "STRING", _WORDS, "none", (-1,), "words"),
        Field("STOP_WORDS_DICT", "STRING", _WORDS, "none", (-1,), "words"),
        Field("EMBEDDING_BIAS_WORDS", "STRING", "words whose tokens get a bias", "none", (-1,), "words"),
        Field("EMBEDDING_BIAS_WEIGHTS", "FP32", "the bias of each word", "none", (-1,), "words"),
        Field("END_ID", "INT32", "`OUT_END_ID`", "the tokenizer's"),
        Field("PAD_ID", "INT32", "`OUT_PAD_ID`, which fills the shorter rows", "the tokenizer's end id"),
        refused("PROMPT_TABLE_EXTRA_ID", "UINT64", (0,)),
        special_tokens_field("ADD_SPECIAL_TOKENS"),  # ours
    ),
    (
        Output("INPUT_ID", "INT32", (-1,), "token ids, padded to the longest row"),
        Output("REQUEST_INPUT_LEN", "INT32", (1,), "tokens of each row"),
        Output("DECODER_INPUT_ID", "INT32", (-1,), "`OUT_PAD_ID`"),
        Output("REQUEST_DECODER_INPUT_LEN", "INT32", (1,), "1"),
        Output("BAD_WORDS_IDS", "INT32", (2, -1), "`bad_words_list` of `tensorrt_llm`"),
        Output("STOP_WORDS_IDS", "INT32", (2, -1), "`stop_words_list` of `tensorrt_llm`"),
        Output("EMBEDDING_BIAS", "FP32", (-1,), "`embedding_bias` of `tensorrt_llm`; empty without biases"),
        Output("REQUEST_OUTPUT_LEN", "INT32", (-1,), "the input, unchanged"),
        Output("OUT_END_ID", "INT32", (1,), "`end_id` of `tensorrt_llm`; -1 if the tokenizer has none"),
        Output("OUT_PAD_ID", "INT32", (1,), "`pad_id` of `tensorrt_llm`"),
        Output("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", (-1,)),
        Output("PIXEL_VALUES", "FP16", (-1, -1, -1, -1)),
        Output("ASPECT_RATIO_IDS", "INT64", (-1,)),
        Output("ASPECT_RATIO_MASK", "INT64", (-1, -1)),
        Output("CROSS_ATTENTION_MASK", "INT64", (-1, -1, -1)),
        Output("IMAGE_SIZES", "INT64", (2,)),
        Output("IS_VIDEO_INPUT", "BOOL", (1,)),
        Output("ATTENTION_MASK", "INT64", (-1,)),
        Output("IMAGE_GRID_THW", "INT64", (3,)),
        Output("VISION_INPUT_ID", "INT32", (-1,)),
    ),
)

TENSORRT_LLM_POSTPROCESSING = Contract(
    (
        Field("TOKENS_BATCH", "INT32", "token ids", dims=(-1, -1), kind="ids", required=True),
        Field("SEQUENCE_LENGTH", "INT32", "valid ids of each row", dims=(-1,), required=True),
    ),
    (Output("OUTPUT", "STRING", (-1, -1), "[B * K]: one flat array of texts"),),
    own_batch_axis=True,
)

#: input of the ensemble -> input of preprocessing
TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
    "add_special_tokens": "ADD_SPECIAL_TOKENS",
}
#: input of the ensemble -> input of tensorrt_llm, where the names differ
_RENAMED = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
    "top_p_decay": "runtime_top_p_decay",
    "top_p_min": "runtime_top_p_min",
    "top_p_reset_ids": "runtime_top_p_reset_ids",
}
#: inputs of the text models that the ensemble lacks: a stop request has no text
_NOT_PASSED_ON = ("stop", "priority")

TENSORRT_LLM_ENSEMBLE = Contract(
    tuple(
        # preprocessing and tensorrt_llm require the number of new tokens
        replace(field, required=True, default="") if field.name == "max_tokens" else field
        for field in TENSORRT_LLM.inputs
        if field.declared and field.name not in _NOT_PASSED_ON
    ),
    # two axes besides the batch axis: with one, Triton would prepend an axis of 1 to postprocessing's flat
    # array
    tuple(
        replace(output, dims=(-1, -1)) if output.name == "text_output" else output
        for output in TENSORRT_LLM.outputs
    ),
)
#: input of the ensemble -> input of tensorrt_llm
TO_TOKENS = {
    field.name: _RENAMED.get(field.name, field.name)
    for field in TENSORRT_LLM_ENSEMBLE.inputs
    if field.name not in TO_PREPROCESSING
}
#: output of preprocessing -> input of tensorrt_llm
BETWEEN = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
