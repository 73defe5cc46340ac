"""Examines the machine, the repository, and whether the two fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tridecode.tools.checks.findings import Finding
from tridecode.tools.doctor.fit import Fit, Place
from tridecode.tools.doctor.machine import Machine, inspect_machine
from tridecode.tools.doctor.machine_findings import machine_findings
from tridecode.tools.doctor.repository import (
    Engine,
    engine_findings,
    engine_fit,
    place_of,
    read_engines,
    repository_findings,
    sharing_findings,
)


@dataclass
class Diagnosis:
    """findings: problems ("error") before warnings. fits: engine's config.pbtxt -> what it takes."""

    machine: Machine
    repository: str | None
    findings: list[Finding] = field(default_factory=list)
    fits: dict[str, Fit] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)

    @property
    def problems(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def warnings(self) -> int:
        return len(self.findings) - self.problems

    def as_dict(self) -> dict[str, Any]:
        return {
            "repository": self.repository,
            "problems": self.problems,
            "warnings": self.warnings,
            "findings": [asdict(finding) for finding in self.findings],
            "machine": asdict(self.machine),
            "memory": {where: _fit_dict(fit) for where, fit in self.fits.items()},
        }


def _fit_dict(found: Fit) -> dict[str, Any]:
    return {
        "place": asdict(found.place),
        "ranks": [{**asdict(rank), "fixed": rank.fixed} for rank in found.ranks],
        "libraries_estimate": found.libraries,
        "cache_bytes": max(found.cache, 0),
        "cache_blocks": found.blocks,
        "cache_tokens": found.tokens,
        "block_tokens": found.block_tokens,
        "cache_dtype": found.cache_dtype,
        "host_cache_bytes": found.host_cache,
        "host_cache_tokens": found.host_tokens,
        "fits": found.fits,
        "sequences": [{"tokens": tokens, "count": count} for tokens, count in found.sequences],
    }


def diagnose(
    repository: Path | None = None,
    *,
    full: bool = False,
    gpu_memory: int | None = None,
    gpus: int | None = None,
    machine: Machine | None = None,
) -> Diagnosis:
    """Examine a repository (None: only the machine) and the machine.

    full: read every weight file. gpu_memory, gpus: examine the repository for other GPUs than this machine's;
    the machine itself is still examined as it is. machine: default: this one.
    """
    machine = machine or inspect_machine(repository)
    found = Diagnosis(machine, None if repository is None else str(repository))
    if repository is None:
        found.findings += machine_findings(machine)
    else:
        found.findings += repository_findings(repository, full)
        engines = read_engines(repository)
        supposed = gpu_memory is not None or gpus is not None
        ranks = max((engine.ranks for engine in engines), default=1)
        places = [place_of(machine, engine.config, gpu_memory, gpus) for engine in engines]
        on_gpu = any(place.kind == "cuda" for place in places) and not supposed
        found.findings += machine_findings(machine, ranks, on_gpu if engines else None)
        found.findings += sharing_findings(engines, places)
        for engine, place in zip(engines, places):
            _examine(found, engine, place)
    found.findings.sort(key=lambda finding: finding.severity)
    return found


def _examine(found: Diagnosis, engine: Engine, place: Place) -> None:
    found.findings += engine_findings(engine, found.machine, place)
    fit, findings = engine_fit(engine, place)
    found.findings += findings
    found.engines[engine.where] = engine
    if fit is not None:
        found.fits[engine.where] = fit
