"""At the start of a device, patched functions with another body than the reviewed one are named."""

import logging
import shutil

import pytest
from lmdeploy.version import __version__

from dlinfer.framework.lmdeploy_ext.contract import bodies, records
from dlinfer.framework.lmdeploy_ext.device import activation

FILE = "archs.py"
TARGET = "lmdeploy.archs:get_task"


@pytest.fixture
def source(tmp_path):
    """A copy of the patched files of the installed release, and what changes one of them."""
    for file in (*records.nearest(__version__).files, "__init__.py", "version.py"):
        copy = tmp_path / "lmdeploy" / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(bodies.installed_source() / file, copy)
    return tmp_path / "lmdeploy"


def changed(source):
    return [
        patch.target
        for patch, version in bodies.changed(activation.patches().patches, __version__, lambda: source)
        if version == __version__
    ]


def test_the_installed_release_is_the_recorded_one():
    assert not list(bodies.changed(activation.patches().patches, __version__))


def test_a_changed_body_is_found_and_a_changed_comment_is_not(source):
    file = source / FILE
    text = file.read_text()
    file.write_text(f"{text}\n# a comment\n")
    assert changed(source) == []
    docstring = '"""Get pipeline type and pipeline class from model config."""'
    assert docstring in text
    file.write_text(text.replace(docstring, f"{docstring}\n    print('changed')"))
    assert changed(source) == [TARGET]


def test_each_is_told_of_by_name_with_the_next_step(caplog, monkeypatch):
    patch = next(patch for patch in activation.patches().patches if patch.target == TARGET)
    monkeypatch.setattr(activation, "_changed", lambda: [(patch, "0.18.0")])
    with caplog.at_level(logging.WARNING, "dlinfer"):
        activation._tell_of_changed_bodies()
    assert f"the body of {TARGET} differs from the one reviewed in 0.18.0" in caplog.text
    assert "run `dlinfer contract`" in caplog.text
