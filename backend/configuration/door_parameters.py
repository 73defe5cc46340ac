"""The parameters in config.pbtxt that doors read: one row each, and nothing else repeats a row.

The rows define DoorSettings (`door_settings.py`), the errors for unknown names, and a table of
docs/reference/config_pbtxt.md. The engine's own rows are the fields of
`backend.configuration.engine_config.EngineConfig`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tridecode.backend.base.errors import ConfigError


@dataclass(frozen=True)
class Parameter:
    """One key of `parameters`.

    type: "int", "float", "bool" or "str". wanted: describes the accepted values.
    """

    name: str
    type: str
    default: Any
    wanted: str
    meaning: str


@dataclass(frozen=True)
class DoorParameter(Parameter):
    """convert: text to value, ValueError for any other text. models: which doors use it, for the guide."""

    convert: Callable[[str], Any] = str
    models: str = "all"


def _flag(text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError(text)


def _senders(text: str) -> int:
    if not 1 <= int(text) <= 64:
        raise ValueError(text)
    return int(text)


def _cores(text: str) -> int:
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def _size(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


def _pause(text: str) -> float:
    if not float(text) >= 0:
        raise ValueError(text)
    return float(text)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _count(name: str, default: int | None, meaning: str, models: str) -> DoorParameter:
    return DoorParameter(name, "int", default, "a whole number of 1 or more", meaning, _size, models)


def _true_or_false(name: str, default: bool, meaning: str, models: str) -> DoorParameter:
    return DoorParameter(name, "bool", default, "true or false", meaning, _flag, models)


def _time(name: str, default: float | None, meaning: str, models: str) -> DoorParameter:
    return DoorParameter(name, "float", default, "more than 0 seconds", meaning, _seconds, models)


_ENGINE_DOORS = "models with an engine"
_TOKENS = "models of token ids"
_ANSWERS = "text models, `tensorrt_llm`"
_TOKENISING = "text models, `preprocessing`"
_DECODING = "text models, `postprocessing`"
_FOLDER = "a folder's name"

#: About one step of many sequences, too short for a client to notice. Measured on 2 cores: with half of it,
#: 64 streams at the server's limit of 10,000 responses per second had 10 % of them merged instead of 1 %;
#: with 0.03, tokens of 256 streams above that limit waited in the door for 24 ms instead of 13 (90th
#: percentile).
MERGE_BEHIND_S = 0.02

DOOR_PARAMETERS: tuple[DoorParameter, ...] = (
    DoorParameter(
        "engine_model",
        "str",
        "fastertransformer",
        _FOLDER,
        "model of this repository whose `config.pbtxt` configures the engine",
    ),
    DoorParameter(
        "tokenizer_dir",
        "str",
        ".",
        _FOLDER,
        "folder of `tokenizer.json`, relative to the repository",
        models="models with texts",
    ),
    DoorParameter(
        "stop_ids",
        "str",
        (),
        "token ids separated by commas",
        "further ids that end a text, as the end ids of `config.ini` do",
        _ids,
        _ANSWERS,
    ),
    _count(
        "default_max_tokens",
        256,
        "new tokens if a request sends no `max_tokens`, or fewer if the prompt leaves less room",
        "text models of TensorRT-LLM's ensemble",
    ),
    _true_or_false(
        "exclude_input_in_output",
        False,
        "default for requests: whether a whole answer is sent without its prompt",
        _ANSWERS,
    ),
    _true_or_false(
        "add_special_tokens",
        False,
        "whether the tokenizer adds its special tokens, such as a BOS; `build-repo` writes true",
        _TOKENISING,
    ),
    _time(
        "session_idle_s",
        None,
        "a session without a round for this long ends; auto: `max_sequence_idle_microseconds`",
        "interactive models",
    ),
    _true_or_false("skip_special_tokens", True, "whether special tokens are left out of answers", _DECODING),
    _true_or_false(
        "wrap_token_ids",
        False,
        "an id beyond the vocabulary is taken modulo its size, for benchmarks; otherwise it is refused",
        "`tensorrt_llm`",
    ),
    DoorParameter(
        "num_senders",
        "int",
        4,
        "a number from 1 to 64",
        "threads that send responses",
        _senders,
        _ENGINE_DOORS,
    ),
    DoorParameter(
        "door_cores",
        "int",
        None,
        "0 or a number of cores",
        "cores that the threads of the door share, since waking a thread on another core takes long; 0: all; "
        "auto: 1 of 4 or more, else all",
        _cores,
        _ENGINE_DOORS,
    ),
    _time(
        "merge_behind_s",
        MERGE_BEHIND_S,
        "longest queue of streamed responses, in seconds to send it; beyond it tokens share a response; "
        "inf: never",
        _TOKENS,
    ),
    _true_or_false(
        "wait_for_engine", True, "whether the model becomes ready only when the engine is", _ENGINE_DOORS
    ),
    _time("start_timeout_s", 900.0, "longest wait for the engine when the model loads", _ENGINE_DOORS),
    DoorParameter(
        "hold_s",
        "float",
        2.0,
        "a number of seconds",
        "longest wait of a request for an engine that is being rebuilt",
        float,
        _ENGINE_DOORS,
    ),
    DoorParameter(
        "resume_within_s",
        "float",
        60.0,
        "0 or more seconds",
        "longest wait of a request for the next engine after its own has died; with a timeout it waits until "
        "then instead; 0: requests end with their engine",
        _pause,
        _ENGINE_DOORS,
    ),
    _time(
        "probe_timeout_s",
        5.0,
        "a step of the engine that takes longer, or 100 mean steps if that is more, counts as stuck",
        "`tridecode_health`",
    ),
    DoorParameter(
        "made_by",
        "str",
        "",
        "options of `build-repo`",
        "the build option that adds the model that a placeholder stands for",
        models="stand-ins",
    ),
    DoorParameter(
        "allowed_parameters",
        "str",
        (),
        "names separated by commas",
        "request parameters to ignore instead of refusing them; may be patterns such as `x_*`",
        _names,
    ),
    _count("max_prompt_bytes", None, "bytes of one text; auto: 32 per token of a sequence", _TOKENISING),
    _count("max_request_bytes", None, "bytes of all texts of a request; auto: 8 such texts", _TOKENISING),
    _count(
        "max_response_elements",
        4_194_304,
        "numbers in one response, and in one input tensor",
        f"{_TOKENS}, `preprocessing`, `postprocessing`",
    ),
    _count("max_stream_elements", 1_073_741_824, "numbers in all responses of a request", _TOKENS),
    _count(
        "max_preparing_requests",
        1024,
        "requests that were received and not yet submitted to the engine",
        _ENGINE_DOORS,
    ),
    _count("max_preparing_bytes", 67_108_864, "bytes of their texts and token ids", _ENGINE_DOORS),
)

#: keys that neither doors nor engine read: key -> meaning, for the guide
OTHER_PARAMETERS = {
    "model_type": "FasterTransformer's name of the network; `config.ini` in the weight directory decides",
    "model_checkpoint_path": "the weight directory; a relative path starts from the version folder",
    "EXECUTION_ENV_PATH": "of Triton's python backend",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "of Triton's python backend",
}
_LONGEST_NAME = 64  # compared characters: the time is quadratic


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelt one probably means."""
    spelt = {one.lower(): one for one in known}
    found = difflib.get_close_matches(
        name[:_LONGEST_NAME].lower().replace("-", "_"), sorted(spelt), n=1, cutoff=0.7
    )
    return spelt[found[0]] if found else None


def known_names(engine: Iterable[str]) -> set[str]:
    """Return the keys that a model may have. engine: the engine's keys, for its model; else empty."""
    return {*(row.name for row in DOOR_PARAMETERS), *OTHER_PARAMETERS, *engine}


def refuse_unknown(names: Iterable[str], engine: Iterable[str], where: str) -> None:
    """Raise ConfigError for the first unknown key. engine: as in known_names. where: the file."""
    known = known_names(engine)
    for name in names:
        if name not in known:
            meant = nearest(name, known)
            wanted = (
                f"did you mean {meant}?" if meant else "docs/reference/config_pbtxt.md lists the parameters"
            )
            raise ConfigError(f"{where}: parameter {name[:_LONGEST_NAME]} is unknown; {wanted}")
