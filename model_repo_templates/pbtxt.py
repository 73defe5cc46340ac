"""config.pbtxt as Triton reads it: parsed with the server's own protobuf schema."""

from __future__ import annotations

from collections import Counter

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tridecode.backend.base.errors import ConfigError


def parse_model_config(text: str, where: str) -> model_config_pb2.ModelConfig:
    """The ModelConfig of a config.pbtxt. Raises ConfigError naming `where`, the line, and what is wrong."""
    try:
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{where}: {error}") from None
    for kind, tensors in (("input", config.input), ("output", config.output)):
        counts = Counter(tensor.name for tensor in tensors)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ConfigError(f"{where}: {kind} {twice[0]} is declared {counts[twice[0]]} times; wanted once")
    return config


def string_parameters(config: model_config_pb2.ModelConfig) -> dict[str, str]:
    """The parameters as texts, by key."""
    return {key: value.string_value for key, value in config.parameters.items()}


def data_type_name(data_type: int) -> str:
    """E.g. "FP32"."""
    return model_config_pb2.DataType.Name(data_type)[len("TYPE_") :]
