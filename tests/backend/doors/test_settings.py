"""The parameters of a door's config.pbtxt."""

from __future__ import annotations

import pytest

from tests import fake_triton
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.door_parameters import DOOR_PARAMETERS
from tridecode.backend.configuration.engine_config import engine_parameters
from tridecode.backend.doors.door_settings import DoorSettings, read_settings


def settings(parameters: dict[str, str], name: str = "text") -> DoorSettings:
    config = fake_triton.model_config(name, {}, {}, parameters)
    return read_settings(fake_triton.initialize_arguments(config, "/repository"))


def test_defaults_are_those_of_the_table():
    found = settings(dict.fromkeys((row.name for row in DOOR_PARAMETERS), "auto"))
    assert found == settings({}) and (found.num_senders, found.stop_ids, found.max_prompt_bytes) == (
        4,
        (),
        None,
    )
    assert str(found.engine_dir) == "/repository/fastertransformer"


@pytest.mark.parametrize(("instance", "number"), [("text_0_0", 0), ("text_0_1", 1), ("text_0_2", 0)])
def test_a_door_uses_the_engine_of_its_instance_modulo_their_number(tmp_path, instance, number):
    (tmp_path / "fastertransformer").mkdir()
    (tmp_path / "fastertransformer" / "config.pbtxt").write_text("instance_group [{ count: 2 }]")
    config = fake_triton.model_config("text", {}, {}, {})
    config["instance_group"] = [{"name": "text_0", "count": 3}]
    arguments = fake_triton.initialize_arguments(config, str(tmp_path))
    found = read_settings({**arguments, "model_instance_name": instance})
    assert (found.engine_number, found.num_engines) == (number, 2)
    assert found.engine_label(1) == "fastertransformer:1"


def test_values_are_converted():
    found = settings({"stop_ids": "5, 6", "merge_behind_s": "inf", "add_special_tokens": "Yes"})
    assert (found.stop_ids, found.merge_behind_s, found.add_special_tokens) == ((5, 6), float("inf"), True)


@pytest.mark.parametrize(
    ("key", "text", "complaint"),
    [
        ("num_senders", "65", "parameter num_senders is '65'; wanted a number from 1 to 64"),
        ("stop_ids", "a", "parameter stop_ids is 'a'; wanted token ids separated by commas"),
        ("hold_s", "long", "parameter hold_s is 'long'; wanted a number of seconds"),
        ("tokeniser_dir", ".", "parameter tokeniser_dir is unknown; did you mean tokenizer_dir?"),
        (
            "max_sequences",
            "4",
            "max_sequences configures the engine; move it to fastertransformer/config",
        ),
    ],
)
def test_a_wrong_parameter_is_refused_with_its_file(key, text, complaint):
    with pytest.raises(ConfigError, match="/repository/text/config.pbtxt: ") as error:
        settings({key: text})
    assert complaint in str(error.value)


def test_the_engines_own_model_has_the_engines_parameters():
    texts = {row.name: "auto" for row in engine_parameters()} | {"model_type": "GPT", "num_senders": "2"}
    assert settings(texts, "fastertransformer").num_senders == 2
