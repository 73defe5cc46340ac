"""docs/reference/config_ini.md and config_pbtxt.md: every key that the code reads, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.backend.hf_models import model_config
from tests.checkpoints import FAMILIES
from tridecode.backend import models
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.door_parameters import DOOR_PARAMETERS
from tridecode.backend.configuration.engine_config import EngineConfig, engine_parameters, read_engine_config
from tridecode.backend.models import families, model_config_ini, read_model_config
from tridecode.backend.models.config_ini import IniSection
from tridecode.backend.models.ini_keys import KEYS, LOCAL, NOT_READ, TASK_KEYS
from tridecode.tools.generated_docs.config import COMMAND, INI_PAGE, PBTXT_PAGE, main, recorded

READERS = {"integer", "number", "text", "flag", "choice", "demand", "numbers", "integers"}


def keys_in_the_source() -> set[str]:
    """The literal keys of each `section.integer("…")`, and the tables of keys, in backend/models."""
    found: set[str] = set()
    for path in Path(models.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                named = node.args[0]
                if node.func.attr in READERS and isinstance(named, ast.Constant):
                    found.add(str(named.value))
    return found


def test_the_tables_of_the_pages_are_those_of_the_code():
    assert main([]) == 0, f"run {COMMAND} --write"


def test_every_key_of_config_ini_is_read_by_a_family_and_every_key_read_is_in_the_table():
    read = {key for family in families().values() for key in recorded(family)}
    assert read == set(KEYS)
    assert keys_in_the_source() <= set(KEYS) | set(NOT_READ) | set(TASK_KEYS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_config_ini_is_read_through_keys_of_the_table_only(family, tmp_path, monkeypatch):
    asked: set[str] = set()
    convert = IniSection._convert

    def keep(self, key, *others):
        asked.add(key)
        return convert(self, key, *others)

    (tmp_path / "config.ini").write_text(model_config_ini(model_config(FAMILIES[family].hf_config()), 1))
    monkeypatch.setattr(IniSection, "_convert", keep)
    read_model_config(tmp_path)
    assert asked and asked <= set(KEYS)


def test_what_is_written_is_in_the_table():
    for family in FAMILIES:
        written = re.findall(
            r"^(\w+) =", model_config_ini(model_config(FAMILIES[family].hf_config()), 1), re.MULTILINE
        )
        assert {key.removeprefix(LOCAL) for key in written} <= set(KEYS) | set(NOT_READ)


def test_every_parameter_of_config_pbtxt_is_in_the_guide():
    page = PBTXT_PAGE.read_text(encoding="utf-8")
    for row in (*engine_parameters(), *DOOR_PARAMETERS):
        assert f"| `{row.name}` |" in page and row.meaning
    for key in (*KEYS, *NOT_READ, *TASK_KEYS):
        assert f"| `{key}` |" in INI_PAGE.read_text(encoding="utf-8")


def write(tmp_path, edit) -> Path:
    (tmp_path / "config.ini").write_text(
        edit(model_config_ini(model_config(FAMILIES["gpt2"].hf_config()), 1))
    )
    return tmp_path


def test_a_misspelt_key_of_config_ini_is_refused_with_the_nearest(tmp_path):
    write(tmp_path, lambda text: text.replace("layernorm_eps", "layernom_eps"))
    with pytest.raises(ConfigError, match="layernom_eps is unknown; did you mean layernorm_eps"):
        read_model_config(tmp_path)


def test_foreign_keys_of_fastertransformers_converters_are_ignored(tmp_path):
    """Some wrote their arguments and all of Hugging Face's config into the section."""
    foreign = (
        "n_embd = 8\nlayer_norm_epsilon = 1e-05\nnum_layers = 2\nin_file = gpt2\nprocesses = 4\nint8 = 0\n"
    )
    known = read_model_config(write(tmp_path, str))
    assert read_model_config(write(tmp_path, lambda text: text + foreign)) == known


@pytest.mark.parametrize(
    ("key", "hint"),
    [("max_seqences", "did you mean max_sequences"), ("frobnicate", "docs/reference/config_pbtxt.md lists")],
)
def test_an_unknown_parameter_of_the_engine_is_refused(key, hint):
    with pytest.raises(ConfigError, match=f"config.pbtxt: parameter {key} is unknown; {hint}"):
        read_engine_config({key: "1"}, "config.pbtxt")


def test_parameters_of_fastertransformers_own_configurations_are_accepted():
    theirs = {"tensor_para_size": "1", "pipeline_para_size": "1", "data_type": "fp16", "model_type": "GPT"}
    theirs |= {"model_checkpoint_path": "/data/models", "int8_mode": "0", "enable_custom_all_reduce": "0"}
    assert read_engine_config(theirs, "config.pbtxt").data_type == "fp16"
    assert EngineConfig().data_type == "fp32"
