"""Keeps collections of garbage short in a process that has loaded what it serves with."""

from __future__ import annotations

import gc


def freeze_objects() -> None:
    """Collect now, and exclude all objects that exist from later collections.

    torch and the other libraries have 200,000 objects. Without this a full collection, which every few
    hundred steps of large batches are followed by, stops all threads for 0.1 s and more.
    """
    gc.collect()
    gc.freeze()
