"""The digest of loaded code: of the text that runs, and none where nobody can tell it."""

import importlib
import os
import sys
import time

import pytest

from dlinfer.graph.cache.sources import CodeChangedError, LoadedCode


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with the modules ``one``, which is loaded, and ``two``, written a while before it was."""
    folder = tmp_path / "sources_under_test"
    folder.mkdir()
    for name in ("__init__", "one", "two"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
    (folder / "notes.txt").write_text("no code")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    time.sleep(0.1)  # a file's time may be behind the process's: what is younger than that counts as changed
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.startswith("sources_under_test")]:
        del sys.modules[name]


def load(name: str) -> None:
    importlib.import_module(f"sources_under_test.{name}")


def code(folder) -> LoadedCode:
    """Of the package, loaded now."""
    made = LoadedCode(folder, "sources_under_test", time.time_ns())
    load("one")
    return made


def test_equal_code_has_an_equal_digest(package):
    digest = code(package).digest()
    assert digest == code(package).digest()
    (package / "notes.txt").write_text("other words")
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "one.py").write_text("")
    assert code(package).digest() == digest


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "two.py").write_text("NAME = 'owt'\n"),
        lambda folder: (folder / "two.py").rename(folder / "three.py"),
        lambda folder: (folder / "two.py").unlink(),
        lambda folder: (folder / "three.py").write_text(""),
        lambda folder: (folder / "kernels.so").write_bytes(b"machine code"),
    ],
    ids=["text", "name", "removed", "added", "a library"],
)
def test_other_code_has_another(change, package):
    digest = code(package).digest()
    change(package)
    assert code(package).digest() != digest


def test_text_moved_from_one_file_to_the_next_is_other_code(package):
    (package / "one.py").write_text("A = 1\nB = 2\n")
    (package / "two.py").write_text("C = 3\n")
    time.sleep(0.1)
    digest = code(package).digest()
    (package / "one.py").write_text("A = 1\n")
    (package / "two.py").write_text("B = 2\nC = 3\n")
    time.sleep(0.1)
    assert LoadedCode(package, "sources_under_test", time.time_ns()).digest() != digest


def rewrite(path) -> None:
    path.write_text(path.read_text() + "# edited")


def replace_with_old_times(path) -> None:
    """As ``cp -p`` or rsync: other content, and the times of long ago."""
    new = path.with_suffix(".new")
    new.write_text("NAME = 'eno'\n")
    os.utime(new, (1, 1))
    os.replace(new, path)


@pytest.mark.parametrize("edit", [rewrite, replace_with_old_times, lambda path: path.unlink()])
def test_a_loaded_file_that_changed_has_none(edit, package):
    loaded = code(package)
    text = (package / "one.py").read_text()
    edit(package / "one.py")
    for _ in range(2):
        with pytest.raises(CodeChangedError, match=r"one\.py"):
            loaded.digest()
        (package / "one.py").write_text(text)  # putting it back does not tell what was loaded


def test_a_file_that_was_not_loaded_may_change_until_the_digest_is_made(package):
    loaded = code(package)
    rewrite(package / "two.py")
    digest = loaded.digest()
    time.sleep(0.1)
    load("two")
    assert code(package).digest() == digest


def test_a_file_that_changed_before_it_was_loaded_has_none(package):
    loaded = code(package)
    digest = loaded.digest()
    rewrite(package / "one.py")
    assert loaded.digest() == digest, "what was loaded before is still what it was"
    rewrite(package / "two.py")
    load("two")
    with pytest.raises(CodeChangedError, match=r"two\.py"):
        loaded.digest()


def test_a_module_of_its_own_is_code_too(tmp_path):
    path = tmp_path / "single.py"
    path.write_text("A = 1\n")
    digest = LoadedCode(path, "single", time.time_ns()).digest()
    path.write_text("A = 2\n")
    assert LoadedCode(path, "single", time.time_ns()).digest() != digest
