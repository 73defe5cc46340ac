"""The files that an image and its manifests are made of, parsed, and the commands in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
import yaml

from tridecode.tools.cli import app

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "Dockerfile.triton"
DEPLOY = ROOT / "tools" / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
BATCH_SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def of_kind(path: Path, kind: str) -> dict[str, Any]:
    [found] = [document for document in documents(path) if document["kind"] == kind]
    return found


def pod_templates(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The templates of pods in a document, by their place."""
    spec = document["spec"]
    if document["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        return {name: group[name] for name in ("leaderTemplate", "workerTemplate") if name in group}
    return {"template": spec["template"]} if "template" in spec else {}


def every_container() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (place, pod spec, container) of every container; a pod must have exactly one."""
    for path in MANIFESTS:
        for document in documents(path):
            for place, template in pod_templates(document).items():
                [container] = template["spec"]["containers"]
                yield f"{path.stem} {place}", template["spec"], container


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of Dockerfile.triton; continued lines are joined, comments left out."""
    lines = [
        line
        for line in DOCKERFILE.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines())
        if word
    ]


def instruction(name: str) -> str:
    """The arguments of the last instruction of that name."""
    return [rest for word, rest in instructions() if word == name][-1]


def health_command() -> list[str]:
    """Return the command of the image's health check."""
    return json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])


def parsed(command: list[str]) -> dict[str, Any]:
    """The options of a command line of `tridecode`, as its own parser reads them; it raises on a mistake."""
    assert command[0] == "tridecode", command
    below = typer.main.get_command(app).commands[command[1]]  # type: ignore[attr-defined]
    return below.make_context(command[1], list(command[2:])).params
