"""``dlinfer toolchain``: what it lists, installs and refuses."""

import io

import pytest
from rich.console import Console

from dlinfer import settings
from dlinfer.cli import main, toolchain
from dlinfer.errors import ToolchainInstallError, ToolchainInterpreterError
from dlinfer.toolchain import Toolchain

TINY = Toolchain(
    name="tiny",
    summary="a test's own",
    python="3.10",
    packages=(),
    installed_bytes=1_500_000_000,
    download_bytes=500_000_000,
)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "known", lambda: {"tiny": TINY})
    with settings.override(cache_dir=str(tmp_path)):
        yield tmp_path / "toolchains/tiny"


def test_the_vendors_recipes_are_known():
    recipes = toolchain.known()
    assert {"megengine", "sophgo"} <= set(recipes)
    for name, recipe in recipes.items():
        assert recipe.name == name
        assert all("==" in package for package in recipe.packages)
        assert len({package.partition("==")[0].lower() for package in recipe.packages}) == len(
            recipe.packages
        )


def test_list_says_what_is_missing_and_what_it_takes(capsys, tiny):
    assert main(["toolchain", "list"]) == 0
    said = capsys.readouterr().out
    assert "tiny         missing" in said
    assert str(tiny) in said
    assert (
        "`dlinfer toolchain install tiny` needs 1.5 GB of disk space, and 0.5 GB more during the installation"
        in said
    )


@pytest.mark.usefixtures("tiny")
def test_path_of_what_is_not_there(capsys):
    assert main(["toolchain", "path", "tiny"]) == 1
    assert "dlinfer toolchain install tiny" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["install", "path", "remove"])
@pytest.mark.usefixtures("tiny")
def test_an_unknown_name(capsys, action):
    assert main(["toolchain", action, "tinny"]) == 1
    assert "there is no toolchain 'tinny'. Known toolchains: tiny." in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_install_path_remove(capsys, monkeypatch):
    def made(recipe, report):
        report("one step")
        report("one step")
        report("another")

    monkeypatch.setattr(toolchain, "install", made)
    assert main(["toolchain", "install", "tiny"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[1:] == ["tiny: one step", "tiny: another"]
    assert "tiny: installed in" in captured.out
    assert main(["toolchain", "remove", "tiny"]) == 0
    assert "tiny: was not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ToolchainInterpreterError(toolchain="tiny", version="3.10", looked="none"), 3),
        (ToolchainInstallError(toolchain="tiny", command="pip", detail="no network"), 1),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_a_missing_interpreter_has_an_exit_status_of_its_own(capsys, monkeypatch, error, status):
    def refused(recipe, report):
        raise error

    monkeypatch.setattr(toolchain, "install", refused)
    assert main(["toolchain", "install", "tiny"]) == status
    assert f"error: {error}" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_install_shows_a_bar_in_a_terminal(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(toolchain, "Console", lambda **_: Console(file=shown, force_terminal=True, width=120))
    monkeypatch.setattr(toolchain, "install", lambda recipe, report: report("tool==1.0 (1 of 2)"))
    assert main(["toolchain", "install", "tiny"]) == 0
    assert "tiny: tool==1.0 (1 of 2)" in shown.getvalue()
    assert "1.5/1.5 GB" in shown.getvalue()
