"""The disk cache: damage is noticed and mended, races end well, a folder that cannot be used breaks nothing."""

import errno
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from dlinfer import settings
from dlinfer.graph.cache import disk
from dlinfer.graph.cache.disk import ArtifactCache, CacheWarning, MissingEntryError
from dlinfer.graph.cache.fingerprint import environment
from dlinfer.graph.cache.key import Key

ENVIRONMENT = environment()


def key(subject: str = "subject", environment=ENVIRONMENT, **fields) -> Key:
    return Key("test", subject, environment, **fields)


KEY, OTHER = key(), key("other")


def write(value: bytes = b""):
    return lambda: value


read = bytes


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(disk, "_warned", set())
    monkeypatch.setattr(disk, "_counts", type(disk._counts)())
    return disk.counts


@pytest.fixture
def entry(tmp_path, counted):
    """A cache with one entry, and the entry's file."""
    one = ArtifactCache(tmp_path, "kind")
    assert one.store(KEY, write(b"payload" * 100))
    (path,) = one.folder.iterdir()
    return one, path


def test_what_is_stored_is_found_again(entry, counted):
    one, path = entry
    assert one.load(KEY, read) == b"payload" * 100
    assert ArtifactCache(one.folder.parent, "kind").load(KEY, read) == b"payload" * 100
    assert counted() == {"stored": 1, "hit": 2}
    assert path.name == KEY.name


def test_other_keys_and_kinds_are_other_entries(entry, counted):
    one, _ = entry
    assert one.load(OTHER, read) is None
    assert ArtifactCache(one.folder.parent, "other").load(KEY, read) is None
    assert counted() == {"stored": 1, "missed": 2}


def test_other_surroundings_are_other_entries(entry):
    one, _ = entry
    assert one.load(key(environment=replace(ENVIRONMENT, torch="another torch")), read) is None


