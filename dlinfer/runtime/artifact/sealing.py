"""Encrypted artifacts: AES-256-GCM over counted frames of the container, or a decryption of the user's own.

A sealed file is a header and frames of a mebibyte, each with its tag. A frame's nonce holds the file's random
prefix, the frame's number and whether it is the last one, and the header is authenticated with each; so no frame
can be altered, left out, repeated, moved, or taken from another file, and a file cannot end early. It is written
and read as a stream, and decrypted into memory, never to disk.
"""

import os
import secrets
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from dlinfer.errors import (
    ArtifactCorruptError,
    ArtifactKeyError,
    ArtifactStorageError,
    UnsupportedFeatureError,
)

KEY_BYTES = 32
FRAME = 1 << 20

_MAGIC = b"dlinfer-sealed-1"
_HEADER = struct.Struct(">16s7s9x")  # magic, the prefix of nonces; 32 bytes, then the key's check
_TAG = 16

Decrypt = Callable[[bytes, bytes | None], bytes]
"""From a file's bytes and the registered key to the bytes of an artifact."""


# --- keys by name


@dataclass(frozen=True)
class _Registered:
    function: Decrypt | None
    key: bytes | None


_registered: dict[str, _Registered] = {}
_lock = threading.Lock()


def register_decryption(name: str, function: Decrypt | None = None, key: bytes | None = None) -> None:
    """Let ``dlinfer.load(path, key=name)`` decrypt with a function and a key of your own.

    function: called with the file's bytes and ``key``, gives the bytes of an artifact; it raises where the key is
        wrong. None takes the built-in AES-256-GCM, for which ``key`` has 32 bytes.
    A name that is known already is replaced.
    """
    if function is None:
        _checked_key(key, f"the registered decryption {name!r}")
    with _lock:
        _registered[name] = _Registered(function, key)


def update_decryption_key(name: str, key: bytes) -> None:
    """Give a registered decryption another key. Raises ArtifactKeyError for an unknown name."""
    register_decryption(name, _of_name(name, "to be registered").function, key)


def _of_name(name: str, source: str) -> _Registered:
    with _lock:
        if name not in _registered:
            known = ", ".join(sorted(_registered)) or "none"
            detail = f"no decryption is registered as {name!r}; registered: {known}"
            raise ArtifactKeyError(source=source, detail=detail)
        return _registered[name]


def _checked_key(key: Any, source: str) -> bytes:
    if not isinstance(key, (bytes, bytearray)) or len(key) != KEY_BYTES:
        given = f"{len(key)} bytes" if isinstance(key, (bytes, bytearray)) else f"a {type(key).__name__}"
        raise ArtifactKeyError(source=source, detail=f"a key has {KEY_BYTES} bytes, given was {given}")
    return bytes(key)


# --- writing


class SealedWriter:
    """A stream that encrypts what is written to it into another one. ``close`` writes the last frame."""

    def __init__(self, stream: IO[bytes], key: bytes) -> None:
        self._stream = stream
        self._cipher = _cipher(_checked_key(key, "to be saved"))
        self._header = _HEADER.pack(_MAGIC, secrets.token_bytes(7))
        self._waiting = bytearray()
        self._frames = 0
        self._length = 0
        stream.write(
            self._header + self._cipher.encrypt(_nonce(self._header, 0xFFFFFFFF, True), b"", self._header)
        )

    def write(self, data: Any) -> int:
        """Encrypt ``data`` behind what was written before."""
        view = memoryview(data).cast("B")
        self._waiting += view
        while len(self._waiting) > FRAME:
            self._frame(bytes(self._waiting[:FRAME]), last=False)
            del self._waiting[:FRAME]
        self._length += len(view)
        return len(view)

    def tell(self) -> int:
        """How much was written."""
        return self._length

    def flush(self) -> None:
        """Frames are written when they are full."""

    def seekable(self) -> bool:
        """Return False: what is encrypted cannot be changed."""
        return False

    def close(self) -> None:
        """Write the last frame."""
        self._frame(bytes(self._waiting), last=True)

    def _frame(self, plain: bytes, *, last: bool) -> None:
        if self._frames == 0xFFFFFFFE:
            raise ArtifactStorageError(what="the artifact", detail="it has more than 4 PiB")
        self._stream.write(
            self._cipher.encrypt(_nonce(self._header, self._frames, last), plain, self._header)
        )
        self._frames += 1


