"""Hashes the prompts of requests, in the thread in which they arrive. Host only, without torch."""

from __future__ import annotations

from typing import NamedTuple

from tridecode.backend.engine.cache.block_keys import BlockHasher, Context
from tridecode.backend.wire.messages import SequenceRequest, Submit
from tridecode.backend.wire.sampling_params import SamplingParams


class PromptKeys(NamedTuple):
    """The hash chain of a prompt, before the mask of its context (block_keys.py).

    root: the parent of the first key. keys: one for each full block of the prompt. reads: whether the prompt
    may use cached blocks; False: it only adds its own.
    """

    root: bytes
    keys: list[bytes]
    reads: bool = True


class HashedSubmit(NamedTuple):
    """A request and the keys of its prompts."""

    submit: Submit
    keys: list[PromptKeys | None]


class PromptHasher:
    """Decides which prompts enter the prefix index, and computes their keys. Threads may share one.

    scope: cache_scope of config.pbtxt; "none": no prompt enters. max_tokens: longest prompt; the rest of a
    longer one, which the scheduler refuses, is not hashed.
    """

    def __init__(self, hasher: BlockHasher, block_tokens: int, scope: str, max_tokens: int):
        self._hasher, self._scope = hasher, scope
        self._block_bytes, self._most = 4 * block_tokens, 4 * max_tokens

    def keys(self, submit: Submit) -> list[PromptKeys | None]:
        """Return the keys of each prompt of a request; None for a prompt that does not enter the index.

        Prompts with a table of their own do not enter it. Only the scheduler knows the whole prompts of
        sessions; it calls `of`.
        """
        if submit.session is not None:
            return [None] * len(submit.sequences)
        return [self._keys(wanted) for wanted in submit.sequences]

    def of(
        self, prompt: bytes, params: SamplingParams, known: PromptKeys | None = None, known_bytes: int = 0
    ) -> PromptKeys | None:
        """Return the keys of a prompt, int32 ids as bytes. known: those of another prompt whose first
        known_bytes bytes are equal; they are not hashed again under the same salt.
        """
        if not self._enters(params):
            return None
        root = self._hasher.root(Context(salt=params.cache_salt))
        size = min(len(prompt), self._most) // self._block_bytes * self._block_bytes
        is_same = known is not None and known.root == root
        keys = known.keys[: min(known_bytes, size) // self._block_bytes] if known and is_same else []
        rest = prompt[len(keys) * self._block_bytes : size]
        keys = keys + self._hasher.chain(keys[-1] if keys else root, rest, self._block_bytes)
        return PromptKeys(root, keys, params.cache == "on")

    def _keys(self, wanted: SequenceRequest) -> PromptKeys | None:
        if wanted.learned is not None and wanted.learned.task < 0:
            return None
        return self.of(wanted.prompt, wanted.params)

    def _enters(self, params: SamplingParams) -> bool:
        if params.cache == "off" or self._scope == "none":
            return False
        return self._scope == "all" or bool(params.cache_salt)
