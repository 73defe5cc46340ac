"""FasterTransformer's ensemble, preprocessing and postprocessing: the tensors of their config.pbtxt."""

from __future__ import annotations

from tridecode.backend.doors.contracts.fastertransformer import FASTERTRANSFORMER
from tridecode.backend.doors.contracts.field import Contract, Field, Output, special_tokens_field

_WORDS = "words in one line of CSV, blanks kept"

PREPROCESSING = Contract(
    (
        Field("QUERY", "STRING", "prompt", dims=(-1,), kind="prompt", required=True),
        Field("BAD_WORDS_DICT", "STRING", _WORDS, dims=(-1,), kind="csv", required=True, lenient=True),
        Field("STOP_WORDS_DICT", "STRING", _WORDS, dims=(-1,), kind="csv", required=True, lenient=True),
        # [-1] in FasterTransformer; see request_output_len
        Field("REQUEST_OUTPUT_LEN", "UINT32", "number of new tokens", required=True, keeps_axis=True),
        special_tokens_field("ADD_SPECIAL_TOKENS"),  # ours
    ),
    (
        Output("INPUT_ID", "UINT32", (-1,), "token ids, padded with the tokenizer's end id"),
        Output("REQUEST_INPUT_LEN", "UINT32", (1,), "tokens of each row"),
        Output("BAD_WORDS_IDS", "INT32", (2, -1), "`bad_words_list` of `fastertransformer`"),
        Output("STOP_WORDS_IDS", "INT32", (2, -1), "`stop_words_list` of `fastertransformer`"),
        Output("REQUEST_OUTPUT_LEN", "UINT32", (-1,), "the input, unchanged"),
        Output("PROMPT_LEARNING_TASK_NAME_IDS", "UINT32", (1,)),
    ),
)

POSTPROCESSING = Contract(
    (
        Field("TOKENS_BATCH", "UINT32", "token ids", dims=(-1, -1), kind="ids", required=True),
        Field(
            "RESPONSE_INPUT_LENGTHS",
            "INT32",
            "no effect: required by FasterTransformer's postprocessing",
            dims=(-1,),
        ),
        # GPT-NeoX's
        Field("sequence_length", "UINT32", "valid tokens of each row", "all", declared=False),
        Field("SEQUENCE_LENGTH", "UINT32", alias_of="sequence_length", declared=False),
    ),
    (Output("OUTPUT", "STRING", (-1, -1), "[B * K]: one flat array of texts"),),
    own_batch_axis=True,
)

#: inputs of the fastertransformer model that the ensemble takes from preprocessing or does not have
_NOT_PASSED_ON = (
    "is_return_context_embeddings",
    "stop_words_list",
    "bad_words_list",
    "priority",
    "return_context_logits",
    "return_generation_logits",
    "sampling_params",
)

ENSEMBLE = Contract(
    (
        Field("INPUT_0", "STRING", "prompt", dims=(-1,), kind="prompt", required=True),
        Field("INPUT_1", "UINT32", "maximum number of new tokens", required=True, keeps_axis=True),
        Field("INPUT_2", "STRING", f"bad {_WORDS}", dims=(-1,), kind="csv", required=True),
        Field("INPUT_3", "STRING", f"stop {_WORDS}", dims=(-1,), kind="csv", required=True),
        *(
            field
            for field in FASTERTRANSFORMER.inputs
            if field.declared and not field.required and field.name not in _NOT_PASSED_ON
        ),
        special_tokens_field(),  # ours
    ),
    (
        Output("OUTPUT_0", "STRING", (-1, -1), "[B * K]: one flat array of whole texts, prompt included"),
        *(
            output
            for output in FASTERTRANSFORMER.outputs
            if output.name in ("sequence_length", "cum_log_probs", "output_log_probs")
        ),
    ),
)
