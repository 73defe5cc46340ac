"""A rank's part of the host tier: a memory file that the supervisor owns, and its table of slots. No torch.

The file begins with the secret of the hashes, which its creator writes. The engine adds a hash of everything
that the blocks depend on (`identity`), the size of a slot, and the table; the slots follow. A slot holds one
block, all layers together. Its state is written last when it is filled, and cleared first when it is to be
overwritten, so a block that was half written when the engine was killed is never seen.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tridecode.backend.base.memory_file import SECRET_BYTES

_PAGE = 4096
#: the table's alignment of the data behind it
_ALIGN = 1 << 12
_VALID = 0x7469657256414C31
_HEADER = np.dtype(
    [
        ("secret", f"V{SECRET_BYTES}"),
        ("identity", "V32"),
        ("slot_bytes", "<u8"),
        ("num_slots", "<u8"),
    ]
)
_ENTRY = np.dtype(
    [("key", "V16"), ("parent", "V16"), ("checksum", "<i8"), ("serial", "<u8"), ("state", "<u8"), ("", "V8")]
)


class Entry(NamedTuple):
    """A filled slot. key, parent: identities of its block and of the one before (block_keys.py). serial:
    increases with each slot that is filled.
    """

    slot: int
    key: bytes
    parent: bytes
    serial: int


class HostRegion:
    """Maps a memory file; `fd` may be closed afterwards. `lay_out` comes before everything else.

    data: the mapping. start: offset of slot 0 in it.
    """

    def __init__(self, fd: int):
        self.size = os.fstat(fd).st_size
        self.resident = os.fstat(fd).st_blocks * 512  # bytes that have memory already
        self.data = mmap.mmap(fd, self.size)
        self._header = np.frombuffer(self.data, _HEADER, 1)
        self._table = np.zeros(0, _ENTRY)
        self._serial = 0
        self.num_slots = self.slot_bytes = self.start = 0

    @property
    def secret(self) -> bytes:
        return self._header["secret"][0].tobytes()

    def most_slots(self, slot_bytes: int) -> int:
        """Return the number of slots of a size for which there is room."""
        return max((self.size - _PAGE - _ALIGN) // (slot_bytes + _ENTRY.itemsize), 0)

    def lay_out(self, identity: bytes, slot_bytes: int, num_slots: int) -> None:
        """Divide the memory into slots. Blocks that were computed under another identity, or in slots of
        another size or number, are forgotten. identity: 32 bytes. num_slots: the same on all ranks.
        """
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        if not num_slots:
            return
        self._table = np.frombuffer(self.data, _ENTRY, self.num_slots, _PAGE)
        table_end = _PAGE + self.num_slots * _ENTRY.itemsize
        self.start = -(-table_end // _ALIGN) * _ALIGN
        header = self._header[0]
        wanted = (identity, slot_bytes, self.num_slots)
        if (header["identity"].tobytes(), header["slot_bytes"], header["num_slots"]) != wanted:
            self._table["state"] = 0
            header["identity"] = np.void(identity)
            header["slot_bytes"], header["num_slots"] = slot_bytes, self.num_slots
        self._serial = int(self._table["serial"].max())

    def entries(self) -> list[Entry]:
        """Return the filled slots, in the order in which they were filled."""
        filled = np.flatnonzero(self._table["state"] == _VALID)
        order = filled[np.argsort(self._table["serial"][filled], kind="stable")]
        rows = self._table[order]
        keys, parents = rows["key"].tobytes(), rows["parent"].tobytes()
        serials = rows["serial"].tolist()
        return [
            Entry(slot, keys[16 * i : 16 * i + 16], parents[16 * i : 16 * i + 16], serial)
            for i, (slot, serial) in enumerate(zip(order.tolist(), serials))
        ]

    def keys(self) -> bytes:
        """Return the identities in all slots, 16 bytes each; zeros for an empty slot."""
        keys = np.zeros((self.num_slots, 16), np.uint8)
        filled = self._table["state"] == _VALID
        keys[filled] = np.frombuffer(self._table["key"][filled].tobytes(), np.uint8).reshape(-1, 16)
        return keys.tobytes()

    def keep(self, others: Sequence[bytes]) -> None:
        """Empty the slots that do not hold the same block on all ranks. others: `keys` of every rank."""
        rows = [np.frombuffer(one, np.uint8).reshape(-1, 16) for one in others]
        count = min(map(len, rows))
        same = np.zeros(self.num_slots, bool)
        same[:count] = np.all([(row[:count] == rows[0][:count]).all(axis=1) for row in rows], axis=0)
        self._table["state"][~same] = 0

    def clear(self, slots: Sequence[int]) -> None:
        """Mark slots as empty, before they are overwritten or because their blocks are wrong."""
        self._table["state"][list(slots)] = 0

    def fill(self, slot: int, key: bytes, parent: bytes, checksum: int) -> None:
        """Mark a slot, whose data are complete, as filled."""
        row = self._table[slot]
        self._serial += 1
        row["key"], row["parent"] = np.void(key), np.void(parent)
        row["checksum"], row["serial"] = checksum, self._serial
        row["state"] = _VALID

    def checksum(self, slot: int) -> int | None:
        """Return the checksum of a filled slot; None for an empty one."""
        row = self._table[slot]
        return int(row["checksum"]) if row["state"] == _VALID else None
