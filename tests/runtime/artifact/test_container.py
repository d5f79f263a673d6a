"""The container of artifacts: what was written comes back, and nothing else is ever taken."""

import hashlib
import json
import os
import re
import struct
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlinfer.errors import ArtifactCorruptError, ArtifactNotFoundError
from dlinfer.runtime.artifact.container import (
    ALIGNMENT,
    MANIFEST,
    Writer,
    open_container,
    written_whole,
)
from tests.runtime.artifact.artifact_files import archive, raw_zip, unpacked

MEMBERS = {"graphs/forward.json": b'{"nodes":[]}', "weights.bin": bytes(range(256)) * 20, "empty.bin": b""}
GOOD = archive(MEMBERS, {"format": 1})


def refused(data: bytes, why: str = "x") -> None:
    with pytest.raises(ArtifactCorruptError, match=why):
        open_container(data, "x")


def test_what_is_written_comes_back_from_bytes_and_from_a_file(tmp_path):
    path = tmp_path / "a.dlinfer"
    path.write_bytes(GOOD)
    for origin in (GOOD, bytearray(GOOD), memoryview(GOOD), path):
        container = open_container(origin, "x")
        assert {name: bytes(contents) for name, contents in container.members.items()} == MEMBERS
        assert container.manifest == {"format": 1}
        assert container.json("graphs/forward.json") == {"nodes": []}


def test_members_are_aligned_and_any_zip_program_reads_them():
    with zipfile.ZipFile(BytesIO(GOOD)) as other:
        assert other.testzip() is None
        assert set(other.namelist()) == {*MEMBERS, MANIFEST}
    assert GOOD.index(MEMBERS["weights.bin"]) % ALIGNMENT == 0
    assert GOOD.index(MEMBERS["graphs/forward.json"]) % ALIGNMENT == 0


def test_equal_contents_give_equal_files():
    assert archive(MEMBERS, {"format": 1}) == GOOD


def test_a_mapped_file_is_not_changed_by_writing_into_its_members(tmp_path):
    path = tmp_path / "a.dlinfer"
    path.write_bytes(GOOD)
    container = open_container(path, "x")
    container.members["weights.bin"][0:4] = b"aaaa"
    assert path.read_bytes() == GOOD


@settings(deadline=None)
@given(st.integers(0, len(GOOD) - 1))
def test_a_file_that_ends_early_is_refused(length):
    refused(GOOD[:length])


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_found_or_change_nothing(flips):
    data = bytearray(GOOD)
    for place, mask in flips:
        data[place] ^= mask
    try:
        members, manifest = unpacked(bytes(data))
    except ArtifactCorruptError:
        return
    assert (members, manifest) == (MEMBERS, {"format": 1})  # dates and fill bytes, which nothing reads


@settings(deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda tail: b"PK\x03\x04" + tail))
def test_other_bytes_are_refused(data):
    refused(data)


@settings(deadline=None)
@given(st.integers(0, len(GOOD)), st.binary(min_size=1, max_size=60))
def test_bytes_put_in_between_are_refused_or_change_nothing(place, more):
    try:
        members, _ = unpacked(GOOD[:place] + more + GOOD[place:])
    except ArtifactCorruptError:
        return
    assert members == MEMBERS


def listed(members: list[tuple[str, bytes]], **options) -> bytes:
    """A zip with these members and a manifest that lists them rightly."""
    said = {name: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in members}
    manifest = json.dumps({"format": 1, "members": said}).encode()
    comment = f"dlinfer-artifact {hashlib.sha256(manifest).hexdigest()}".encode()
    return raw_zip([*members, (MANIFEST, manifest)], comment, **options)


def test_the_forger_of_these_tests_can_make_a_sound_archive():
    assert bytes(open_container(listed([("weights.bin", b"abc")]), "x").members["weights.bin"]) == b"abc"


@pytest.mark.parametrize(
    "name",
    [
        "../weights.bin",
        "/etc/passwd.bin",
        "a/../../b.bin",
        "a\\b.bin",
        "C:/a.bin",
        "a//b.bin",
        ".hidden.bin",
        "a.bin/",
        "A.bin",
        "a.py",
        "a.pkl",
        "ä.bin",
        "a.bin\n",
        "./a.bin",
        "a/b/c/d/e/f.bin",
        "",
    ],
)
def test_names_that_lead_elsewhere_are_refused(name):
    refused(listed([(name, b"abc")]))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused():
    refused(listed([("weights.bin", b"abc"), ("weights.bin", b"abc")]), "two members of one name")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members_are_refused_before_they_are_read(method):
    bomb = listed([("weights.bin", bytes(50_000_000))], compression=method)
    assert len(bomb) < 1_000_000
    refused(bomb, "compressed")


