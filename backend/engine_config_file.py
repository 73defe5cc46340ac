"""Reads the `parameters` of a Triton model's config.pbtxt, in the supervisor and in the engine process."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tridecode.backend.errors import ConfigError

FILE = "config.pbtxt"


def read_engine_parameters(engine_dir: str) -> dict[str, str]:
    """The parameters of `<engine_dir>/config.pbtxt` by key, as read_engine_config takes them.

    engine_dir: the directory of the fastertransformer model, above its version folders. Fields that this
    tritonclient does not know are skipped. Raises ConfigError naming the file and, for a syntax error, line
    and column.
    """
    path = Path(engine_dir) / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); wanted the model's config.pbtxt"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error}") from None
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, config, allow_unknown_field=True)
    except text_format.ParseError as error:
        raise ConfigError(
            f"{path}: {error} (line:column); wanted a model configuration in protobuf text"
        ) from None
    return {key: value.string_value for key, value in config.parameters.items()}