def _nonce(header: bytes, number: int, last: bool) -> bytes:
    return header[16:23] + number.to_bytes(4, "big") + bytes([last])


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise UnsupportedFeatureError(
            feature="an encrypted artifact",
            where="this installation",
            advice="install the package `cryptography`: pip install 'dlinfer[sealed]'",
        ) from None
    return AESGCM(key)


# --- reading


def is_sealed(start: bytes) -> bool:
    """Return whether a file that starts so is sealed."""
    return start[: len(_MAGIC)] == _MAGIC


def unsealed(data: Any, key: bytes | str | None, source: str) -> Any:
    """Return the bytes of the artifact in ``data`` (bytes or a mapped file), which need not be encrypted without a key.

    key: of 32 bytes, or the name of a registered decryption.
    Raises ArtifactKeyError where the key is missing or wrong, and ArtifactCorruptError where frames were altered.
    """
    if isinstance(key, str):
        registered = _of_name(key, source)
        if registered.function is not None:
            return _by_function(registered, memoryview(data), key, source)
        key = registered.key
    if not is_sealed(bytes(memoryview(data)[:16])):
        if key is not None:
            raise ArtifactCorruptError(source=source, detail="a key was given, but it is not encrypted")
        return data
    if key is None:
        raise ArtifactKeyError(source=source, detail="no key was given")
    return _decrypted(memoryview(data), _checked_key(key, source), source)


def _by_function(registered: _Registered, data: memoryview, name: str, source: str) -> bytes:
    assert registered.function is not None
    try:
        plain = registered.function(bytes(data), registered.key)
    except Exception as cause:  # the user's own function says in its own way that a key is wrong
        detail = f"the decryption {name!r} failed: {type(cause).__name__}: {cause}"
        raise ArtifactKeyError(source=source, detail=detail) from cause
    if not isinstance(plain, (bytes, bytearray, memoryview)):
        detail = f"the decryption {name!r} gave a {type(plain).__name__}, not bytes"
        raise ArtifactKeyError(source=source, detail=detail)
    return bytes(plain) if isinstance(plain, memoryview) else plain


def _decrypted(data: memoryview, key: bytes, source: str) -> bytearray:
    from cryptography.exceptions import InvalidTag

    cipher = _cipher(key)
    header, frames = bytes(data[: _HEADER.size]), data[_HEADER.size + _TAG :]
    if len(frames) < _TAG:
        raise ArtifactCorruptError(source=source, detail="it ends within its header")
    try:
        cipher.decrypt(_nonce(header, 0xFFFFFFFF, True), bytes(data[_HEADER.size :][:_TAG]), header)
    except InvalidTag:
        raise ArtifactKeyError(source=source, detail="this is not its key") from None
    count = -(-len(frames) // (FRAME + _TAG))
    plain = bytearray(len(frames) - count * _TAG)
    place = 0
    for number in range(count):
        sealed = frames[number * (FRAME + _TAG) : (number + 1) * (FRAME + _TAG)]
        try:
            part = cipher.decrypt(_nonce(header, number, number == count - 1), sealed, header)
        except (InvalidTag, ValueError):
            raise ArtifactCorruptError(
                source=source, detail=f"frame {number} was altered or cut off"
            ) from None
        plain[place : place + len(part)] = part
        place += len(part)
    return plain


def new_key() -> bytes:
    """Return a random key for ``artifact.save(path, key=...)``."""
    return os.urandom(KEY_BYTES)
