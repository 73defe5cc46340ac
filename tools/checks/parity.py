"""Finds faults in PARITY.json: no comparison, one that is not independent, files that changed after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tridecode.backend.base.checkpoint_files import MAX_JSON_BYTES, read_json, require_file
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.weights.manifest import MANIFEST_FILE, free_edits, read_manifest
from tridecode.converters.parity.record import PARITY_FORMAT, compared_checksums
from tridecode.tools.checks.findings import Finding
from tridecode.tools.checks.grades import grade_faults

PARITY_FILE = "PARITY.json"


def parity_faults(repository: Path, weights: Path, tokenizer_dir: str | None) -> Iterator[Finding]:
    """Check that PARITY.json belongs to the present files.

    tokenizer_dir: None in a repository without a tokenizer.
    """
    if not (repository / PARITY_FILE).exists():
        fix = "Nothing shows that the conversion is right; build with parity."
        yield Finding("warning", PARITY_FILE, "no such file", "one", fix)
        return
    try:
        parity = read_json(repository / PARITY_FILE)
    except TridecodeError as error:
        yield Finding("error", PARITY_FILE, str(error), "JSON", "Build the repository again.")
        return
    reference = parity.get("reference")
    why = reference.get("none") if isinstance(reference, dict) and parity.get("passed") is None else None
    if why is not None:
        fix = "Ask it for something that you know the answer to."
        yield Finding("warning", PARITY_FILE, f"nothing compared: {why}", "a comparison", fix)
    if parity.get("format") != PARITY_FORMAT or not (parity.get("passed") or why is not None):
        yield Finding(
            "error",
            PARITY_FILE,
            "no passed comparison",
            f"{PARITY_FORMAT}, passed",
            "Build the repository again.",
        )
        return
    if isinstance(reference, dict) and reference.get("independent") is False:
        own = f"a comparison with transformers' model of the files of {reference.get('of')}"
        fix = "A wrong config.ini of that directory does not show; build with --reference CHECKPOINT."
        yield Finding("warning", PARITY_FILE, own, "one with the checkpoint that they were made from", fix)
    for was, wanted, advice in grade_faults(parity):
        yield Finding("warning", PARITY_FILE, was, wanted, advice)
    tokenizer_file = None if tokenizer_dir is None else repository / tokenizer_dir / "tokenizer.json"
    try:
        if tokenizer_file is not None:
            require_file(tokenizer_file, MAX_JSON_BYTES)
        found = compared_checksums(weights, tokenizer_file)
    except FileNotFoundError as error:
        yield Finding(
            "warning", PARITY_FILE, f"no {error.filename}", "what was compared", "Build the repository again."
        )
        return
    except TridecodeError as error:
        yield Finding("warning", PARITY_FILE, str(error), "what was compared", "Build the repository again.")
        return
    listed = parity.get("checksums")
    differing = [
        name for name, sha in found.items() if not isinstance(listed, dict) or listed.get(name) != sha
    ]
    for name in differing:
        yield _changed(name, weights, MANIFEST_FILE not in differing)


def _changed(name: str, weights: Path, has_manifest: bool) -> Finding:
    """A file that was changed after the comparison. A warning for edits of config.ini that users may make:
    the weights have been found to fit it.
    """
    manifest = read_manifest(weights) if name == "config.ini" and has_manifest else None
    edits = free_edits(manifest, weights) if manifest is not None and manifest.config else []
    if edits:
        fix = "Nothing, if it is intended: no tensor changes."
        return Finding("warning", name, "; ".join(edits), "what was compared with transformers", fix)
    return Finding(
        "error", name, "other bytes than were compared with transformers", "the same", "Build it again."
    )
