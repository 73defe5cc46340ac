"""Identities of cache blocks: keyed hashes of token ids. Host only, without torch.

The identity of a block is the keyed 128-bit BLAKE2b hash of the previous block's identity and its token ids;
the chain begins at a root that depends on the salt. The hash of everything else that the block's keys and
values depend on (`Context`) is combined with it by exclusive or, so that ids can be hashed before the context
is known: in the I/O thread, while the request's adapter may still be loading. The hash key is random, so a
request cannot forge the identity of another's block. It lives as long as the blocks: with a host tier, longer
than the process. A context therefore has no number that only this process understands.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_KEY_BYTES = 16


class Context(NamedTuple):
    """Everything besides its tokens that the keys and values of a block depend on.

    adapter: digest of the adapter's matrices; b"": none. prompt: number of the task whose table of virtual
    tokens the prompt has, -1: none; tables that a request sends never enter the index. shift: added to rotary
    positions. ring: see sessions.py; 0: none. salt: separates owners; requests with different salts never
    find each other's blocks.
    """

    adapter: bytes = b""
    prompt: int = -1
    shift: int = 0
    ring: int = 0
    salt: str = ""


class BlockHasher:
    """Computes identities. Threads may share one: it has no state besides its key.

    secret: 32 bytes; None: random.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        # copied for each hash, because hashing the key block is a third of the work
        self._keyed = hashlib.blake2b(digest_size=_KEY_BYTES, key=secret or secrets.token_bytes(32))

    def root(self, context: Context) -> bytes:
        """Return the parent of the first block of every chain with this context."""
        return self._hash(repr(tuple(context)).encode())

    def chain(self, parent: bytes, ids: bytes, block_bytes: int) -> list[bytes]:
        """Return the identities of consecutive blocks after `parent`.

        Each block holds the next block_bytes of ids; the last may hold fewer.
        """
        keys = []
        for first in range(0, len(ids), block_bytes):
            parent = self._hash(parent + ids[first : first + block_bytes])
            keys.append(parent)
        return keys

    def mask(self, context: Context) -> bytes:
        """Return the argument of `masked` for a context; b"" for that of the base model. The salt does not
        count: the root of the chain depends on it.
        """
        context = context._replace(salt="")
        return b"" if context == Context() else self.root(context)

    def _hash(self, data: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(data)
        return keyed.digest()


def masked(keys: Sequence[bytes], mask: bytes) -> list[bytes]:
    """Return the identities of blocks whose chain has these keys and whose context has this mask."""
    if not mask or not keys:
        return list(keys)
    rows = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2) ^ np.frombuffer(mask, np.uint64)
    data = rows.tobytes()
    return [data[first : first + _KEY_BYTES] for first in range(0, len(data), _KEY_BYTES)]
