"""The settings in a door's config.pbtxt, read once, when Triton initialises the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

from tridecode.backend.errors import ConfigError
from tridecode.backend.text.tokenizer_files import end_token_id, load_tokenizer

#: About one step of many sequences, too short for a client to see. Measured on 2 cores: with half of it, 64
#: streams at the server's limit of 10,000 responses per second had 10 % of them merged instead of 1 %; with
#: 0.03, tokens of 256 streams above that limit waited in the door for 24 ms instead of 13 (90th percentile).
_MERGE_BEHIND_S = 0.02


@dataclass(frozen=True)
class DoorSettings:
    """Triton's own settings of the model, then ours from `parameters`.

    outputs: declared output -> numpy type. engine_dir: the model folder whose config.pbtxt is the engine's.
    """

    name: str
    repository: Path
    decoupled: bool
    max_batch_size: int
    outputs: Mapping[str, Any]

    engine_dir: Path
    tokenizer_dir: Path
    stop_ids: tuple[int, ...] = ()  # ids that end a text, besides end_id, and are not shown
    exclude_input_in_output: bool = False  # default of the input of that name
    add_special_tokens: bool = False  # when a prompt is tokenised
    skip_special_tokens: bool = True  # when an answer is decoded
    num_senders: int = 4
    merge_behind_s: float = _MERGE_BEHIND_S  # streamed token ids: a longer queue is merged
    wait_for_engine: bool = True  # the model becomes ready when the engine is
    start_timeout_s: float = 900.0
    hold_s: float = 2.0  # longest wait of a request for an engine that is being rebuilt
    probe_timeout_s: float = 5.0  # health: a longer step of the engine counts as stuck
    allowed_parameters: tuple[str, ...] = ()  # request parameters to ignore; may be patterns

    # size limits of a request; None: see backend.doors.envelope
    max_prompt_bytes: int | None = None  # of one text
    max_request_bytes: int | None = None  # of all texts of a request
    max_response_elements: int = 4_194_304  # of one response of FasterTransformer's tensors
    max_stream_elements: int = 1_073_741_824  # of all responses to a request
    max_preparing_requests: int = 1024  # received, and not submitted to the engine yet
    max_preparing_bytes: int = 67_108_864  # of their texts and token ids

    @property
    def config_file(self) -> Path:
        return self.repository / self.name / "config.pbtxt"


def read_settings(arguments: Mapping[str, str]) -> DoorSettings:
    """DoorSettings from the arguments of initialize(). ConfigError names file, key, found and wanted."""
    config = json.loads(arguments["model_config"])
    folder = Path(arguments["model_repository"])
    reader = _Parameters(config, folder / "config.pbtxt")
    return DoorSettings(
        name=config["name"],
        repository=folder.parent,
        decoupled=bool(pb_utils.using_decoupled_model_transaction_policy(config)),
        max_batch_size=int(config.get("max_batch_size", 0)),
        outputs={
            o["name"]: pb_utils.triton_string_to_numpy(o["data_type"]) for o in config.get("output", [])
        },
        engine_dir=folder.parent / reader.read("engine_model", str, "a folder's name", "fastertransformer"),
        tokenizer_dir=folder.parent / reader.read("tokenizer_dir", str, "a folder's name", "."),
        stop_ids=reader.read("stop_ids", _ids, "token ids separated by commas", ()),
        exclude_input_in_output=reader.read("exclude_input_in_output", _flag, "true or false", False),
        add_special_tokens=reader.read("add_special_tokens", _flag, "true or false", False),
        skip_special_tokens=reader.read("skip_special_tokens", _flag, "true or false", True),
        num_senders=reader.read("num_senders", _count, "a number from 1 to 64", 4),
        merge_behind_s=reader.read("merge_behind_s", _seconds, "more than 0 seconds", _MERGE_BEHIND_S),
        wait_for_engine=reader.read("wait_for_engine", _flag, "true or false", True),
        start_timeout_s=reader.read("start_timeout_s", _seconds, "more than 0 seconds", 900.0),
        hold_s=reader.read("hold_s", float, "a number of seconds", 2.0),
        probe_timeout_s=reader.read("probe_timeout_s", _seconds, "more than 0 seconds", 5.0),
        allowed_parameters=reader.read("allowed_parameters", _names, "names separated by commas", ()),
        max_prompt_bytes=reader.read("max_prompt_bytes", _size, _SIZE, None),
        max_request_bytes=reader.read("max_request_bytes", _size, _SIZE, None),
        max_response_elements=reader.read("max_response_elements", _size, _SIZE, 4_194_304),
        max_stream_elements=reader.read("max_stream_elements", _size, _SIZE, 1_073_741_824),
        max_preparing_requests=reader.read("max_preparing_requests", _size, _SIZE, 1024),
        max_preparing_bytes=reader.read("max_preparing_bytes", _size, _SIZE, 67_108_864),
    )


def door_tokenizer(settings: DoorSettings) -> tuple[Tokenizer, int]:
    """The tokenizer in `tokenizer_dir` and the id of its end token; -1 if it has none. Raises ConfigError."""
    setting = f"parameter tokenizer_dir in {settings.config_file}"
    tokenizer = load_tokenizer(settings.tokenizer_dir, setting)
    return tokenizer, end_token_id(settings.tokenizer_dir, tokenizer)


class _Parameters:
    def __init__(self, config: Mapping[str, Any], path: Path):
        self._parameters, self._path = config.get("parameters") or {}, path

    def read(self, key: str, convert: Callable[[str], Any], wanted: str, default: Any) -> Any:
        text = self._parameters.get(key, {}).get("string_value", "").strip()
        if text in ("", "auto"):
            return default
        try:
            return convert(text)
        except ValueError:
            raise ConfigError(f"{self._path}: parameter {key} is {text!r}; wanted {wanted}") from None


def _flag(text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError(text)


def _count(text: str) -> int:
    if not 1 <= int(text) <= 64:
        raise ValueError(text)
    return int(text)


_SIZE = "a whole number of 1 or more"


def _size(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
