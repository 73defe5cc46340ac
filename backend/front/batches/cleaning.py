"""Removes what killed processes have left in the store."""

from __future__ import annotations

import shutil

from tridecode.backend.front.batches.batch_records import all_batches
from tridecode.backend.front.batches.objects import FINAL, result_ids
from tridecode.backend.front.batches.store import Store


def clean(store: Store) -> None:
    """Remove dead uploads, contents that belong to no file and no open batch, and drafts.

    Only for the process of the batches, before it begins.
    """
    with store.locked():
        store.usage()  # removes dead uploads
        unfinished = [batch.id for batch in all_batches(store) if batch.status not in FINAL]
        kept = {file_id for batch_id in unfinished for file_id in result_ids(batch_id)}
        for path in store.files.iterdir():
            is_draft = path.name.startswith(".")
            has_card = path.stem in kept or store.card(path.stem).exists()
            is_orphan = path.suffix == ".data" and not has_card
            is_empty = path.suffix == ".json" and not store.data(path.stem).exists()
            if is_draft or is_orphan or is_empty:
                path.unlink(missing_ok=True)
        for folder in store.batches.iterdir():
            if folder.name.startswith("."):
                shutil.rmtree(folder, ignore_errors=True)
