"""Uploading weights ahead of the model, in whatever order the model asks; here without a device."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.waiting import wait_until
from tridecode.backend.engine.device.file_weights import _AHEAD, _THREADS, Uploader


class HostUploader(Uploader):
    """Keeps the uploads in host memory, as a device would have them."""

    def _upload(self, name: str) -> torch.Tensor:
        return self._read(name)


@pytest.mark.parametrize("ahead_of_turn", range(_AHEAD - 2, _AHEAD + _THREADS + 2))
def test_a_tensor_asked_for_before_its_turn_needs_no_room(ahead_of_turn) -> None:
    """BLOOM's last norm is read third; with four layers it is the first that finds no room."""
    read: list[str] = []
    names = [str(number) for number in range(_AHEAD + 2 * _THREADS)]
    uploader = HostUploader(
        names, lambda name: read.append(name) or torch.tensor(int(name)), torch.device("cpu")
    )
    asker = ThreadPoolExecutor(1)
    try:
        wait_until(lambda: len(read) == _AHEAD)
        first = str(ahead_of_turn)
        order = [first, *(name for name in names if name != first)]
        for name in order:
            assert asker.submit(uploader.take, name).result(timeout=60).item() == int(name)
    finally:
        uploader.close()
        asker.shutdown()
    assert sorted(read, key=int) == names


def test_no_more_is_uploaded_than_there_is_room_for_and_close_drops_the_rest() -> None:
    read: list[str] = []
    names = [str(number) for number in range(4 * _AHEAD)]
    uploader = HostUploader(names, lambda name: read.append(name) or torch.zeros(1), torch.device("cpu"))
    wait_until(lambda: len(read) == _AHEAD)
    time.sleep(0.05)
    assert len(read) == _AHEAD
    uploader.take("0")
    wait_until(lambda: len(read) == _AHEAD + 1)
    closing = threading.Thread(target=uploader.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive() and len(read) <= _AHEAD + 1 + _THREADS
