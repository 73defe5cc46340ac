"""The format of PARITY.json, and the checksums of the compared files. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from tridecode.backend.base.file_digest import file_sha256
from tridecode.backend.weights.manifest import MANIFEST_FILE

PARITY_FORMAT = "tridecode-parity-1"


def compared_checksums(weights: Path, tokenizer_file: Path | None) -> dict[str, str]:
    """SHA-256 of the compared files. manifest.json holds that of every weight file; without a manifest, as in
    FasterTransformer's directories, the weight files themselves are listed."""
    files = [weights / "config.ini"]
    if (weights / MANIFEST_FILE).exists():
        files.append(weights / MANIFEST_FILE)
    else:
        files += sorted(weights.glob("*.bin"))
    if tokenizer_file is not None:
        files.append(tokenizer_file)
    return {path.name: file_sha256(path) for path in files}
