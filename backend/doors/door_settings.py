"""The settings in a door's config.pbtxt, read once, when Triton initialises the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.door_parameters import (
    DOOR_PARAMETERS,
    MERGE_BEHIND_S,
    known_names,
    refuse_unknown,
)
from tridecode.backend.configuration.engine_config import engine_parameters
from tridecode.backend.configuration.engine_instances import instance_number, num_engines, read_groups
from tridecode.backend.text.detokenizer import TokenizerView
from tridecode.backend.text.tokenizer_files import cleans_up, end_token_id, load_tokenizer


@dataclass(frozen=True)
class DoorSettings:
    """Triton's settings of the model, then our own from `parameters`: the rows of DOOR_PARAMETERS.

    outputs: declared output -> numpy type. sequence_idle_s: Triton's time-out of idle sequences.
    engine_dir: the model folder whose config.pbtxt is the engine's. num_engines: number of engines of that
    model. engine_number: the one that this door uses.
    """

    name: str
    repository: Path
    decoupled: bool
    max_batch_size: int
    outputs: Mapping[str, Any]
    sequence_idle_s: float

    engine_dir: Path
    num_engines: int
    engine_number: int
    tokenizer_dir: Path
    stop_ids: tuple[int, ...] = ()  # further ids that end a text, as config.ini's end ids do
    default_max_tokens: int = 256  # default of a request that does not set it
    exclude_input_in_output: bool = False  # default of the input of that name
    add_special_tokens: bool = False  # used when a prompt is tokenised
    skip_special_tokens: bool = True  # used when an answer is decoded
    wrap_token_ids: bool = False  # ids beyond the vocabulary are taken modulo its size (benchmarks)
    num_senders: int = 4
    door_cores: int | None = None  # cores that the door's threads share; 0: all; None: see share_cores
    # streamed token ids: when the queue is longer, responses are merged
    merge_behind_s: float = MERGE_BEHIND_S
    wait_for_engine: bool = True  # the model becomes ready only when the engine is ready
    start_timeout_s: float = 900.0
    session_idle_s: float | None = None  # a session without a round for this long ends; None: sequence_idle_s
    hold_s: float = 2.0  # longest wait of a request for an engine that is being rebuilt
    # longest wait of a request for the engine that continues it; 0: requests are not continued
    resume_within_s: float = 60.0
    probe_timeout_s: float = 5.0  # health: an engine step that takes longer counts as stuck
    made_by: str = ""  # placeholders: the options of build-repo that add the model
    allowed_parameters: tuple[str, ...] = ()  # request parameters to ignore; may be patterns

    # size limits of a request; None: see backend.service.limits
    max_prompt_bytes: int | None = None  # of one text
    max_request_bytes: int | None = None  # of all texts of a request
    max_response_elements: int = 4_194_304  # of one response of FasterTransformer's tensors
    max_stream_elements: int = 1_073_741_824  # of all responses to a request
    max_preparing_requests: int = 1024  # received but not yet submitted to the engine
    max_preparing_bytes: int = 67_108_864  # bytes of their texts and token ids

    def engine_label(self, number: int) -> str:
        """Return an engine's name on the metrics page."""
        return self.engine_dir.name if self.num_engines == 1 else f"{self.engine_dir.name}:{number}"

    @property
    def config_file(self) -> Path:
        return self.repository / self.name / "config.pbtxt"


def read_settings(arguments: Mapping[str, str]) -> DoorSettings:
    """Read DoorSettings from the arguments of initialize().

    Raises ConfigError that names file, key, found and wanted.
    """
    config = json.loads(arguments["model_config"])
    folder = Path(arguments["model_repository"])
    texts = {key: value.get("string_value", "") for key, value in (config.get("parameters") or {}).items()}
    values = read_door_parameters(texts, folder / "config.pbtxt")
    values["engine_dir"] = folder.parent / values.pop("engine_model")
    values["tokenizer_dir"] = folder.parent / values["tokenizer_dir"]
    _refuse_unknown(texts, folder, values["engine_dir"])
    engines = num_engines(read_groups(values["engine_dir"]))
    return DoorSettings(
        name=config["name"],
        repository=folder.parent,
        decoupled=bool(pb_utils.using_decoupled_model_transaction_policy(config)),
        max_batch_size=int(config.get("max_batch_size", 0)),
        outputs={
            o["name"]: pb_utils.triton_string_to_numpy(o["data_type"]) for o in config.get("output", [])
        },
        sequence_idle_s=_sequence_idle_s(config),
        num_engines=engines,
        engine_number=instance_number(arguments["model_instance_name"], config) % engines,
        **values,
    )


def _sequence_idle_s(config: Mapping[str, Any]) -> float:
    """Triton's default is 1 s."""
    batching = config.get("sequence_batching") or {}
    return (int(batching.get("max_sequence_idle_microseconds", 0)) or 1_000_000) / 1e6


def read_door_parameters(texts: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Return the value of each row of DOOR_PARAMETERS; its default for "" and "auto". Raises ConfigError."""
    values = {}
    for row in DOOR_PARAMETERS:
        text = texts.get(row.name, "").strip()
        try:
            values[row.name] = row.default if text in ("", "auto") else row.convert(text)
        except ValueError:
            raise ConfigError(f"{path}: parameter {row.name} is {text!r}; wanted {row.wanted}") from None
    return values


def _refuse_unknown(names: Iterable[str], folder: Path, engine_dir: Path) -> None:
    """Raise ConfigError for a parameter that nobody reads, or that has no effect in this model."""
    path, engine = folder / "config.pbtxt", {row.name for row in engine_parameters()}
    of_engine = folder.name == engine_dir.name
    if not of_engine:
        for name in sorted(engine.intersection(names) - known_names(())):
            found = f"{path}: parameter {name} configures the engine"
            raise ConfigError(f"{found}; move it to {engine_dir.name}/config.pbtxt")
    refuse_unknown(names, engine if of_engine else (), str(path))


def door_tokenizer(settings: DoorSettings) -> tuple[Tokenizer, int]:
    """Return the tokenizer in `tokenizer_dir` and the id of its end token, -1 if it has none.

    Raises ConfigError.
    """
    setting = f"parameter tokenizer_dir in {settings.config_file}"
    tokenizer = load_tokenizer(settings.tokenizer_dir, setting)
    return tokenizer, end_token_id(settings.tokenizer_dir, tokenizer)


def door_view(settings: DoorSettings, tokenizer: Tokenizer, skip_special_tokens: bool) -> TokenizerView:
    """Return how a door decodes with the tokenizer in `tokenizer_dir`."""
    return TokenizerView(tokenizer, skip_special_tokens, cleans_up(settings.tokenizer_dir, tokenizer))
