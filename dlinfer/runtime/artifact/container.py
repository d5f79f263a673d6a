"""The container of artifacts: a zip whose members are stored as they are, with a manifest that vouches for them.

Every member but the manifest is listed there with its size and SHA-256; the archive's comment holds the manifest's
own. Members start on multiples of 64 bytes, so that tensors can be used where they lie in a mapped file. Nothing is
trusted before it is checked: names from a fixed alphabet, no compression, no member twice, none over another, none
that is not listed; so no file can make the reader write anywhere or allocate more than the file is long.

Any unzip program opens it. docs/guides/artifacts.md describes what the members are.
"""

import hashlib
import io
import json
import mmap
import os
import re
import secrets
import struct
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dlinfer.errors import ArtifactCorruptError, ArtifactNotFoundError

MANIFEST = "manifest.json"
ALIGNMENT = 64

_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+){0,3}\.(json|bin)", re.ASCII)
_COMMENT = re.compile(rb"dlinfer-artifact ([0-9a-f]{64})")
_MOST_MEMBERS = 10_000
_LARGEST_JSON = 1 << 28
_COARSEST_STEP = 2_000_000_000
"""Nanoseconds between two times that a file system can tell apart, at most: FAT counts in two seconds."""
_DATE = (1980, 1, 1, 0, 0, 0)  # equal contents give equal files

Buffer = bytes | bytearray | memoryview | mmap.mmap
Chunks = Iterable[Buffer]


# --- writing


class Writer:
    """Writes members one after the other into a stream, then the manifest."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._zip = zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED)
        self._members: dict[str, dict[str, Any]] = {}

    def add(self, name: str, chunks: Chunks) -> None:
        """A member from the parts of its contents."""
        digest, size = self._write(name, chunks)
        self._members[name] = {"size": size, "sha256": digest}

    def add_json(self, name: str, data: Any) -> None:
        """A member of JSON."""
        self.add(name, [_json(data)])

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest with the list of members, and end the archive."""
        digest, _ = self._write(MANIFEST, [_json(dict(manifest) | {"members": self._members})])
        self._zip.comment = f"dlinfer-artifact {digest}".encode()
        self._zip.close()

    def _write(self, name: str, chunks: Chunks) -> tuple[str, int]:
        if not _NAME.fullmatch(name) or name in self._members:
            raise ValueError(f"no name for a member: {name!r}")
        info = zipfile.ZipInfo(name, _DATE)
        info.external_attr = 0o644 << 16
        # zipfile puts 20 bytes of its own before this extra field, which only fills up to the alignment.
        start = self._zip.fp.tell() + 30 + len(name) + 20 + 4  # pyright: ignore[reportOptionalMemberAccess]
        fill = -start % ALIGNMENT
        info.extra = struct.pack("<HH", 0xD1FE, fill) + bytes(fill)
        digest, size = hashlib.sha256(), 0
        with self._zip.open(info, "w", force_zip64=True) as member:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                digest.update(view)
                size += len(view)
                member.write(view)
        return digest.hexdigest(), size


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Return a file that appears at ``path`` with all its contents when the block ends, or not at all."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with open(beside, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# --- reading


class OpenFile:
    """The file that a container is a mapping of, held open. What is written into it shows in the mapping.

    A file that is replaced, as ``written_whole`` does it, stays as it was for those that hold it open.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._seen = self._state()
        # A file's times are counted in steps of some milliseconds: the next write may have the same one.
        self.may_change_unseen = time.time_ns() - self._seen[1] < _COARSEST_STEP

    def changed(self) -> bool:
        """Whether the file was written since it was opened, as far as its size and times tell."""
        return self._state() != self._seen

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._stream.fileno())
        return found.st_size, found.st_mtime_ns


@dataclass
class Container:
    """An archive that was checked from end to end.

    members: the contents of each, where they lie. manifest: what the manifest says besides the list of members.
    memory: what the members lie in: a private mapping of the file, where writes stay in this process, or bytes.
    """

    source: str
    manifest: dict[str, Any]
    members: dict[str, memoryview]
    digests: dict[str, str]
    memory: Any = field(repr=False, default=None)
    file: OpenFile | None = field(repr=False, default=None)

    def check_unchanged(self) -> None:
        """Raise ArtifactCorruptError where the file's size or time say that it was written into since it was opened."""
        if self.file is not None and self.file.changed():
            self._refuse_change()

    def check_contents(self) -> None:
        """``check_unchanged``, which reads all members again where the file's times may not tell."""
        self.check_unchanged()
        if self.file is not None and self.file.may_change_unseen:
            for name, contents in self.members.items():
                if hashlib.sha256(contents).hexdigest() != self.digests[name]:
                    self._refuse_change()

    def _refuse_change(self) -> None:
        detail = (
            "the file was written into after it was loaded; load it again, and replace files, as save() does"
        )
        raise ArtifactCorruptError(source=self.source, detail=detail)

    def json(self, name: Any) -> Any:
        """Return the data of a JSON member. Raises ArtifactCorruptError."""
        return _parsed(self.member(name), self.source, str(name))

    def member(self, name: Any) -> memoryview:
        """Return the contents of a member. Raises ArtifactCorruptError where there is none of the name."""
        if not isinstance(name, str) or name not in self.members:
            raise ArtifactCorruptError(source=self.source, detail=f"there is no member {str(name)[:80]!r}")
        return self.members[name]


