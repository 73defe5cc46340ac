"""--triton: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.backend.front.fronts import repository
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.front.__main__ import FrontArguments, read_settings
from tridecode.backend.front.triton.hosts import read_hosts
from tridecode.backend.front.triton.watch import SameModel
from tridecode.backend.wire.messages import Limits

LIMITS = Limits(1000, 512, 4, 4, 64, 64, 1, 2, "toy")


def test_a_list_of_servers() -> None:
    assert read_hosts("gpu1:8001, 10.0.0.2:8101,[::1]:8001") == ("gpu1:8001", "10.0.0.2:8101", "[::1]:8001")


@pytest.mark.parametrize(
    "text", ["gpu1", "gpu1:0", "gpu1:70000", "http://gpu1:8001", ",", "a:1,a:1", ":8001", "a b:1", "x:1\n"]
)
def test_a_wrong_list_is_refused(text: str) -> None:
    if text == "x:1\n":
        assert read_hosts(text) == ("x:1",)
        return
    with pytest.raises(ConfigError, match="--triton"):
        read_hosts(text)


def test_options_that_need_an_engine_of_this_machine(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo")
    with pytest.raises(ConfigError, match="--manage-adapters"):
        read_settings(FrontArguments(repo, triton="gpu1:8001", manage_adapters=True))


def test_the_vocabulary_of_weights_beside_the_tokenizer(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo")
    assert read_settings(FrontArguments(repo, triton="gpu1:8001")).vocab_size == 0
    ini = repo / "fastertransformer" / "1" / "1-gpu" / "config.ini"
    ini.write_text("[gpt]\nvocab_size = 777\n")
    settings = read_settings(FrontArguments(repo, triton="gpu1:8001"))
    assert (settings.vocab_size, settings.triton, settings.guest) == (777, ("gpu1:8001",), False)
    with pytest.raises(ConfigError, match=r"1,000; wanted 777, that of the repository's config.ini"):
        SameModel(settings.vocab_size).check("gpu1:8001", LIMITS)


def test_all_servers_have_the_model_of_the_first_and_of_the_tokenizer() -> None:
    same = SameModel(1000, 1000)
    same.check("gpu1:8001", LIMITS)
    with pytest.raises(ConfigError, match="wanted toy with 1,000, as gpu1:8001 has it"):
        same.check("gpu2:8001", msgspec.structs.replace(LIMITS, model_name="other"))
    same.check("gpu2:8001", LIMITS)
    with pytest.raises(ConfigError, match="wanted 1,001 or more, the ids of the repository's tokenizer"):
        SameModel(0, 1001).check("gpu1:8001", LIMITS)
