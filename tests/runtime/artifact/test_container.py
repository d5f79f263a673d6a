"""The container of artifacts: what was written comes back, and nothing else is ever taken."""

import os
import re
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlinfer.errors import ArtifactCorruptError, ArtifactKeyError, ArtifactNotFoundError, ArtifactVersionError
from dlinfer.runtime.artifact.container import (
    ALIGNMENT,
    MANIFEST,
    Member,
    open_container,
    write_container,
    written_whole,
)
from tests.runtime.artifact.artifact_files import archive, forged, old_archive

MEMBERS = {"weights.bin": bytes(range(256)) * 20, "graphs/forward.json": b'{"nodes":[]}', "empty.bin": b""}
GOOD = archive(MEMBERS, {"format": 3})


def refused(data: bytes, why: str = "x") -> None:
    with pytest.raises(ArtifactCorruptError, match=why):
        open_container(data, "x")


def test_what_is_written_comes_back_from_bytes_and_from_a_file(tmp_path):
    path = tmp_path / "a.dlinfer"
    path.write_bytes(GOOD)
    for origin in (GOOD, bytearray(GOOD), memoryview(GOOD), path):
        container = open_container(origin, "x")
        assert {name: bytes(container.member(name)) for name in MEMBERS} == MEMBERS
        assert container.members.keys() == {*MEMBERS, MANIFEST}
        assert container.manifest == {"format": 3}
        assert container.json("graphs/forward.json") == {"nodes": []}


def test_any_reader_of_safetensors_opens_it(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "a.safetensors"
    path.write_bytes(GOOD)
    with safetensors.safe_open(path, "numpy") as other:
        assert set(other.keys()) == {*MEMBERS, MANIFEST, "digests.bin"}
        for name, contents in MEMBERS.items():
            assert other.get_tensor(name).tobytes() == contents


def test_the_first_member_is_aligned():
    assert GOOD.index(MEMBERS["weights.bin"]) % ALIGNMENT == 0


def test_equal_contents_give_equal_files():
    assert archive(MEMBERS, {"format": 3}) == GOOD


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
@given(
    st.dictionaries(
        st.integers(0, len(GOOD) - 1) | st.integers(0, 400), st.integers(1, 255), min_size=1, max_size=4
    )
)
def test_any_flipped_byte_is_found(flips):
    data = bytearray(GOOD)
    for place, mask in flips.items():
        data[place] ^= mask
    refused(bytes(data))


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.binary(max_size=100).map(lambda tail: len(tail).to_bytes(8, "little") + tail)
    | st.text(max_size=100).map(lambda text: len(text.encode()).to_bytes(8, "little") + text.encode())
)
def test_other_bytes_are_refused(data):
    """Hypothesis also tries the words of our code, and a sealed file's first one makes the data an encrypted file."""
    with pytest.raises((ArtifactCorruptError, ArtifactKeyError)):
        open_container(data, "x")


@settings(deadline=None)
@given(st.integers(0, len(GOOD)), st.binary(min_size=1, max_size=60))
def test_bytes_put_in_between_are_refused(place, more):
    refused(GOOD[:place] + more + GOOD[place:])


MANIFEST_MEMBER = (MANIFEST, b"{}")


def test_the_forger_of_these_tests_can_make_a_sound_container():
    data = forged([("weights.bin", b"abc"), MANIFEST_MEMBER])
    assert bytes(open_container(data, "x").members["weights.bin"]) == b"abc"


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
    refused(forged([(name, b"abc"), MANIFEST_MEMBER]), "a member has the name")


@pytest.mark.parametrize("contents", [b"abc", b""])
def test_two_members_of_one_name_are_refused(contents):
    data = forged([("a.bin", contents), ("b.bin", b"x"), MANIFEST_MEMBER])
    refused(data.replace(b'"b.bin"', b'"a.bin"'))


def changed(change) -> bytes:
    """Two members of 100 bytes, and a header after ``change``."""

    def header(entries):
        change(entries)
        return entries

    return forged([("a.bin", b"x" * 100), ("b.bin", b"x" * 100), MANIFEST_MEMBER], header)


def test_a_member_that_is_not_in_the_header_is_refused():
    refused(changed(lambda entries: entries.pop("b.bin")), "behind a gap")
    refused(changed(lambda entries: entries.pop("digests.bin")), "header says|digests")
    refused(changed(lambda entries: entries.pop(MANIFEST)), "behind a gap")
    refused(forged([("a.bin", b"x")]), "no member 'manifest.json'")


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0, 100]},  # over another one, as the members of a zip bomb may be
        {"data_offsets": [110, 210]},
        {"data_offsets": [100, 90]},
        {"data_offsets": [100]},
        {"data_offsets": "100"},
        {"data_offsets": None},
        {"shape": [99]},
        {"shape": [-100]},
        {"shape": [10, 10]},
        {"shape": [100.0]},
        {"shape": [1 << 70], "data_offsets": [100, 100 + (1 << 70)]},
        {"shape": []},
        {"shape": None},
        {"dtype": "F32"},
        {"dtype": "F32", "shape": [25]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_member_that_lies_elsewhere_is_refused(entry):
    refused(changed(lambda entries: entries["b.bin"].update(entry)))


@pytest.mark.parametrize("header", [[], 1, None, {}, {"a.bin": None}, {"a.bin": []}, "text"], ids=str)
def test_a_header_of_another_form_is_refused(header):
    refused(forged([MANIFEST_MEMBER], lambda _: header))


def test_a_header_longer_than_the_file_is_refused():
    for length in (len(GOOD), 1 << 40, (1 << 64) - 1):
        refused(length.to_bytes(8, "little") + GOOD[8:], "within its header")


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a": NaN}', b"{", b"\xff", b"9" * 5000])
def test_an_invalid_manifest_is_refused(text):
    refused(forged([(MANIFEST, text)]), "manifest.json is not JSON")


def test_a_manifest_of_another_file_is_refused():
    """Members are right each, but the digests are those of other ones."""
    ours, theirs = (
        forged([("a.bin", b"abc"), MANIFEST_MEMBER]),
        forged([("a.bin", b"abc"), (MANIFEST, b"[]")]),
    )
    refused(ours.replace(b"{}", b"[]"), "was altered")
    refused(ours[:-96] + theirs[-96:], "was altered")


def test_a_file_of_an_earlier_release_is_refused_by_its_version():
    with pytest.raises(
        ArtifactVersionError, match=r"format of dlinfer 0\.4, but this installation has 3"
    ) as raised:
        open_container(old_archive(), "x")
    assert "compile and save the artifact again" in str(raised.value)


def test_files_that_cannot_be_opened(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ArtifactNotFoundError, match=re.escape(str(path))):
            open_container(path, str(path))
    (tmp_path / "empty").touch()
    with pytest.raises(ArtifactCorruptError, match="empty"):
        open_container(tmp_path / "empty", "x")


def test_a_writer_refuses_names_that_a_reader_would():
    for name in ("../a.bin", "a"):
        with pytest.raises(ValueError, match="not a valid name of a member"):
            write_container(BytesIO(), {}, {name: b"x"})


def test_a_member_is_written_in_parts():
    stream = BytesIO()
    write_container(stream, {}, {"a.bin": Member(3, iter([b"a", bytearray(b"b"), memoryview(b"c")]))})
    assert bytes(open_container(stream.getvalue(), "x").member("a.bin")) == b"abc"


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
