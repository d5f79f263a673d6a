"""Read the tables of a flatbuffer, in the public format of FlatBuffers (flatbuffers.dev, "FlatBuffer Internals")."""

import struct

_MOST_ENTRIES = 1024  # of a vector; a damaged count must not cost time


class Table:
    """A table of a flatbuffer. A field is named by its number.

    Methods raise struct.error or IndexError if a damaged buffer points beyond its end."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self._place = place
        self._fields = place - self._unpacked("<i", place)
        self._length = self._unpacked("<H", self._fields)

    @classmethod
    def root(cls, data: bytes) -> "Table":
        (place,) = struct.unpack_from("<I", data)
        return cls(data, place)

    def number(self, field: int, form: str = "<I") -> int:
        """Return a field that is a number; 0 if the field is absent. form: the number's format for ``struct``."""
        place = self._where(field)
        return self._unpacked(form, place) if place else 0

    def text(self, field: int) -> str | None:
        """Return a field that is an ASCII string; None if the field is absent."""
        place, count = self._vector(field)
        return self._data[place : place + count].decode("ascii") if place else None

    def numbers(self, field: int, form: str) -> tuple[int, ...] | None:
        """Return a field that is a vector of numbers; None if the field is absent.

        form: a number's format for ``struct``."""
        place, count = self._vector(field)
        if not place:
            return None
        size = struct.calcsize(form)
        return tuple(self._unpacked(form, place + size * index) for index in range(self._few(count)))

    def tables(self, field: int) -> list["Table"]:
        """Return a field that is a vector of tables; an empty list if the field is absent."""
        place, count = self._vector(field)
        return [self._behind(place + 4 * index) for index in range(self._few(count))]

    def table(self, field: int) -> list["Table"]:
        """Return a list with the table that a field refers to; an empty list if the field is absent."""
        place = self._where(field)
        return [self._behind(place)] if place else []

    def _behind(self, place: int) -> "Table":
        """Return the table that the 32-bit offset at ``place`` points to."""
        return Table(self._data, place + self._unpacked("<I", place))

    def _where(self, field: int) -> int:
        """Return the position of a field's content in the buffer; 0 if the field is absent."""
        at = 4 + 2 * field
        offset = self._unpacked("<H", self._fields + at) if at < self._length else 0
        return self._place + offset if offset else 0

    def _vector(self, field: int) -> tuple[int, int]:
        """Return the position of a vector's first entry and the number of entries; (0, 0) if the field is absent."""
        place = self._where(field)
        if not place:
            return 0, 0
        start = place + self._unpacked("<I", place)
        return start + 4, self._unpacked("<I", start)

    @staticmethod
    def _few(count: int) -> int:
        if count > _MOST_ENTRIES:
            raise IndexError(f"a vector of {count} entries")
        return count

    def _unpacked(self, form: str, place: int) -> int:
        if place < 0:
            raise IndexError(place)
        return struct.unpack_from(form, self._data, place)[0]
