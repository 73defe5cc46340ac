"""Members of a .tar or .tar.gz that is not trusted, as regions of files."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.sources.torch_pickle import Region

_MAX_MEMBERS = 10_000
_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 22
_MAX_HEADER_BYTES = 1 << 14  # of an extended header, and of all global ones
_MAX_HEADERS = 100  # maximum consecutive extended headers without a member
_EXTENDED = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
#: weights hardly compress: an archive that unpacks to more than this times its length is a bomb
_MAX_RATIO = 8
_SMALL_BYTES = 64 << 20  # bytes to which an archive of any ratio may unpack


class _Stream(io.RawIOBase):
    """File object from which tarfile reads an archive, with limits.

    unpacked: bytes that a compressed archive may unpack to; None: it is not compressed. A header of more than
    _MAX_HEADER_BYTES would be read into memory at once. Raises tarfile.ReadError.
    """

    def __init__(self, file: BinaryIO, unpacked: int | None):
        self._file, self._unpacked = file, unpacked
        self.most = _MAX_HEADER_BYTES  # bytes of a read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Seek forward in pieces in a compressed file, so that the limit of unpacked bytes is checked on the
        way.
        """
        if whence != io.SEEK_SET:
            raise tarfile.ReadError("it is not read in the order of an archive")
        while self._unpacked is not None and offset - self._file.tell() > _CHUNK:
            self._file.seek(self._file.tell() + _CHUNK)
            self._check()
        found = self._file.seek(offset)
        self._check()
        return found

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.most:
            raise tarfile.ReadError(f"it has a header of {size:,} bytes; wanted at most {self.most:,}")
        data = self._file.read(size)
        self._check()
        return data

    def _check(self) -> None:
        if self._unpacked is not None and self._file.tell() > self._unpacked:
            raise tarfile.ReadError(
                f"it unpacks to more than {self._unpacked:,} bytes, {_MAX_RATIO} times its length; weights "
                "do not compress so well: unpack it yourself if you trust it"
            )


class _Header(tarfile.TarInfo):
    """A header of an archive. tarfile recurses for consecutive extended headers, keeps global ones for all
    members, and reads a sparse member's map into memory.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        counts = vars(archive).setdefault("header_counts", {"row": 0, "global": 0})
        counts["row"] = counts["row"] + 1 if self.type in _EXTENDED else 0
        counts["global"] += self.size if self.type == tarfile.XGLTYPE else 0
        if counts["row"] > _MAX_HEADERS or counts["global"] > _MAX_HEADER_BYTES:
            raise tarfile.ReadError("it has too many extended headers")
        return super()._proc_member(archive)  # type: ignore[misc]

    def _refuse(self, *_: object) -> None:
        raise tarfile.ReadError("it has a sparse member")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse


class Archive:
    """The regular files of an archive by name; of a folder, likewise.

    An uncompressed archive is read in place. A compressed one is unpacked into a temporary folder, under
    names of ours, that lives as long as this object.
    """

    def __init__(self, path: Path):
        self.path = path
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.members = self._of_folder() if path.is_dir() else self._of_file()

    @property
    def folder(self) -> Path:
        """A temporary folder for files made of members."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tridecode-archive-")
        return Path(self._folder.name)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """A member's bytes. CheckpointError if it is missing or longer than `limit_bytes`."""
        region = self.members.get(name)
        if region is None:
            raise CheckpointError(f"{self.path} has no {name}")
        if region.size > limit_bytes:
            raise CheckpointError(
                f"{region.name} holds {region.size:,} bytes; wanted at most {limit_bytes:,}"
            )
        with open(region.path, "rb") as file:
            file.seek(region.start)
            return file.read(region.size)

    def _of_folder(self) -> dict[str, Region]:
        found = [*self.path.glob("*"), *self.path.glob("*/*")][:_MAX_MEMBERS]
        return {
            str(entry.relative_to(self.path)): Region.of_file(entry)
            for entry in sorted(found)
            if entry.is_file()
        }

    def _of_file(self) -> dict[str, Region]:
        with open(self.path, "rb") as file:
            compressed = file.read(2) == _GZIP
        unpacked = max(_SMALL_BYTES, _MAX_RATIO * self.path.stat().st_size) if compressed else None
        opened = gzip.open if compressed else open
        try:
            with opened(self.path, "rb") as file:
                stream = _Stream(file, unpacked)  # type: ignore[arg-type]
                with tarfile.open(fileobj=stream, mode="r:", tarinfo=_Header) as archive:
                    return self._members(archive, stream, compressed)
        except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise CheckpointError(f"{self.path} cannot be unpacked: {error.strerror}") from None
            found = " ".join(str(error).split())
            raise CheckpointError(f"{self.path} is not a readable tar archive: {found}") from None

    def _members(self, archive: tarfile.TarFile, stream: _Stream, compressed: bool) -> dict[str, Region]:
        members: dict[str, Region] = {}
        size = self.path.stat().st_size
        for count, member in enumerate(archive):
            if count >= _MAX_MEMBERS:
                raise CheckpointError(f"{self.path} has more than {_MAX_MEMBERS:,} members")
            name = _checked_name(member, self.path)
            if member.isdir():
                continue
            if name in members:
                raise CheckpointError(f"{self.path} has two members {name}")
            where = f"{self.path}: {name}"
            if compressed:
                stream.most = _CHUNK
                members[name] = self._unpack(archive, member, where)
                stream.most = _MAX_HEADER_BYTES
            elif member.offset_data + member.size > size:
                raise CheckpointError(f"{where} is cut short: {member.size:,} bytes, the archive ends before")
            else:
                members[name] = Region(self.path, member.offset_data, member.size, where)
        return members

    def _unpack(self, archive: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> Region:
        free = shutil.disk_usage(self.folder).free
        if member.size > free:
            raise CheckpointError(
                f"{where} has {member.size:,} bytes; {tempfile.gettempdir()} has {free:,} free (TMPDIR)"
            )
        target = self.folder / f"member-{member.offset_data}"
        source = archive.extractfile(member)
        assert source is not None, member
        with source, open(target, "wb") as file:
            shutil.copyfileobj(source, file, _CHUNK)  # no more than member.size
        if target.stat().st_size != member.size:
            raise CheckpointError(f"{where} is cut short: {target.stat().st_size:,} of {member.size:,} bytes")
        return Region(target, 0, member.size, where)


def _checked_name(member: tarfile.TarInfo, archive: Path) -> str:
    """Return a member's name without "./". Raises CheckpointError for anything but a regular file inside the
    archive's root.
    """
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        raise CheckpointError(f"{archive} has a member {member.name[:200]!r}, which lies outside of it")
    if not (member.isdir() or member.isreg()) or member.issparse() or member.size < 0:
        raise CheckpointError(f"{archive} has a member {member.name[:200]!r}, which is not a regular file")
    return str(path)
