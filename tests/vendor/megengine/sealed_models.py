"""Models encrypted for the library's built-in methods, as lite/src/decryption of MegEngine's source describes them.

AES_default: an initialisation vector of 16 bytes, AES-256-CBC blocks, and the model's size as 8 bytes, highest first.
RC4_default and SIMPLE_FAST_RC4_default: words of 8 bytes under a stream made of the key's second half, and a hash of
them that begins with its first half; RC4_default scrambles the words by their own hash before.
"""

from collections.abc import Callable

_WORD = 2**64 - 1
_FIRST = int.from_bytes(bytes([55, 92, 50, 244, 155, 89, 39, 33]), "little")
_SECOND = int.from_bytes(bytes([101, 25, 109, 30, 242, 85, 3, 136]), "little")


def aes(model: bytes, key: bytes) -> bytes:
    """For ``AES_default``: a key of 32 bytes. Needs the package cryptography."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    vector = bytes(range(200, 216))  # the same in every run, as what a damaged one decrypts to is then
    encryptor = Cipher(algorithms.AES(key), modes.CBC(vector)).encryptor()
    padded = model + bytes(-len(model) % 16)
    return vector + encryptor.update(padded) + encryptor.finalize() + len(model).to_bytes(8, "big")


def rc4(model: bytes, key: bytes) -> bytes:
    """For ``RC4_default``: a key of 16 bytes."""
    words, seed, outer = _prepared(model, key)
    plain = _hash(words, seed)
    inner = _stream(plain)
    scrambled = [word ^ inner() for word in words]
    sealed = [word ^ outer() for word in scrambled]
    return _joined([*sealed, plain ^ _hash(scrambled, seed) ^ outer()])


def simple_fast_rc4(model: bytes, key: bytes) -> bytes:
    """For ``SIMPLE_FAST_RC4_default``: a key of 16 bytes."""
    words, seed, outer = _prepared(model, key)
    sealed = [word ^ outer() for word in words]
    return _joined([*sealed, _hash(sealed, seed)])


def _prepared(model: bytes, key: bytes) -> tuple[list[int], int, Callable[[], int]]:
    padded = model + bytes(-len(model) % 8)
    words = [int.from_bytes(padded[place : place + 8], "little") for place in range(0, len(padded), 8)]
    return words, int.from_bytes(key[:8], "little"), _stream(int.from_bytes(key[8:], "little"))


def _joined(words: list[int]) -> bytes:
    return b"".join(word.to_bytes(8, "little") for word in words)


def _hash(words: list[int], seed: int) -> int:
    value = seed
    for word in words:
        mixed = (word ^ word >> 23) * _FIRST & _WORD
        value = (value ^ mixed ^ mixed >> 47) * _SECOND & _WORD
    return value


def _stream(key: int) -> Callable[[], int]:
    """The library's variant of RC4, 8 bytes at a call."""
    state, i, j = list(range(256)), 0, 0
    for index in range(256):
        j = (j + state[index] + (key >> index % 8 * 8)) & 255
        state[index], state[j] = state[j], state[index]
    i = j = 0

    def byte() -> int:
        nonlocal i, j
        i = (i + 1) & 255
        a = state[i]
        j = (j + a) & 255
        b = state[j]
        state[i], state[j] = b, a
        c = (state[(i << 5 ^ j >> 3) & 255] + state[(j << 5 ^ i >> 3) & 255]) & 255
        return ((state[(a + b) & 255] + state[c ^ 0xAA]) ^ state[(j + b) & 255]) & 255

    for _ in range(768):
        byte()
    for _ in range(byte()):
        byte()
    return lambda: int.from_bytes(bytes(byte() for _ in range(8)), "little")