DAMAGE = {
    "a changed header": lambda data: b"x" + data[1:],
    "a changed payload": lambda data: data[:-1] + b"x",
    "a byte too many": lambda data: data + b"x",
    "truncated in the payload": lambda data: data[:-10],
    "truncated in the header": lambda data: data[:20],
    "empty": lambda data: b"",
    "no header": lambda data: data.partition(b"\n")[2],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_counted_and_mended(damage, entry, counted):
    one, path = entry
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert one.load(KEY, read) is None
    assert not path.exists()
    assert counted() == {"stored": 1, "corrupt": 1}
    assert one.store(KEY, write(b"new"))
    assert one.load(KEY, read) == b"new"


def test_an_entry_under_a_foreign_name_is_noticed(entry, counted):
    one, path = entry
    path.rename(one.folder / OTHER.name)
    assert one.load(OTHER, read) is None
    assert counted()["corrupt"] == 1


def failing(error: BaseException):
    def read(_):
        raise error

    return read


def test_what_the_reader_refuses_is_left_and_replaced(entry, counted, capfd):
    one, _ = entry
    with settings.override(debug="cache"):
        assert one.load(KEY, failing(RuntimeError("not for me"))) is None
    assert "RuntimeError: not for me" in capfd.readouterr().err
    assert one.load(KEY, read) == b"payload" * 100, "its bytes are what was stored"
    assert one.store(KEY, write(b"new"))
    assert one.load(KEY, read) == b"new"
    assert counted() == {"stored": 2, "refused": 1, "hit": 2}


def test_a_reader_that_lacks_another_entry_leaves_it(entry, counted):
    one, path = entry
    assert one.load(KEY, failing(MissingEntryError("cluster"))) is None
    assert path.exists()
    assert counted()["missed"] == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_temporary_folder_that_fails_costs_no_entry(number, entry, counted, monkeypatch):
    one, path = entry
    before = path.read_bytes()

    def fails(*args, **kwargs):
        raise OSError(number, os.strerror(number), "/tmp")

    def read_through_a_file(contents):  # as torch loads compiled loops
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            copy.write_bytes(contents)
            return copy.read_bytes()

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(tempfile, "TemporaryDirectory", fails)
        with pytest.warns(CacheWarning, match=os.strerror(number)):
            assert one.load(KEY, read_through_a_file) is None
    assert counted() == {"stored": 1, "not read": 1}
    assert path.read_bytes() == before
    assert one.load(KEY, read) == b"payload" * 100


def test_an_entry_that_may_not_be_read_is_left(entry, counted, monkeypatch):
    one, path = entry

    def refused(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "open", refused)
        with pytest.warns(CacheWarning, match="Permission denied"):
            assert one.load(KEY, read) is None
    assert counted()["not read"] == 1
    assert one.load(KEY, read) is not None


def test_a_damaged_entry_that_another_process_replaced_is_left(entry, counted, monkeypatch):
    one, path = entry
    path.write_bytes(b"damaged")
    check = disk._payload

    def replaces(data, name):
        assert ArtifactCache(one.folder.parent, "kind").store(KEY, write(b"made anew"))
        return check(data, name)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(disk, "_payload", replaces)
        assert one.load(KEY, read) is None
    assert one.load(KEY, read) == b"made anew"


def test_a_reason_is_warned_of_once(entry, counted, recwarn):
    one, _ = entry
    for _ in range(3):
        assert one.load(KEY, failing(OSError(errno.ENOSPC, "No space left on device"))) is None
    assert [str(one.category.__name__) for one in recwarn] == ["CacheWarning"]
    assert counted()["not read"] == 3


def test_a_writer_that_fails_leaves_nothing(tmp_path, counted):
    one = ArtifactCache(tmp_path, "kind")

    def fails():
        raise RuntimeError("cannot save")

    assert not one.store(KEY, fails)
    assert not one.folder.exists()
    assert counted() == {"not stored": 1}


@pytest.mark.parametrize("place", ["Path.write_bytes", "os.replace"])
def test_a_disk_that_fails_while_it_is_written_keeps_the_old_entry(place, entry, counted, monkeypatch):
    one, path = entry

    def fails(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "entry")

    with monkeypatch.context() as meanwhile, pytest.warns(CacheWarning, match="No space left"):
        meanwhile.setattr(f"dlinfer.graph.cache.disk.{place}", fails)
        assert not one.store(KEY, write(b"new"))
    assert list(one.folder.iterdir()) == [path]
    assert one.load(KEY, read) == b"payload" * 100
    assert counted() == {"stored": 1, "not stored": 1, "hit": 1}


def test_a_folder_that_cannot_be_made_breaks_nothing(tmp_path, counted):
    (tmp_path / "file").write_text("in the way")
    one = ArtifactCache(tmp_path / "file", "kind")
    assert one.load(KEY, read) is None
    with pytest.warns(CacheWarning, match="Not a directory"):
        assert not one.store(KEY, write())
    assert counted() == {"missed": 1, "not stored": 1}


def test_damage_in_a_folder_that_cannot_be_written(entry, counted, monkeypatch):
    one, path = entry
    path.write_bytes(b"damaged")

    def refused(*args, **kwargs):
        raise PermissionError(13, "read-only file system")

    monkeypatch.setattr(Path, "unlink", refused)
    assert one.load(KEY, read) is None
    assert counted()["corrupt"] == 1


def test_compiling_works_without_a_usable_folder(graph_mode, tmp_path, monkeypatch):
    import torch

    from dlinfer.vendor.cpu import native
    from tests.graph.compiling import compiled

    monkeypatch.setattr(native, "_outcome", None)  # what a process finds out first holds for all its life
    (tmp_path / "file").write_text("in the way")
    x = torch.ones(3)
    with torch.no_grad():
        torch.testing.assert_close(compiled(lambda x: x * 2, cache_dir=tmp_path / "file")(x), x * 2)


RACER = """
import sys
import tempfile
from pathlib import Path

from dlinfer.graph.cache import disk
from dlinfer.graph.cache.fingerprint import environment
from dlinfer.graph.cache.key import Key

KEY = Key("test", "raced for", environment())
folder, number = Path(sys.argv[1]), int(sys.argv[2])
one = disk.ArtifactCache(folder, "kind")
print("ready", flush=True)
sys.stdin.readline()
for _ in range(50):
    stored = one.store(KEY, lambda: bytes([number]) * 100_000)
    value = one.load(KEY, bytes)
    assert stored and value is not None
    assert len(value) == 100_000 and len(set(value)) == 1, "halves of two writers"
assert disk.counts() == {"stored": 50, "hit": 50}
"""


@pytest.mark.full
def test_processes_that_race_find_whole_entries_only(tmp_path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    try:
        for racer in racers:  # both have done their imports before either begins
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        said = [racer.communicate(timeout=500)[1] for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert [racer.returncode for racer in racers] == [0, 0], said
    assert len(list((tmp_path / "kind").iterdir())) == 1


def test_what_differs_from_the_nearest_entry_is_said(tmp_path, counted, capfd):
    one = ArtifactCache(tmp_path, "kind")
    far = key(engine="x", steady=("a",), environment=replace(ENVIRONMENT, threads=99))
    near = key(environment=replace(ENVIRONMENT, threads=98))
    for stored in (near, far):
        assert one.store(stored, write())
    (one.folder / f"{KEY.prefix}strange").write_bytes(b"no entry")
    said = f"environment.threads: 98 is stored, {ENVIRONMENT.threads} is wanted"
    assert one.why_missed(KEY) == said
    assert one.why_missed(OTHER) == ""
    capfd.readouterr()
    with settings.override(debug="cache"):
        assert one.load(KEY, read) is None
    assert said in capfd.readouterr().err
    assert one.load(KEY, read) is None
    assert capfd.readouterr().err == "", "nothing is compared for nobody"


def test_a_process_whose_code_is_unknown_takes_and_stores_nothing(entry, counted):
    one, _ = entry
    unsure = key(environment=replace(ENVIRONMENT, changed="rope.py changed since it was loaded"))
    with pytest.warns(CacheWarning, match=r"rope\.py changed"):
        assert not one.store(unsure, write())
    assert one.load(unsure, read) is None
    assert counted() == {"stored": 1, "not used": 2}
