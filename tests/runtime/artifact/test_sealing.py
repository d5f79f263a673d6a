"""Encrypted artifacts: only the key opens them; no frame can be altered, moved or left out."""

from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="encryption needs the extra `sealed`")

from dlinfer.errors import ArtifactCorruptError, ArtifactKeyError
from dlinfer.runtime.artifact import sealing
from dlinfer.runtime.artifact.sealing import (
    FRAME,
    SealedWriter,
    new_key,
    register_decryption,
    unsealed,
)

KEY = bytes(range(32))
OTHER = bytes(32)


def sealed(plain: bytes, key: bytes = KEY, pieces: int = 1) -> bytes:
    stream = BytesIO()
    writer = SealedWriter(stream, key)
    step = max(1, len(plain) // pieces)
    for start in range(0, len(plain), step):
        writer.write(plain[start : start + step])
    writer.close()
    return stream.getvalue()


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(sealing, "_registered", {})


@pytest.mark.parametrize("length", [0, 1, 1000, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME + 5])
@pytest.mark.parametrize("pieces", [1, 3])
def test_what_is_sealed_is_opened_by_its_key(length, pieces):
    plain = (b"0123456789" * (length // 10 + 1))[:length]
    data = sealed(plain, pieces=pieces)
    assert bytes(unsealed(data, KEY, "x")) == plain
    assert length < 16 or plain not in data  # a few bytes stand in any random ones


def test_two_files_of_one_key_are_not_alike():
    assert sealed(b"a" * 100)[48:] != sealed(b"a" * 100)[48:]


def test_a_wrong_or_missing_key_is_told_from_a_damaged_file():
    data = sealed(b"secret")
    for key, why in [
        (None, "no key was passed"),
        (OTHER, "with another key"),
        (b"short", "32 bytes, but the passed key is 5 bytes"),
    ]:
        with pytest.raises(ArtifactKeyError, match=why):
            unsealed(data, key, "x")
    with pytest.raises(ArtifactKeyError, match="a key has 32 bytes"):
        SealedWriter(BytesIO(), b"short")
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(ArtifactCorruptError, match="frame 0 was altered"):
        unsealed(damaged, KEY, "x")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_byte_can_be_altered(place, mask):
    data = bytearray(sealed(b"0123456789" * 20))
    data[place % len(data)] ^= mask
    with pytest.raises((ArtifactCorruptError, ArtifactKeyError)):
        assert unsealed(bytes(data), KEY, "x") == b""  # without its magic it counts as not encrypted


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 270))
def test_it_cannot_end_early(length):
    data = sealed(b"0123456789" * 20)
    assert len(data) > 250
    with pytest.raises((ArtifactCorruptError, ArtifactKeyError)):
        unsealed(data[: min(length, len(data) - 1)], KEY, "x")


def frames(data: bytes) -> list[bytes]:
    body = data[48:]
    return [body[start : start + FRAME + 16] for start in range(0, len(body), FRAME + 16)]


def test_frames_cannot_be_moved_repeated_or_left_out():
    data = sealed(bytes(FRAME) + b"a" * FRAME + b"b" * 10)
    head, (first, second, last) = data[:48], frames(data)
    assert bytes(unsealed(head + first + second + last, KEY, "x")[-10:]) == b"b" * 10
    for order in (
        [second, first, last],
        [first, last],
        [first, second],
        [first, first, last],
        [first, second, last, last],
    ):
        with pytest.raises(ArtifactCorruptError, match="altered or cut off"):
            unsealed(head + b"".join(order), KEY, "x")
    stranger = frames(sealed(bytes(FRAME) + b"a" * FRAME + b"b" * 10))
    with pytest.raises(ArtifactCorruptError, match="frame 1"):
        unsealed(head + first + stranger[1] + last, KEY, "x")


def test_a_key_for_what_is_not_encrypted_is_refused():
    assert unsealed(b"plain bytes", None, "x") == b"plain bytes"
    with pytest.raises(ArtifactCorruptError, match="a key was passed, but the file is not encrypted"):
        unsealed(b"plain bytes", KEY, "x")


def test_registered_keys_are_found_by_name():
    register_decryption("ours", key=KEY)
    assert bytes(unsealed(sealed(b"abc"), "ours", "x")) == b"abc"
    sealing.update_decryption_key("ours", OTHER)
    with pytest.raises(ArtifactKeyError, match="with another key"):
        unsealed(sealed(b"abc"), "ours", "x")
    for call in (
        lambda: unsealed(b"", "theirs", "x"),
        lambda: sealing.update_decryption_key("theirs", KEY),
    ):
        with pytest.raises(ArtifactKeyError, match="registered as 'theirs'; registered: ours"):
            call()
    with pytest.raises(ArtifactKeyError, match="32 bytes"):
        register_decryption("short", key=b"abc")


def test_a_decryption_of_ones_own():
    """A function from the file's bytes and the key."""

    def swapped(data: bytes, key: bytes | None) -> bytes:
        assert key is not None
        if key != b"k":
            raise RuntimeError("bad key")
        return data[::-1]

    register_decryption("swap", swapped, b"k")
    assert unsealed(b"abc", "swap", "x") == b"cba"
    sealing.update_decryption_key("swap", b"other")
    with pytest.raises(ArtifactKeyError, match="'swap' failed: RuntimeError: bad key"):
        unsealed(b"abc", "swap", "x")
    register_decryption("nothing", lambda data, key: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArtifactKeyError, match="returned a NoneType, not bytes"):
        unsealed(b"abc", "nothing", "x")


def test_a_new_key_fits():
    key = new_key()
    assert bytes(unsealed(sealed(b"abc", key), key, "x")) == b"abc"
    assert key != new_key()
