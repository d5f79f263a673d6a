"""The disk cache: damage is noticed and mended, races end well, a folder that cannot be used breaks nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from dlinfer.graph.cache import disk, fingerprint
from dlinfer.graph.cache.disk import ArtifactCache


def write(value: bytes, path: str) -> None:
    Path(path).write_bytes(value)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(disk, "_counts", type(disk._counts)())
    return disk.counts


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
    monkeypatch.setattr(disk, "environment", lambda: "another torch")
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
from pathlib import Path

from dlinfer.graph.cache import disk

folder, number = Path(sys.argv[1]), int(sys.argv[2])
one = disk.ArtifactCache(folder, "kind")
print("ready", flush=True)
sys.stdin.readline()
for _ in range(50):
    stored = one.store("key", bytes([number]) * 100_000, lambda value, path: Path(path).write_bytes(value))
    value = one.load("key", lambda path: Path(path).read_bytes())
    assert stored and value is not None
    assert len(value) == 100_000 and len(set(value)) == 1, "halves of two writers"
assert disk.counts() == {"stored": 50, "hit": 50}
"""


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
        "from dlinfer.graph.cache.fingerprint import environment\nprint(environment())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=500
    ).stdout
    assert told.strip() == fingerprint.environment().strip()
