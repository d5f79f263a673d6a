"""Making environments from recipes, without a network.

One test makes a real venv with a package of its own; the others, whose subject is what is around that, have an
interpreter that makes an empty one.
"""

import json
import os
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dlinfer import settings
from dlinfer.errors import ToolchainDiskError, ToolchainInstallError, ToolchainMissingError
from dlinfer.toolchain import Toolchain, find, folder, process, state
from dlinfer.toolchain import install as install_module
from dlinfer.toolchain.folder import STAMP
from dlinfer.toolchain.install import install, remove
from dlinfer.toolchain.interpreter import Interpreter

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def wheel(place: Path, name: str, content: str) -> Path:
    """A package of one module as a wheel."""
    path = place / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path):
    with settings.override(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path) -> Toolchain:
    """A toolchain for the Python that runs the tests."""
    return Toolchain(
        name="tiny",
        summary="a test's own",
        python=HERE,
        packages=(str(wheel(tmp_path, "tinytool", "ANSWER = 42\n")),),
        installed_bytes=10_000_000,
        download_bytes=0,
        files={"standin/__init__.py": "NAME = 'stand-in'\n"},
        remove=("pip/py.typed",),
        check="import tinytool, standin; assert tinytool.ANSWER == 42",
    )


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """An interpreter whose environments have one program, which runs code with the tests' own Python."""
    script = tmp_path / "quick-python"
    script.write_text(
        f"""#!/bin/sh
if [ "$3" = venv ]; then
    mkdir -p "$4/bin" "$4/lib/python{HERE}/site-packages" && cp "$0" "$4/bin/python"
else
    exec "{sys.executable}" "$@"
fi
"""
    )
    script.chmod(0o755)
    monkeypatch.setattr(install_module, "find_interpreter", lambda *_: Interpreter(str(script), f"{HERE}.0"))


@pytest.mark.usefixtures("cache")
@pytest.mark.full
def test_an_environment_is_made_once_and_shared(recipe):
    assert state(recipe) == state(recipe)
    assert not state(recipe).installed
    with pytest.raises(ToolchainMissingError, match="not installed") as raised:
        find(recipe)
    assert "dlinfer toolchain install tiny" in str(raised.value)

    lines: list[str] = []
    made = install(recipe, lines.append)
    assert state(recipe).installed
    assert find(recipe) == made
    assert any("tinytool" in line for line in lines)
    said = subprocess.run(
        [made.python, "-I", "-c", "import tinytool, standin; print(tinytool.ANSWER, standin.NAME)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["42", "stand-in"]
    assert not (made.site_packages / "pip/py.typed").exists()
    assert not (made.folder / "downloads").exists()
    assert made.scripts == made.python.parent

    again: list[str] = []
    stamp = (made.folder / STAMP).stat().st_mtime_ns
    assert install(recipe, again.append) == made
    assert again == []
    assert (made.folder / STAMP).stat().st_mtime_ns == stamp

    changed = replace(recipe, files={})
    assert "another recipe" in state(changed).reason
    assert state(replace(recipe, summary="said otherwise")).installed

    assert remove(recipe)
    assert not made.folder.exists()
    assert not remove(recipe)


@pytest.mark.usefixtures("cache", "quick")
def test_two_at_once_make_it_once(recipe):
    bare = replace(recipe, packages=(), check="")
    begun, waits = threading.Event(), threading.Event()
    said: dict[str, list[str]] = {"first": [], "second": []}

    def first(line):  # is at it until the second has found that
        said["first"].append(line)
        begun.set()
        assert waits.wait(300)

    def second(line):
        said["second"].append(line)
        waits.set()

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(install, bare, first)
        assert begun.wait(300)
        other = pool.submit(install, bare, second)
        assert one.result() == other.result() == find(bare)
    assert "an environment of CPython" in said["first"][0]
    assert said["second"] == ["waiting for another process that installs or removes it"]


@pytest.mark.usefixtures("cache", "quick")
def test_a_step_is_told_of_however_short_it_is(recipe, monkeypatch):
    class Over(subprocess.Popen):
        """A command that is over before anybody looks."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(process.subprocess, "Popen", Over)
    lines: list[str] = []
    install(replace(recipe, packages=(), check="import json"), lines.append)
    assert [line.split(" (")[0] for line in lines] == [
        f"creating an environment of CPython {HERE}.0",
        "checking the installation",
    ]


@pytest.mark.usefixtures("cache", "quick")
def test_what_an_interruption_left_is_made_anew(recipe):
    bare = replace(recipe, packages=(), check="", remove=())
    place = folder(bare)
    place.mkdir(parents=True)
    (place / "rubbish").touch()
    assert "not finished" in state(bare).reason
    (place / STAMP).write_text("{ half")
    assert "not finished" in state(bare).reason
    made = install(bare)
    assert state(bare).installed
    assert not (place / "rubbish").exists()
    made.python.unlink()
    assert "CPython no longer exists" in state(bare).reason


@pytest.mark.parametrize("fault", ["package", "check"])
@pytest.mark.usefixtures("cache", "quick")
def test_a_step_that_fails_leaves_nothing_and_says_why(recipe, tmp_path, fault):
    if fault == "package":
        (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no archive")
        bad = replace(recipe, packages=(str(tmp_path / "broken-1.0-py3-none-any.whl"),))
    else:
        bad = replace(recipe, packages=(), check="raise SystemExit('it does not work')")
    with pytest.raises(ToolchainInstallError) as raised:
        install(bad)
    assert ("broken" if fault == "package" else "it does not work") in str(raised.value)
    assert not folder(bad).exists()


def test_the_disk_is_looked_at_first(recipe, cache):
    greedy = replace(recipe, installed_bytes=10**18)
    with pytest.raises(ToolchainDiskError, match=r"needs 1000000000\.0 GB") as raised:
        install(greedy)
    assert "DLINFER_CACHE_DIR" in str(raised.value)
    assert sorted(path.name for path in (cache / "toolchains").iterdir()) == ["tiny.lock"]


def test_a_recipe_is_known_by_what_it_makes(recipe):
    for change in ({"python": "3.9"}, {"packages": ()}, {"files": {}}, {"remove": ()}, {"check": "1"}):
        assert replace(recipe, **change).digest != recipe.digest
    assert json.dumps(recipe.digest)
