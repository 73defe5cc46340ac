"""The progress of LLM.generate: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import pytest

from tridecode.tools.llm.progress import PromptProgress


def shown(capfd: pytest.CaptureFixture[str], prompts: int, shows: bool) -> str:
    with PromptProgress(prompts, shows) as progress:
        for _ in range(prompts):
            progress.add(tokens=1000)
    return capfd.readouterr().err


def test_a_terminal_shows_prompts_and_tokens(monkeypatch, capfd) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(capfd, 3, True)
    assert "3 of 3 prompts" in text and "tokens/s" in text and "0 s left" in text
    assert shown(capfd, 3, False) == "" and shown(capfd, 1, True) == ""


def test_elsewhere_nothing_is_shown(monkeypatch, capfd) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert shown(capfd, 3, True) == ""
