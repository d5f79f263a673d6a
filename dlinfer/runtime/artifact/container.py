"""The file format of artifacts: a safetensors file of members, with a digest of every part.

A member is a tensor of bytes, such as a JSON text or all weights. The last member holds the SHA-256 of the header and
of every other member, so any damaged byte is noticed. The first member starts at a multiple of 64 bytes, so that
tensors can be used in place in a mapped file.

A malicious file cannot make the reader write to disk, or allocate more memory than the file's length. The reader checks
that names use a fixed alphabet and that members follow each other without gaps.

Any safetensors reader can open the file. docs/guides/artifacts.md describes the members.
"""

import hashlib
import json
import mmap
import os
import re
import secrets
import struct
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dlinfer.errors import ArtifactCorruptError, ArtifactNotFoundError, ArtifactVersionError
from dlinfer.graph.codec.arguments import CodecError, Json, refuse_malformed
from dlinfer.runtime.artifact.sealing import Buffer, SealedWriter, unsealed

FORMAT = 3
MANIFEST = "manifest.json"
ALIGNMENT = 64

_DIGESTS = "digests.bin"
_HEADER = "header"
_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+){0,3}\.(json|bin)", re.ASCII)
_LENGTH = struct.Struct("<Q")
# The last bytes of formats 1 and 2, which were zip archives.
_OLD_END = re.compile(rb"dlinfer-artifact [0-9a-f]{64}")
_LARGEST_JSON = 1 << 28
_COARSEST_STEP = 2_000_000_000
"""The coarsest resolution of file times, in nanoseconds. FAT stores file times in steps of two seconds."""


# --- writing


@dataclass(frozen=True)
class Member:
    """The contents of a member. chunks: the bytes, in parts. size: the number of bytes of all chunks."""

    size: int
    chunks: Iterable[Buffer]


def json_bytes(data: Json) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def write_container(
    sink: IO[bytes] | SealedWriter, manifest: Json, contents: Mapping[str, Member | bytes]
) -> None:
    """Write the header, the members in order, the manifest and the digests.

    The first member starts at a multiple of 64 bytes.
    """
    members = {
        name: part if isinstance(part, Member) else Member(len(part), [part])
        for name, part in (*contents.items(), (MANIFEST, json_bytes(manifest)))
    }
    header: dict[str, Json] = {}
    offset = 0
    for name, member in members.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid name of a member")
        header[name] = _entry(offset, member.size)
        offset += member.size
    header[_DIGESTS] = _entry(offset, hashlib.sha256().digest_size * (len(members) + 1))
    text = json_bytes(header)
    text += b" " * (-(len(text) + _LENGTH.size) % ALIGNMENT)
    digests = hashlib.sha256(text).digest()
    sink.write(_LENGTH.pack(len(text)) + text)
    for member in members.values():
        digest = hashlib.sha256()
        for chunk in member.chunks:
            digest.update(chunk)
            sink.write(chunk)
        digests += digest.digest()
    sink.write(digests)


def _entry(offset: int, size: int) -> Json:
    return {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}


@contextmanager
def written_whole(path: Path) -> Generator[IO[bytes]]:
    """Open a temporary file to write.

    It gets the name ``path`` when the block ends, and is removed if the block raises.
    """
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


class MappedFile:
    """A mapped file, held open. If another process writes into the file, the mapping shows the write.

    If another process replaces the file, as ``written_whole`` does, the mapping keeps the old contents.
    """

    def __init__(self, path: Path) -> None:
        self._stream = open(path, "rb")  # noqa: SIM115 - held as long as the mapping
        self._opened = self._state()
        # File times advance in steps of milliseconds or more: a write right after this one may show the same time.
        self.may_change_unseen = time.time_ns() - self._opened[1] < _COARSEST_STEP
        is_empty = not self._opened[0]
        self.memory = b"" if is_empty else mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_COPY)

    def changed(self) -> bool:
        return self._state() != self._opened

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._stream.fileno())
        return status.st_size, status.st_mtime_ns


