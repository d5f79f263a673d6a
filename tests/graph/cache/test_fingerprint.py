"""The environment of a key: each of its parts counts, and another process in the same one says the same."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dlinfer
from dlinfer.graph.cache import fingerprint
from dlinfer.graph.cache.fingerprint import environment
from dlinfer.vendor import discovery
from tests.plugins.builder import healthy


def test_it_names_what_compiled_things_depend_on():
    said = environment()
    assert torch.__version__ in said.torch
    assert dlinfer.__version__ in said.dlinfer
    assert said.cpu == fingerprint.cpu_flags()
    assert said.isa == torch.backends.cpu.get_cpu_capability()
    assert said.threads == torch.get_num_threads()


def test_what_torch_is_told_counts():
    before, dtype = environment(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert environment() != before
    finally:
        torch.set_default_dtype(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert environment() != before
    assert environment() == before


SHOW = "from dlinfer.graph.cache.fingerprint import environment\nprint(environment())"


def said_by_process(code: str = SHOW, folder: Path | None = None, **variables: str) -> str:
    """What Python prints of ``code``, with dlinfer from ``folder`` if that is given."""
    start = f"import sys; sys.path.insert(0, {str(folder)!r})\n" if folder else ""
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    done = subprocess.run(
        [sys.executable, "-c", start + threads + code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    return done.stdout.strip()


def test_another_process_says_the_same():
    assert said_by_process() == str(environment())


@pytest.mark.full
def test_a_forced_instruction_set_counts():
    assert said_by_process(ONEDNN_MAX_CPU_ISA="AVX2") != str(environment())


@pytest.mark.full
def test_code_that_was_edited_after_it_was_loaded_is_neither_the_old_nor_the_new(tmp_path):
    """The old code must not pass for the new one, whose text lies on disk, nor the new one for the old."""
    shutil.copytree(
        Path(dlinfer.__file__).parent, tmp_path / "dlinfer", ignore=shutil.ignore_patterns("__pycache__")
    )
    edited = tmp_path / "dlinfer" / "graph" / "passes" / "cse.py"
    edits = (
        "import dlinfer.graph.passes.cse as loaded\n"
        "assert loaded.__file__.startswith(sys.path[0])\n"
        "open(loaded.__file__, 'a').write('# edited')\n"
    )
    text = edited.read_text()
    original = said_by_process(folder=tmp_path)
    between = said_by_process(edits + SHOW, tmp_path)
    assert edited.read_text() == text + "# edited"
    after = said_by_process(folder=tmp_path)
    assert len({original, between, after}) == 3
    edited.write_text(text)
    assert said_by_process(folder=tmp_path) == original, (
        "the same text is the same code, wherever and whenever"
    )


# --- vendors


def test_dlinfers_own_vendors_are_its_code():
    discovery.get("cpu")
    assert environment(["cpu"]).vendors == {"cpu": "dlinfer"}


def test_a_plugins_version_and_code_count(plugins):
    plugins("acme", healthy("acme", "cpu"))
    plugins("zeta", healthy("zeta", "cpu"))
    time.sleep(0.1)  # what is written as it is loaded counts as changed
    for name in ("acme", "zeta"):
        discovery.get(name)
    said = environment(["acme", "zeta"]).vendors
    assert said["acme"].startswith("acme-package 1.0 ")
    # Two files of equal length that differ in a name have other digests.
    assert said["acme"].split()[-1] != said["zeta"].split()[-1]
    assert environment(["acme"]).vendors == {"acme": said["acme"]}
    assert not environment(["acme"]).changed


def test_a_plugin_that_was_edited_after_it_was_loaded_is_unknown(plugins, tmp_path):
    plugins("acme", healthy("acme", "cpu"))
    discovery.get("acme")
    (path,) = tmp_path.glob("acme*_plugin.py")
    path.write_text(path.read_text() + "# edited")
    assert path.name in environment(["acme"]).changed


def test_a_vendor_without_an_entry_point_is_said_to_be_one(monkeypatch):
    assert environment(["by hand"]).vendors == {"by hand": "registered by hand"}
