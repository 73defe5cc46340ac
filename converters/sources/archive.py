"""Members of a .tar or .tar.gz that is not trusted, as regions of files."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath

from tridecode.backend.errors import CheckpointError
from tridecode.converters.sources.torch_file import Region

_MAX_MEMBERS = 10_000
_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 22


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
        try:
            with tarfile.open(self.path, "r:gz" if compressed else "r:") as archive:
                return self._members(archive, compressed)
        except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise CheckpointError(f"{self.path} cannot be unpacked: {error.strerror}") from None
            found = " ".join(str(error).split())
            raise CheckpointError(f"{self.path} is not a readable tar archive: {found}") from None

    def _members(self, archive: tarfile.TarFile, compressed: bool) -> dict[str, Region]:
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
                members[name] = self._unpack(archive, member, where)
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
    """A member's name without "./". CheckpointError for what is no regular file or lies elsewhere."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        raise CheckpointError(f"{archive} has a member {member.name[:200]!r}, which lies outside of it")
    if not (member.isdir() or member.isreg()) or member.issparse():
        raise CheckpointError(f"{archive} has a member {member.name[:200]!r}, which is no regular file")
    return str(path)
