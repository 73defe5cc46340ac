"""Conversations in FasterTransformer's tensors: the repository gpt-interactive-text-generation.

Every tensor has one more leading axis, of size 1: Triton's sequence batcher merges requests along it. The
rows of a request are its second axis. A round names its conversation by Triton's sequence id, start and end.
"""

from __future__ import annotations

from dataclasses import replace

from tridecode.backend.doors.contracts.ensemble import ENSEMBLE, POSTPROCESSING, PREPROCESSING
from tridecode.backend.doors.contracts.fastertransformer import FASTERTRANSFORMER
from tridecode.backend.doors.contracts.field import CACHE_FIELDS, Contract, Field, Output, refused

#: control inputs, declared in config.pbtxt, in which Triton describes a request of a sequence
CONTROLS = ("START", "READY", "END", "CORRID")
#: inputs of the plain model that a round cannot have
_REFUSED = {
    "beam_width": refused("beam_width", "UINT32", (1,)),
    "beam_search_diversity_rate": refused("beam_search_diversity_rate", "FP32", (0.0,)),
    "prompt_learning_task_name_ids": refused("prompt_learning_task_name_ids", "UINT32"),
    "request_prompt_embedding": refused("request_prompt_embedding", "FP16", dims=(-1, -1)),
    "request_prompt_lengths": refused("request_prompt_lengths", "UINT32"),
    "request_prompt_type": refused("request_prompt_type", "UINT32"),
}
_TAKEN = (
    "input_ids",
    "input_lengths",
    "is_return_log_probs",
    "len_penalty",
    "start_id",
    "end_id",
    "stop_words_list",
    "bad_words_list",
    "priority",
    "lora_name",
    "resume",
)
_MEANINGS = {
    "input_ids": "new tokens of each row, padded to one width",
    "input_lengths": "new tokens of each row; 0: the row continues without any, or starts from `start_id`",
    "priority": "smaller values run first; one value for all rows",
}


def _inputs() -> list[Field]:
    taken = []
    for field in FASTERTRANSFORMER.inputs:
        if field.name in _REFUSED:
            taken.append(_REFUSED[field.name])
        elif field.name in _TAKEN or (field.param and field.declared and field not in CACHE_FIELDS):
            taken.append(replace(field, meaning=_MEANINGS.get(field.name, field.meaning)))
    return taken


_SESSION = (
    Field(
        "session_len",
        "UINT32",
        "maximum tokens of a row over all rounds; send it with the first round",
        "required there",
    ),
    Field(
        "memory_len",
        "UINT32",
        "attention window in tokens; send it with the first round",
        "`session_len`",
    ),
)


def _deeper(contract: Contract, inputs: tuple[Field, ...], outputs: tuple[Output, ...]) -> Contract:
    """Return the contract of these tensors, each with one more leading axis."""
    return Contract(
        tuple(replace(field, dims=(-1, *((-1,) if field.keeps_axis else field.dims))) for field in inputs),
        tuple(replace(output, dims=(-1, *output.dims)) for output in outputs),
        contract.reshape_scalars,
        leading_axis=True,
    )


INTERACTIVE = _deeper(
    FASTERTRANSFORMER,
    (
        *_inputs(),
        *_SESSION,
        Field("START", "INT32", "first round", declared=False),
        Field("READY", "INT32", "false: an unused entry of Triton's batch", declared=False),
        Field("END", "INT32", "last round", declared=False),
        Field("CORRID", "UINT64", "sequence id", declared=False),
    ),
    (
        Output("output_ids", "UINT32", (-1, -1), "[1, B, 1, history + W + longest]: the whole conversation"),
        Output("sequence_length", "UINT32", (-1,), "[1, B, 1]: tokens of the conversation"),
        Output("cum_log_probs", "FP32", (-1,), "[1, B, 1]: sum of `output_log_probs` over the row"),
        Output(
            "output_log_probs",
            "FP32",
            (-1, -1),
            "[1, B, 1, longest]: log probability of each token of this answer",
        ),
    ),
)


def _in_later_rounds(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Change the default of add_special_tokens, the last field: it depends on the round."""
    default = "first round: `config.pbtxt`'s; later: false"
    return (*fields[:-1], replace(fields[-1], default=default))


INTERACTIVE_PREPROCESSING = _deeper(
    PREPROCESSING, _in_later_rounds(PREPROCESSING.inputs), PREPROCESSING.outputs
)

INTERACTIVE_POSTPROCESSING = Contract(
    _deeper(
        POSTPROCESSING, tuple(f for f in POSTPROCESSING.inputs if f.name != "RESPONSE_INPUT_LENGTHS"), ()
    ).inputs,
    POSTPROCESSING.outputs,
    leading_axis=True,
)

#: inputs that the ensemble takes from preprocessing or does not have
_NOT_PASSED_ON = ("stop_words_list", "bad_words_list", "priority")

INTERACTIVE_ENSEMBLE = Contract(
    (
        *_deeper(ENSEMBLE, ENSEMBLE.inputs[:4], ()).inputs,
        *(f for f in INTERACTIVE.inputs if f.declared and not f.required and f.name not in _NOT_PASSED_ON),
        *_deeper(ENSEMBLE, _in_later_rounds(ENSEMBLE.inputs[-1:]), ()).inputs,
    ),
    (
        ENSEMBLE.outputs[0],
        *(output for output in INTERACTIVE.outputs if output.name != "output_ids"),
    ),
    leading_axis=True,
)
