"""`tridecode serve` with a checkpoint: what is converted and refused, and the examples it prints."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.tools.serve.fakes import repository
from tridecode.backend.base.errors import ConfigError
from tridecode.tools.build_repo import find_repository as checkpoint_module
from tridecode.tools.build_repo.cache import Conversion
from tridecode.tools.build_repo.find_repository import find_repository, is_checkpoint
from tridecode.tools.client.example_commands import example_lines, model_name


@pytest.fixture
def built(monkeypatch) -> list[tuple[str, Conversion]]:
    built: list[tuple[str, Conversion]] = []

    def build(source: str, output: Path, conversion: Conversion) -> None:
        built.append((source, conversion))
        output.mkdir()

    monkeypatch.setattr(checkpoint_module, "build_entry", build)
    return built


def test_a_folder_with_models_is_a_repository(tmp_path) -> None:
    assert not is_checkpoint(str(repository(tmp_path / "models")))
    (tmp_path / "empty").mkdir()
    assert not is_checkpoint(str(tmp_path / "empty"))  # the check of repositories says what is wanted
    (tmp_path / "bloom").mkdir()
    (tmp_path / "bloom" / "config.json").write_text("{}")
    assert is_checkpoint(str(tmp_path / "bloom"))
    assert is_checkpoint("bigscience/bloom-560m") and is_checkpoint(str(tmp_path / "model.gguf"))


def test_a_checkpoint_is_converted_with_the_options_and_found_again(tmp_path, built) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    conversion = Conversion(quantize="int8", for_clients="vllm")
    first = find_repository(str(tmp_path / "model.gguf"), conversion, tmp_path / "cache")
    assert find_repository(str(tmp_path / "model.gguf"), conversion, tmp_path / "cache") == first
    assert built == [(str(tmp_path / "model.gguf"), conversion)]


def test_wrong_options_are_refused_before_anything_is_made(tmp_path, built) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    source, cache = str(tmp_path / "model.gguf"), tmp_path / "cache"
    for conversion, text in (
        (Conversion(quantize="int5"), "--quantize int5: wanted one of int8"),
        (Conversion(for_clients="tgi"), "--for tgi: wanted one of"),
        (Conversion(contracts=("tgi",)), "tgi"),
        (Conversion(contracts=("vllm",), for_clients="vllm"), "leave --contract out, or --for"),
    ):
        with pytest.raises(ConfigError, match=text):
            find_repository(source, conversion, cache)
    with pytest.raises(ConfigError, match=r"absent.gguf: no such file"):
        find_repository(str(tmp_path / "absent.gguf"), Conversion(), cache)
    assert built == [] and not cache.exists()


def test_options_of_a_conversion_with_a_repository_are_refused(tmp_path) -> None:
    folder = str(repository(tmp_path / "models"))
    assert find_repository(folder, Conversion()) == Path(folder)
    with pytest.raises(ConfigError, match="--quantize with .*models, which is a model repository"):
        find_repository(folder, Conversion(quantize="int8"))
    with pytest.raises(ConfigError, match="--cache with"):
        find_repository(folder, Conversion(), tmp_path)


def test_the_examples_are_curl_for_an_answer_and_a_stream(tmp_path) -> None:
    lines = example_lines(tmp_path, ["tensorrt_llm_bls", "fastertransformer"], "localhost", 8000, None)
    words = [shlex.split(line) for line in lines]
    assert [word[0] for word in words] == ["curl", "curl"] and words[1][1] == "-N"
    assert words[0][1] == "http://localhost:8000/v2/models/tensorrt_llm_bls/generate"
    assert words[1][2] == "http://localhost:8000/v2/models/tensorrt_llm_bls/generate_stream"
    bodies = [json.loads(word[-1]) for word in words]
    assert bodies[0]["max_tokens"] == 32 and bodies[1] == {**bodies[0], "stream": True}
    assert example_lines(tmp_path, ["fastertransformer"], "localhost", 8000, None) == []


def test_the_examples_use_the_openai_service_where_there_is_one(tmp_path) -> None:
    (line, stream) = example_lines(tmp_path, ["tensorrt_llm_bls"], "localhost", 8000, 9000)
    assert shlex.split(line)[1] == "http://localhost:9000/v1/completions"
    folder = tmp_path / "preprocessing" / "1" / "tokenizer"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (line, stream) = example_lines(tmp_path, ["tensorrt_llm_bls"], "localhost", 8000, 9000)
    assert shlex.split(line)[1] == "http://localhost:9000/v1/chat/completions"
    assert json.loads(shlex.split(stream)[-1])["stream"] is True


def test_the_model_has_its_own_name(tmp_path) -> None:
    assert model_name(tmp_path) == tmp_path.name
