"""The engine's config.pbtxt and what it says of the checkpoint's place."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.backend.supervisor.engine_settings import fingerprint, read_engine_settings


def write(folder: Path, default_model_filename: str = "", **parameters: str) -> str:
    """A config.pbtxt as protobuf itself prints it."""
    config = model_config_pb2.ModelConfig(name="m", default_model_filename=default_model_filename)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    (folder / "1").mkdir(exist_ok=True)
    return str(folder)


def test_parameters_are_read_as_triton_writes_them(tmp_path):
    folder = write(tmp_path, tensor_para_size="2", pipeline_para_size="3", step_timeout_s="9")
    assert read_engine_parameters(folder)["tensor_para_size"] == "2"
    settings = read_engine_settings(folder)
    assert (settings.world, settings.step_timeout_s, settings.start_timeout_s) == (6, 9.0, 900.0)


def test_a_field_of_a_later_triton_is_passed_over(tmp_path):
    (tmp_path / "config.pbtxt").write_text(
        'brand_new { a: 1 }\nparameters { key: "k" value { string_value: "v" } }'
    )
    assert read_engine_parameters(str(tmp_path)) == {"k": "v"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("parameters {\n", "2:1|1:12"),
        ("\nparameters { key: 3 }", "2:19"),
        ("name: 'ä'", "UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_place(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.pbtxt").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=f"config.pbtxt.*({said})"):
        read_engine_parameters(str(tmp_path))


@pytest.mark.parametrize(
    ("default", "parameters", "folders", "wanted"),
    [
        ("", {"model_checkpoint_path": "/weights/1-gpu"}, ["2/1-gpu"], "/weights/1-gpu"),
        ("", {"model_checkpoint_path": "1-gpu"}, ["1", "2"], "2/1-gpu"),
        ("bloom_560m", {}, ["1"], "1/bloom_560m"),
        ("model.py", {}, ["1/1-gpu"], "1/1-gpu"),
        ("", {"tensor_para_size": "2"}, ["9/2-gpu", "10/1-gpu", "10/2-gpu"], "10/2-gpu"),
        ("", {"tensor_para_size": "2"}, ["1/4-gpu"], "1/4-gpu"),
    ],
)
def test_the_checkpoint_lies_where_fastertransformer_looks(tmp_path, default, parameters, folders, wanted):
    folder = write(tmp_path, default, **parameters)
    for name in folders:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    assert Path(checkpoint_dir(folder)) == tmp_path / wanted


def test_several_possible_checkpoints_are_refused(tmp_path):
    folder = write(tmp_path, tensor_para_size="2")
    for name in ("1-gpu", "4-gpu"):
        (tmp_path / "1" / name).mkdir()
    with pytest.raises(ConfigError, match="no 2-gpu but 1-gpu, 4-gpu.*model_checkpoint_path"):
        checkpoint_dir(folder)


def test_a_change_of_either_file_changes_the_fingerprint(tmp_path):
    folder = write(tmp_path)
    (tmp_path / "1" / "1-gpu").mkdir()
    seen = [fingerprint(folder)]
    (tmp_path / "1" / "1-gpu" / "config.ini").write_text("[gpt]\n")
    seen.append(fingerprint(folder))
    write(tmp_path, max_sequences="8")
    seen.append(fingerprint(folder))
    (tmp_path / "config.pbtxt").write_text("broken {")
    seen.append(fingerprint(folder))
    assert len(set(seen)) == 4
    assert fingerprint(folder) == seen[-1]
