"""Asks LAMBADA's questions of a repository's engine in this process, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig, read_engine_config, with_folders
from tridecode.backend.configuration.engine_config_file import FILE, checkpoint_dir, read_engine_parameters
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.evaluate.lambada import Question

_STEPS = 32  # interval between two checks for finished requests
ENGINE = "fastertransformer"  # the model of a repository that holds the engine's settings


def repository_engine(repository: Path) -> tuple[Path, EngineConfig]:
    """A repository's weight directory, and its settings for one process: config.pbtxt's, but one rank.

    Raises ConfigError for a folder that is not a repository, or a config.pbtxt that cannot be read.
    """
    folder = repository / ENGINE
    if not (folder / FILE).is_file():
        raise ConfigError(f"{repository} has no {ENGINE}/{FILE}; wanted a folder made by build-repo")
    config = read_engine_config(read_engine_parameters(str(folder)), str(folder / FILE))
    config = with_folders(config, folder)
    return Path(checkpoint_dir(str(folder))), replace(config, tensor_para_size=1, pipeline_para_size=1)


def engine_answers(
    weights: Path, config: EngineConfig, questions: Sequence[Question], progress: Callable[[int], None]
) -> list[bool]:
    """Return, per question, whether the engine's answer is right. Equal prompts are sent once, with the
    longest answer's number of tokens. progress: called with the number of questions answered.

    Raises ConfigError and WeightFileError for the directory, TridecodeError for a question that is longer
    than the model's positions.
    """
    shared: dict[tuple[int, ...], list[int]] = {}
    for index, question in enumerate(questions):
        shared.setdefault(question.prompt, []).append(index)
    offline = OfflineEngine.load(weights, replace(config, max_queued_requests=max(len(shared), 1)))
    right, done = [False] * len(questions), 0
    requests: dict[int, list[int]] = {}
    for prompt, indices in shared.items():
        longest = max(len(questions[index].target) for index in indices)
        requests[offline.submit(list(prompt), SamplingParams(max_tokens=longest))] = indices
    with torch.inference_mode():
        while requests:
            for _step in range(_STEPS):
                if not offline.step():
                    break
            for number in [number for number in requests if offline.generations[number].finish]:
                for index in requests.pop(number):
                    target, found = questions[index].target, offline.generations[number].tokens
                    right[index] = tuple(found[: len(target)]) == target
                    done += 1
            progress(done)
    return right