def open_container(origin: Path | Buffer, source: str) -> Container:
    """Check and open an archive from a file or from memory.

    source: what errors call it. Raises ArtifactNotFoundError and ArtifactCorruptError.
    """
    memory, file = _mapped(origin, source) if isinstance(origin, Path) else (origin, None)
    whole = memoryview(memory).cast("B")
    try:
        found = dict(_members(whole))
        comment = _checked_comment(whole)
    except _BadArchive as cause:
        raise ArtifactCorruptError(source=source, detail=str(cause)) from None
    except (zipfile.BadZipFile, struct.error, ValueError, OverflowError, IndexError, KeyError) as cause:
        raise ArtifactCorruptError(source=source, detail=f"it is no sound archive: {cause}") from cause
    except (NotImplementedError, UnicodeError, EOFError, OSError, MemoryError) as cause:
        raise ArtifactCorruptError(source=source, detail=f"it is no sound archive: {cause}") from cause
    if MANIFEST not in found or hashlib.sha256(found[MANIFEST]).hexdigest() != comment:
        raise ArtifactCorruptError(source=source, detail="its manifest is missing or was altered")
    manifest = _parsed(found.pop(MANIFEST), source, MANIFEST)
    listed = manifest.pop("members", None) if isinstance(manifest, dict) else None
    if not isinstance(listed, dict) or set(listed) != set(found):
        raise ArtifactCorruptError(source=source, detail="its members are not those that its manifest lists")
    for name, said in listed.items():
        _check_member(source, name, found[name], said)
    digests = {name: said["sha256"] for name, said in listed.items()}
    container = Container(source, manifest, found, digests, memory, file)
    container.check_unchanged()  # while it was read
    return container


class _BadArchive(Exception):
    """What is wrong with an archive."""


def _mapped(path: Path, source: str) -> tuple[Any, OpenFile]:
    try:
        stream = open(path, "rb")  # noqa: SIM115 - held as long as the mapping
        file = OpenFile(stream)
        if os.fstat(stream.fileno()).st_size == 0:
            raise ArtifactCorruptError(source=source, detail="it is empty")
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), file
    except OSError as cause:
        raise ArtifactNotFoundError(source=source, detail=cause.strerror or str(cause)) from cause


def _members(whole: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Each member's name and where its contents lie. Raises _BadArchive and what zipfile raises."""
    if bytes(whole[:4]) != b"PK\x03\x04":
        raise _BadArchive("it does not start as an artifact does")
    end = 0
    with zipfile.ZipFile(_Stream(whole)) as archive:
        infos = archive.infolist()
        if len(infos) > _MOST_MEMBERS:
            raise _BadArchive(f"it has {len(infos)} members")
        if len({info.filename for info in infos}) != len(infos):
            raise _BadArchive("it has two members of one name")
        for info in sorted(infos, key=lambda one: one.header_offset):
            if not _NAME.fullmatch(info.filename) or info.filename != info.orig_filename:
                raise _BadArchive(f"a member is called {info.filename[:80]!r}")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise _BadArchive(f"member {info.filename} is compressed")
            if info.flag_bits & ~0x0808:  # but for a trailing record of sizes, and for UTF-8
                raise _BadArchive(f"member {info.filename} has flags {info.flag_bits:#x}")
            start = _start(whole, info)
            if info.header_offset < end or start + info.file_size > len(whole):
                raise _BadArchive(f"member {info.filename} lies over another one or beyond the end")
            end = start + info.file_size
            yield info.filename, whole[start:end]


def _start(whole: memoryview, info: zipfile.ZipInfo) -> int:
    """Where a member's contents begin."""
    header = whole[info.header_offset : info.header_offset + 30]
    magic, name, extra = struct.unpack("<4s22xHH", header)
    begin = info.header_offset + 30
    if magic != b"PK\x03\x04" or bytes(whole[begin : begin + name]) != info.filename.encode():
        raise _BadArchive(f"member {info.filename} is not where the archive says")
    return begin + name + extra


def _checked_comment(whole: memoryview) -> str:
    """The manifest's digest, with which the archive must end."""
    found = _COMMENT.search(bytes(whole[-81:]))
    if found is None or found.end() != min(81, len(whole)):
        raise _BadArchive("it ends too early, or not as an artifact does")
    return found.group(1).decode()


def _check_member(source: str, name: str, contents: memoryview, said: Any) -> None:
    size, digest = (said.get("size"), said.get("sha256")) if isinstance(said, dict) else (None, None)
    if size != len(contents) or not isinstance(digest, str):
        raise ArtifactCorruptError(
            source=source, detail=f"member {name} has {len(contents)} bytes, not {size}"
        )
    if hashlib.sha256(contents).hexdigest() != digest:
        raise ArtifactCorruptError(source=source, detail=f"member {name} was altered")


def _parsed(contents: memoryview, source: str, name: str) -> Any:
    if len(contents) > _LARGEST_JSON:
        raise ArtifactCorruptError(source=source, detail=f"member {name} has {len(contents)} bytes")
    try:
        return json.loads(bytes(contents), parse_constant=_no_constant)
    except (ValueError, RecursionError) as cause:
        raise ArtifactCorruptError(source=source, detail=f"member {name} is no JSON: {cause}") from cause


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


class _Stream(io.RawIOBase):
    """A file to read from memory that is not copied."""

    def __init__(self, whole: memoryview) -> None:
        super().__init__()
        self._whole, self._at = whole, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._whole)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        found = self._whole[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
