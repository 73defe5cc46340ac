"""API keys, known by their SHA-256 digests; a file of digests is read again when it changes."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterable

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.front.errors import ApiError

_EVERY_S = 1.0
_MAX_FILE_BYTES = 4 << 20
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})(?:\s.*)?")
_log = logging.getLogger("tridecode.front")


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Keys:
    """digests: of keys from the command line. file: one digest a line, as sha256sum prints it; lines that
    begin with # are comments. A file that cannot be read later leaves the known keys as they are."""

    def __init__(self, digests: Iterable[str], file: str = ""):
        """Raises ConfigError for a file that cannot be read now."""
        self._own, self._file = frozenset(digests), file
        self._filed: frozenset[str] = frozenset()
        self._state: object = None
        self._looked_at = 0.0
        if file:
            self._filed, self._state = _read(file), _state(file)

    @property
    def wanted(self) -> bool:
        """Return whether requests need a key. An empty file counts too: nobody gets in by emptying it."""
        return bool(self._own or self._file)

    def check(self, authorization: str) -> None:
        """Raise ApiError 401 unless the header holds a known key."""
        if not self.wanted:
            return
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _refused("no API key: wanted the header Authorization: Bearer KEY")
        self._look()
        found = digest_of(key.strip())
        if found not in self._own and found not in self._filed:
            raise _refused("the API key is not known")

    def _look(self) -> None:
        now = time.monotonic()
        if not self._file or now - self._looked_at < _EVERY_S:
            return
        self._looked_at = now
        try:
            state = _state(self._file)
            if state != self._state:
                self._filed, self._state = _read(self._file), state
                _log.info("%s has changed: %d keys", self._file, len(self._filed))
        except ConfigError as error:
            if self._state is not None:
                _log.error("%s; the keys that were read before stay valid", error)
            self._state = None


def _refused(text: str) -> ApiError:
    return ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _state(file: str) -> object:
    try:
        status = os.stat(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(file: str) -> frozenset[str]:
    try:
        with open(file, "rb") as opened:
            data = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{file} has more than {_MAX_FILE_BYTES:,} bytes; wanted a file of API key digests")
    digests = set()
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = _DIGEST.fullmatch(line)
        if found is None:
            wanted = "wanted a SHA-256 digest, as `printf %s KEY | sha256sum` prints it"
            raise ConfigError(f"line {number} of {file} is not a digest; {wanted}")
        digests.add(found.group(1).lower())
    return frozenset(digests)