@dataclass
class Container:
    """The members of an artifact file, after a check of the whole file.

    members: name -> contents. The contents are not copied: they are a view of the bytes in memory, or of a private
        mapping of ``file``. Writes to that mapping stay in this process.
    manifest: the parsed JSON of the member manifest.json.
    digests: name -> SHA-256, of the header and of each member.
    """

    source: str
    manifest: Json
    members: dict[str, memoryview]
    digests: dict[str, bytes]
    file: MappedFile | None

    def check_unchanged(self, *, contents: bool = False) -> None:
        """Raise ArtifactCorruptError if the size or the modification time of the file changed since it was opened.

        contents: also compare the digests of all members, if a change may have kept the time. A file that was modified
            just before it was opened may get the same time from a later write.
        """
        if self.file is None:
            return
        reads = contents and self.file.may_change_unseen
        if self.file.changed() or (reads and not _digests(self.members).items() <= self.digests.items()):
            detail = (
                "the file was written into after it was loaded; load it again, and replace a file instead of "
                "writing into it, as save() does"
            )
            raise ArtifactCorruptError(source=self.source, detail=detail)

    def json(self, name: Json) -> Json:
        try:
            return _parsed(self.member(name))
        except CodecError as cause:
            detail = f"member {name} is not JSON: {cause}"
            raise ArtifactCorruptError(source=self.source, detail=detail) from cause

    def member(self, name: Json) -> memoryview:
        if not isinstance(name, str) or name not in self.members:
            raise ArtifactCorruptError(source=self.source, detail=f"it has no member {str(name)[:80]!r}")
        return self.members[name]


def open_container(origin: Path | Buffer, source: str, key: bytes | str | None = None) -> Container:
    """Open an artifact file, or an artifact's bytes in memory: decrypt it, and check it from end to end.

    source: the artifact's name in errors. key: see ``sealing.unsealed``.
    Raises ArtifactNotFoundError, ArtifactCorruptError, ArtifactKeyError, ArtifactVersionError.
    """
    file, mapped = None, origin
    if isinstance(mapped, Path):
        try:
            file = MappedFile(mapped)
        except OSError as cause:
            raise ArtifactNotFoundError(source=source, detail=cause.strerror or str(cause)) from cause
        mapped = file.memory
    if not len(mapped):
        raise ArtifactCorruptError(source=source, detail="it is empty")
    memory = unsealed(mapped, key, source)
    if _OLD_END.fullmatch(memory[-81:]):
        raise ArtifactVersionError(source=source, what="the format", wanted="of dlinfer 0.4", here=FORMAT)
    try:
        with refuse_malformed():
            members, digests = _checked(memoryview(memory).cast("B"))
    except CodecError as cause:
        raise ArtifactCorruptError(source=source, detail=str(cause)) from cause
    container = Container(source, None, members, digests, file if memory is mapped else None)
    container.manifest = container.json(MANIFEST)
    container.check_unchanged()  # it may have changed while it was read
    return container


def _checked(whole: memoryview) -> tuple[dict[str, memoryview], dict[str, bytes]]:
    """Check all bytes of an artifact. Return name -> contents (not copied), and name -> digest.

    Raises CodecError. For a malformed header, it may raise other errors.
    """
    if len(whole) < _LENGTH.size:
        raise CodecError("it is shorter than an artifact's header")
    (length,) = _LENGTH.unpack_from(whole)
    place = start = _LENGTH.size + length
    if start > len(whole):
        raise CodecError("it does not start like an artifact, or it ends within its header")
    parts = {_HEADER: whole[_LENGTH.size : start]}
    for name, entry in _parsed(parts[_HEADER]).items():
        (size,) = entry["shape"]
        if not _NAME.fullmatch(name):
            raise CodecError(f"a member has the name {name[:80]!r}, which is not valid")
        if type(size) is not int or size < 0 or entry != _entry(place - start, size):
            raise CodecError(f"member {name} overlaps another member, or lies behind a gap")
        parts[name] = whole[place : place + size]
        place += size
    if place != len(whole):
        raise CodecError(f"it has {len(whole)} bytes, but its header says {place}")
    stored = parts.pop(_DIGESTS)
    digests = _digests(parts)
    if bytes(stored) != b"".join(digests.values()):
        raise CodecError("it was altered: its contents do not match its digests")
    del parts[_HEADER]
    return parts, digests


def _digests(parts: Mapping[str, memoryview]) -> dict[str, bytes]:
    return {name: hashlib.sha256(part).digest() for name, part in parts.items()}


def _parsed(contents: memoryview) -> Json:
    if len(contents) > _LARGEST_JSON:
        raise CodecError(f"its JSON of {len(contents)} bytes is too large")
    with refuse_malformed():
        return json.loads(bytes(contents), parse_constant=_no_constant)


def _no_constant(text: str) -> None:
    raise CodecError(f"{text} is not a number in JSON")
