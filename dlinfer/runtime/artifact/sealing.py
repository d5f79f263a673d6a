"""Encrypted artifacts: built-in AES-256-GCM, or a decryption function of the user.

The built-in encryption must notice every change, even if frames as a whole are dropped, repeated, moved or taken from
another file, or if the file ends early. So a sealed file is a header, an empty frame that only checks the key, and
frames of one MiB. Each frame ends with an authentication tag, which covers the header, too. The nonce of a frame holds
a random prefix of the file, the frame's number and whether the frame is the last.

Sealed files are written as a stream. They are decrypted into memory, never to disk.
"""

import os
import secrets
import struct
from collections.abc import Callable
from mmap import mmap
from typing import IO, TYPE_CHECKING

from dlinfer.errors import (
    ArtifactCorruptError,
    ArtifactKeyError,
    ArtifactStorageError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
FRAME = 1 << 20

_MAGIC = b"dlinfer-sealed-1"
_HEADER = struct.Struct(">16s7s9x")  # magic bytes, the nonces' prefix, padding: 32 bytes
_TAG = 16
_KEY_CHECK = 0xFFFFFFFF
"""The number of the empty frame after the header.

If the tag of this frame is wrong, the key is wrong; if only other tags are wrong, the file is damaged.
"""

Buffer = bytes | bytearray | memoryview | mmap

Decrypt = Callable[[bytes, bytes | None], object]
"""A function that takes the bytes of a file and the registered key, and returns the bytes of an artifact."""

_registered: dict[str, tuple[Decrypt | None, bytes | None]] = {}


# --- keys


def register_decryption(name: str, function: Decrypt | None = None, key: bytes | None = None) -> None:
    """Let ``dlinfer.load(path, key=name)`` decrypt with a function and a key of the caller.

    function: takes the bytes of the file and ``key``, and returns the bytes of an artifact. It raises an error if the
    key is wrong. None means the built-in AES-256-GCM with a ``key`` of 32 bytes.

    An earlier decryption with the same ``name`` is replaced.
    """
    if function is None:
        _cipher(key, f"of the decryption {name!r}")
    _registered[name] = function, key


def update_decryption_key(name: str, key: bytes) -> None:
    """Replace the key of a registered decryption. Raises ArtifactKeyError for an unknown name."""
    register_decryption(name, _decryption(name, f"of the decryption {name!r}")[0], key)


def _decryption(name: str, source: str) -> tuple[Decrypt | None, bytes | None]:
    if name not in _registered:
        known = ", ".join(sorted(_registered)) or "none"
        detail = f"no decryption is registered as {name!r}; registered: {known}"
        raise ArtifactKeyError(source=source, detail=detail)
    return _registered[name]


def new_key() -> bytes:
    """Return a random key for ``artifact.save(path, key=...)``."""
    return os.urandom(KEY_BYTES)


def _cipher(key: object, source: str) -> "AESGCM":
    if not isinstance(key, (bytes, bytearray)) or len(key) != KEY_BYTES:
        kind = f"{len(key)} bytes" if isinstance(key, (bytes, bytearray)) else f"a {type(key).__name__}"
        raise ArtifactKeyError(
            source=source, detail=f"a key has {KEY_BYTES} bytes, but the passed key is {kind}"
        )
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise UnsupportedFeatureError(
            feature="an encrypted artifact",
            where="this installation",
            advice="install the package `cryptography` with pip install 'dlinfer[sealed]'",
        ) from None
    return AESGCM(bytes(key))


def _nonce(header: bytes, number: int, last: bool) -> bytes:
    return header[16:23] + number.to_bytes(4, "big") + bytes([last])


# --- writing


class SealedWriter:
    """A stream that encrypts the data written to it, and writes the encrypted frames to another stream.

    ``close`` writes the last frame; without it, the file cannot be read. ``close`` leaves the other stream open.
    """

    def __init__(self, stream: IO[bytes], key: bytes) -> None:
        self._stream = stream
        self._cipher = _cipher(key, "to be saved")
        self._header = _HEADER.pack(_MAGIC, secrets.token_bytes(7))
        self._waiting = bytearray()
        self._frames = 0
        stream.write(self._header + self._sealed(b"", _KEY_CHECK, last=True))

    def write(self, data: Buffer, /) -> None:
        self._waiting += data
        while len(self._waiting) > FRAME:
            self._write_frame(bytes(self._waiting[:FRAME]), last=False)
            del self._waiting[:FRAME]

    def close(self) -> None:
        self._write_frame(bytes(self._waiting), last=True)

    def _write_frame(self, plain: bytes, *, last: bool) -> None:
        if self._frames == _KEY_CHECK - 1:
            raise ArtifactStorageError(what="the artifact", detail="it is larger than 4 PiB")
        self._stream.write(self._sealed(plain, self._frames, last=last))
        self._frames += 1

    def _sealed(self, plain: bytes, number: int, *, last: bool) -> bytes:
        return self._cipher.encrypt(_nonce(self._header, number, last), plain, self._header)


# --- reading


def unsealed(data: Buffer, key: bytes | str | None, source: str) -> Buffer:
    """Return ``data`` decrypted. Data that is not encrypted is returned as it is, if no key is passed.

    key: 32 bytes, or the name of a registered decryption. source: the artifact's name in errors.
    Raises ArtifactKeyError if the key is missing or wrong. Raises ArtifactCorruptError if frames were altered, or if a
    key is passed for data that is not encrypted.
    """
    if isinstance(key, str):
        function, registered_key = _decryption(key, source)
        if function is not None:
            return _decrypted_by(function, data, registered_key, source, key)
        key = registered_key
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        if key is not None:
            raise ArtifactCorruptError(
                source=source, detail="a key was passed, but the file is not encrypted"
            )
        return data
    if key is None:
        raise ArtifactKeyError(source=source, detail="the file is encrypted, and no key was passed")
    return _decrypted(memoryview(data), key, source)


def _decrypted_by(function: Decrypt, data: Buffer, key: bytes | None, source: str, name: str) -> Buffer:
    try:
        plain = function(bytes(data), key)
    except Exception as cause:  # the user's function may raise any class for a wrong key
        detail = f"the decryption {name!r} failed: {type(cause).__name__}: {cause}"
        raise ArtifactKeyError(source=source, detail=detail) from cause
    if isinstance(plain, memoryview):
        plain = plain.tobytes()
    if not isinstance(plain, (bytes, bytearray)):
        detail = f"the decryption {name!r} returned a {type(plain).__name__}, not bytes"
        raise ArtifactKeyError(source=source, detail=detail)
    return plain


def _decrypted(data: memoryview, key: bytes, source: str) -> bytearray:
    cipher = _cipher(key, source)
    from cryptography.exceptions import InvalidTag

    header, frames = bytes(data[: _HEADER.size]), data[_HEADER.size + _TAG :]
    if len(frames) < _TAG:
        raise ArtifactCorruptError(source=source, detail="it ends within its header")
    try:
        cipher.decrypt(_nonce(header, _KEY_CHECK, True), data[_HEADER.size :][:_TAG], header)
    except InvalidTag:
        raise ArtifactKeyError(source=source, detail="the file was encrypted with another key") from None
    plain = bytearray()
    size = FRAME + _TAG
    for number, start in enumerate(range(0, len(frames), size)):
        frame, last = frames[start : start + size], start + size >= len(frames)
        try:
            plain += cipher.decrypt(_nonce(header, number, last), frame, header)
        except (InvalidTag, ValueError):
            detail = f"frame {number} was altered or cut off"
            raise ArtifactCorruptError(source=source, detail=detail) from None
    return plain
