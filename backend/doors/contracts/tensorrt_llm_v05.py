"""The ensemble of TensorRT-LLM's backend v0.5: whole numbers are UINT32, and word lists are required."""

from __future__ import annotations

from dataclasses import replace

from tridecode.backend.doors.contracts.field import Contract, Field
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM

#: in the order of its config.pbtxt: name -> what differs from the last version
_INPUTS: dict[str, dict] = {
    "text_input": {"dims": (-1,)},
    # [-1] in TensorRT-LLM; see request_output_len of FasterTransformer
    "max_tokens": {"dtype": "UINT32", "required": True, "default": ""},
    "bad_words": {"required": True, "lenient": True},
    "stop_words": {"required": True, "lenient": True},
    "end_id": {"dtype": "UINT32"},
    "pad_id": {"dtype": "UINT32"},
    "top_k": {"dtype": "UINT32"},
    "top_p": {},
    "temperature": {},
    "length_penalty": {},
    "repetition_penalty": {},
    "min_tokens": {"name": "min_length", "dtype": "UINT32"},
    "presence_penalty": {},
    "seed": {"name": "random_seed"},
    "beam_width": {"dtype": "UINT32"},
    "stream": {},
}
#: the last version's names, which the door reads itself, and later inputs, which old clients may ignore
_MORE = (
    "exclude_input_in_output",
    "return_log_probs",
    "stop",
    "priority",
    "lora_name",
    "add_special_tokens",
    "resume",
)


def _inputs() -> tuple[Field, ...]:
    old = tuple(replace(TENSORRT_LLM.by_name[name], **changes) for name, changes in _INPUTS.items())
    return old + tuple(TENSORRT_LLM.by_name[name] for name in _MORE)


TENSORRT_LLM_V05 = Contract(
    _inputs(),
    tuple(
        replace(output, dims=(-1, -1)) if output.name == "text_output" else output
        for output in TENSORRT_LLM.outputs
        if output.name in ("text_output", "cum_log_probs", "output_log_probs", "batch_index", "finish_reason")
    ),
)
