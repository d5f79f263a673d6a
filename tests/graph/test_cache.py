"""The disk cache: damage is noticed and mended, races end well, a folder that cannot be used breaks nothing."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from dlinfer.graph import cache, fingerprint
from dlinfer.graph.cache import ArtifactCache


def write(value: bytes, path: str) -> None:
    Path(path).write_bytes(value)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(cache, "_counts", type(cache._counts)())
    return cache.counts


@pytest.fixture
def entry(tmp_path, counted):
    """A cache with one entry, and the entry's file."""
    one = ArtifactCache(tmp_path, "kind")
    assert one.store("key", b"payload" * 100, write)
    (path,) = one.folder.iterdir()
    return one, path


def test_what_is_stored_is_found_again(entry, counted):
    one, path = entry
    assert one.load("key", read) == b"payload" * 100
    assert ArtifactCache(one.folder.parent, "kind").load("key", read) == b"payload" * 100
    assert counted() == {"stored": 1, "hit": 2}
    assert path.name == one.fingerprint("key")


def test_other_keys_and_kinds_are_other_entries(entry, counted):
    one, _ = entry
    assert one.load("other", read) is None
    assert ArtifactCache(one.folder.parent, "other").load("key", read) is None
    assert counted() == {"stored": 1, "missed": 2}


def test_other_surroundings_are_other_entries(entry, monkeypatch):
    one, _ = entry
    monkeypatch.setattr(cache, "environment", lambda: "another torch")
    assert one.load("key", read) is None


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
    assert one.load("key", read) is None
    assert not path.exists()
    assert counted() == {"stored": 1, "corrupt": 1}
    assert one.store("key", b"new", write)
    assert one.load("key", read) == b"new"


def test_an_entry_under_a_foreign_name_is_noticed(entry, counted):
    one, path = entry
    path.rename(one.folder / one.fingerprint("other"))
    assert one.load("other", read) is None
    assert counted()["corrupt"] == 1


def test_what_the_reader_refuses_is_removed(entry, counted):
    one, path = entry

    def refuses(_):
        raise RuntimeError("of another torch")

    assert one.load("key", refuses) is None
    assert not path.exists()
    assert counted()["corrupt"] == 1


def test_a_writer_that_fails_leaves_nothing(tmp_path, counted):
    one = ArtifactCache(tmp_path, "kind")

    def fails(value, path):
        Path(path).write_bytes(b"half")
        raise RuntimeError("cannot save")

    assert not one.store("key", b"", fails)
    assert list(one.folder.iterdir()) == []
    assert counted() == {"not stored": 1}


def test_a_folder_that_cannot_be_made_breaks_nothing(tmp_path, counted):
    (tmp_path / "file").write_text("in the way")
    one = ArtifactCache(tmp_path / "file", "kind")
    assert one.load("key", read) is None
    assert not one.store("key", b"", write)
    assert counted() == {"missed": 1, "not stored": 1}


def test_damage_in_a_folder_that_cannot_be_written(entry, counted, monkeypatch):
    one, path = entry
    path.write_bytes(b"damaged")

    def refused(*args, **kwargs):
        raise PermissionError(13, "read-only file system")

    monkeypatch.setattr(Path, "unlink", refused)
    assert one.load("key", read) is None
    assert counted()["corrupt"] == 1


def test_compiling_works_without_a_usable_folder(graph_mode, tmp_path):
    import torch

    from tests.graph.compiling import compiled

    (tmp_path / "file").write_text("in the way")
    x = torch.ones(3)
    with torch.no_grad():
        torch.testing.assert_close(compiled(lambda x: x * 2, cache_dir=tmp_path / "file")(x), x * 2)


def _race(folder: str, number: int, rounds: int) -> None:
    one, before = (
        ArtifactCache(Path(folder), "kind"),
        cache.counts().get("corrupt"),
    )  # of the parent's other tests
    for _ in range(rounds):
        one.store("key", bytes([number]) * 100_000, write)
        value = one.load("key", read)
        assert value is not None
        assert len(value) == 100_000 and len(set(value)) == 1, "halves of two writers"
    assert cache.counts().get("corrupt") == before


def test_processes_that_race_find_whole_entries_only(tmp_path):
    context = multiprocessing.get_context("fork")
    racers = [context.Process(target=_race, args=(str(tmp_path), number, 50)) for number in (1, 2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert len(list((tmp_path / "kind").iterdir())) == 1


def test_the_fingerprint_names_what_artifacts_depend_on():
    import torch

    text = fingerprint.environment()
    for part in (
        torch.__version__,
        f"threads {torch.get_num_threads()}",
        "dlinfer ",
        fingerprint.cpu_flags(),
    ):
        assert part in text


def test_the_fingerprint_of_another_process_is_the_same():
    import torch

    code = (
        f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
        "from dlinfer.graph.fingerprint import environment\nprint(environment())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert told.strip() == fingerprint.environment().strip()