def test_a_member_that_is_not_listed_or_not_there_is_refused():
    members, manifest = unpacked(GOOD)
    whole = {name: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in members.items()}

    def made(said: dict) -> bytes:
        text = json.dumps(manifest | {"members": said}).encode()
        comment = f"dlinfer-artifact {hashlib.sha256(text).hexdigest()}".encode()
        return raw_zip([*members.items(), (MANIFEST, text)], comment)

    assert open_container(made(whole), "x").members.keys() == members.keys()
    refused(made({name: one for name, one in whole.items() if name != "weights.bin"}), "lists")
    refused(made(whole | {"more.bin": {"size": 0, "sha256": ""}}), "lists")
    refused(made(whole | {"weights.bin": whole["weights.bin"] | {"size": 7}}), "bytes, not 7")
    refused(made(whole | {"weights.bin": whole["weights.bin"] | {"sha256": "0" * 64}}), "altered")
    refused(made(whole | {"weights.bin": None}), "bytes, not None")
    refused(made([]))  # pyright: ignore[reportArgumentType]


def test_members_that_lie_over_each_other_are_refused():
    """The trick of zip bombs without compression: many entries for the same bytes."""
    data = bytearray(listed([("a.bin", b"x" * 100), ("b.bin", b"x" * 100)]))
    with zipfile.ZipFile(BytesIO(data)) as opened:
        first = opened.getinfo("a.bin").header_offset
        second = opened.getinfo("b.bin").header_offset
    place = data.rindex(b"b.bin") - 4  # the offset in the central directory
    assert struct.unpack("<I", data[place : place + 4]) == (second,)
    data[place : place + 4] = struct.pack("<I", first)
    refused(bytes(data))


def test_sizes_beyond_the_file_are_refused():
    data = bytearray(listed([("a.bin", b"x" * 100)]))
    place = data.index(b"PK\x01\x02") + 20
    data[place : place + 8] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
    refused(bytes(data))


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a": NaN}', b"{", b"\xff", b"[]", b"1", b"9" * 5000])
def test_an_invalid_manifest_is_refused(text):
    comment = f"dlinfer-artifact {hashlib.sha256(text).hexdigest()}".encode()
    refused(raw_zip([(MANIFEST, text)], comment))


def test_a_manifest_whose_digest_is_not_the_comment_s_is_refused():
    """All else is right: the members are those that the manifest lists, with their digests."""
    with zipfile.ZipFile(BytesIO(listed([("a.bin", b"abc")]))) as opened:
        members, comment = {name: opened.read(name) for name in opened.namelist()}, opened.comment
    assert open_container(raw_zip(list(members.items()), comment), "x").members.keys() == {"a.bin"}
    members[MANIFEST] = members[MANIFEST].replace(b'"format": 1', b'"format": 2')
    refused(raw_zip(list(members.items()), comment), "manifest is missing or was altered")


def test_a_manifest_of_another_archive_is_refused():
    other = archive({"weights.bin": b"other"}, {"format": 1})
    members, _ = unpacked(GOOD)
    _, manifest = unpacked(other)
    with zipfile.ZipFile(BytesIO(other)) as opened:
        text, comment = opened.read(MANIFEST), opened.comment
    assert manifest == {"format": 1}
    refused(raw_zip([*members.items(), (MANIFEST, text)], comment), "lists|bytes, not")


def test_files_that_cannot_be_opened(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ArtifactNotFoundError, match=re.escape(str(path))):
            open_container(path, str(path))
    (tmp_path / "empty").touch()
    with pytest.raises(ArtifactCorruptError, match="empty"):
        open_container(tmp_path / "empty", "x")


def test_a_writer_refuses_names_of_its_own_kind_only():
    writer = Writer(BytesIO())
    writer.add("a.bin", [b"x"])
    for name in ("a.bin", "../a.bin", "a"):
        with pytest.raises(ValueError, match="no name for a member"):
            writer.add(name, [b"x"])


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path: Path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(RuntimeError), written_whole(path) as stream:
        stream.write(b"half")
        raise RuntimeError
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a"]
    with written_whole(path) as stream:
        stream.write(b"after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["a"]
