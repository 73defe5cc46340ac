"""The process of the batches looks for work without reading what has ended."""

from __future__ import annotations

import asyncio
from typing import Any

from tridecode.backend.front.batches import batch_records, process
from tridecode.backend.front.batches.objects import Batch, State, new_batch_id
from tridecode.backend.front.batches.store import Store, encoded, write_whole


def test_a_batch_that_has_ended_is_read_once(store: Store, monkeypatch: Any) -> None:
    for status in ("completed", "failed", "expired", "cancelled"):
        made = Batch(
            id=new_batch_id(),
            endpoint="/v1/completions",
            input_file_id="",
            completion_window="24h",
            created_at=1,
            expires_at=2,
        )
        (store.batches / made.id).mkdir()
        write_whole(store.batches / made.id / "batch.json", encoded(made))
        batch_records.write_state(store, made.id, State(status=status))
    read, looks = list[str](), 0
    real_batch, real_all = batch_records.read_batch, batch_records.all_batches
    stop = asyncio.Event()

    def read_batch(store: Store, batch_id: str) -> Batch | None:
        read.append(batch_id)
        return real_batch(store, batch_id)

    def all_batches(*arguments: Any) -> list[Batch]:
        nonlocal looks
        looks += 1
        found = real_all(*arguments)
        if looks == 3:
            loop.call_soon_threadsafe(stop.set)
        return found

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        await process._answer_found(store, None, 1, stop)  # type: ignore[arg-type]

    loop: Any = None
    monkeypatch.setattr(batch_records, "read_batch", read_batch)
    monkeypatch.setattr(process, "all_batches", all_batches)
    asyncio.run(main())
    assert looks == 3 and len(read) == len(set(read)) == 4
