"""Reads a Triton model's config.pbtxt, in the supervisor and in the engine process: no torch here."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tridecode.backend.base.errors import ConfigError, TridecodeError

FILE = "config.pbtxt"
#: the usual name of the engine's model
ENGINE_MODEL = "fastertransformer"


def read_engine_parameters(engine_dir: str) -> dict[str, str]:
    """Return the parameters of `<engine_dir>/config.pbtxt` by key, for read_engine_config.

    engine_dir: the directory of the fastertransformer model, above its version folders. Fields that this
    tritonclient does not know are skipped. Raises ConfigError naming the file and, for a syntax error, line
    and column.
    """
    config = _read(Path(engine_dir) / FILE)
    return {key: value.string_value for key, value in config.parameters.items()}


def checkpoint_dir(engine_dir: str) -> str:
    """Return the directory of the model's config.ini and weights.

    It is the parameter model_checkpoint_path; a relative path starts from the version folder. Without it, it
    is in the version folder: default_model_filename, else `<tensor_para_size>-gpu`, else the only `*-gpu`
    folder, because a weight directory loads at any degree. Of several version folders the highest is used,
    which is the one that Triton serves. Raises ConfigError for several `*-gpu` folders. Source:
    FasterTransformer's backend, ModelState.
    """
    path = Path(engine_dir) / FILE
    config = _read(path)
    version = _version_dir(Path(engine_dir))
    parameters = {key: value.string_value.strip() for key, value in config.parameters.items()}
    named = parameters.get("model_checkpoint_path") or config.default_model_filename
    if named and not named.endswith(".py"):  # a python_backend model gives its model.py there
        return str(version / named)
    usual = version / f"{parameters.get('tensor_para_size') or 1}-gpu"
    others = sorted(folder for folder in version.glob("*-gpu") if folder.is_dir())
    if usual.is_dir() or not others:
        return str(usual)
    if len(others) > 1:
        raise ConfigError(
            f"{version} has no {usual.name} but {', '.join(folder.name for folder in others)}; "
            f"name one of them in the parameter model_checkpoint_path of {path}"
        )
    return str(others[0])


def text_models(engine_dir: Path) -> list[dict[str, str]]:
    """Return the parameters of the models of an engine's repository that name a tokenizer, those that decode
    text first. Models whose config.pbtxt cannot be read are left out.
    """
    found = []
    for file in sorted(engine_dir.parent.glob(f"*/{FILE}")):
        try:
            parameters = read_engine_parameters(str(file.parent))
        except TridecodeError:
            continue
        engine = parameters.get("engine_model", "").strip() or ENGINE_MODEL
        if parameters.get("tokenizer_dir") and engine == engine_dir.name:
            found.append(parameters)
    return sorted(found, key=lambda one: "stop_ids" not in one)


def tokenizer_dir(engine_dir: Path) -> Path | None:
    """Return the folder of the tokenizer of an engine's repository; None: no model names one."""
    found = text_models(engine_dir)
    return engine_dir.parent / found[0]["tokenizer_dir"] if found else None


def _read(path: Path) -> model_config_pb2.ModelConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); wanted a config.pbtxt") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, config, allow_unknown_field=True)
    except text_format.ParseError as error:
        raise ConfigError(
            f"{path}: {error} (line:column); wanted a model configuration in protobuf text"
        ) from None
    return config


def _version_dir(engine_dir: Path) -> Path:
    versions = [folder for folder in engine_dir.glob("[0-9]*") if folder.is_dir() and folder.name.isdigit()]
    if not versions:
        raise ConfigError(f"{engine_dir} has no version folder; wanted one, e.g. {engine_dir / '1'}")
    return max(versions, key=lambda folder: int(folder.name))
