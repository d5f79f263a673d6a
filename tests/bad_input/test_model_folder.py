"""Model folders that cannot be served. LMDeploy 0.18's own answer, the same for cuda, is named at each case.

missing: ``HFValidationError: Repo id must be in the form ...`` or a network error (utils.py:283 takes any path that
    does not exist for a hub id).
no config: ``RuntimeError: Could not find model architecture from config`` (archs.py:153).
no tokenizer: transformers' ``ValueError: Couldn't instantiate the backend tokenizer`` (tokenizer.py:50), or none, as
    transformers 5 makes up an empty tokenizer for some configurations.
truncated: ``SafetensorError`` out of model_weight_loader.py:93, after earlier shards were loaded; in the server's
    child process, so that the server itself ends with ``RPCServerDeadError``.
unknown architecture: ``RuntimeError: Can not found rewrite for architectures`` (models/patch.py:196), after the
    tokenizer was loaded and the engine's process started.
"""

import codecs
import errno
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder import model_folder
from dlinfer.framework.lmdeploy_ext.preflight.check import preflight
from tests.bad_input.broken_models import BROKEN, CORRUPT_TOKENIZER, Broken
from tests.serve.processes import LMDEPLOY, ProcessTree

TRY_PIPELINE = """
import sys
from lmdeploy import PytorchEngineConfig, pipeline
if __name__ == "__main__":
    pipeline(sys.argv[1], backend_config=PytorchEngineConfig(device_type="cpu", session_len=64))
    print("loaded")
"""
SECONDS = 400

# The cases of which every way into LMDeploy is tried; the rest differ in the check alone.
THROUGH_LMDEPLOY = {
    "no config": BROKEN["no config"],
    "no tokenizer": BROKEN["no tokenizer"],
    "corrupt tokenizer": CORRUPT_TOKENIZER,
    "truncated weights": BROKEN["truncated weights"],
    "unknown architecture": BROKEN["unknown architecture"],
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_names_what_is_wrong(name: str, copy: Path):
    BROKEN[name].apply(copy)
    with pytest.raises(ModelFolderError, match=re.escape(BROKEN[name].words)):
        model_folder.check_model_folder(copy)


def test_check_passes_a_good_model(model: Path):
    model_folder.check_model_folder(model)


def test_check_passes_a_byte_order_mark(copy: Path):
    file = copy / "config.json"
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    model_folder.check_model_folder(copy)
    assert preflight(copy, "cpu", session_len=64).fits


def test_check_names_a_folder_that_may_not_be_read(copy: Path, monkeypatch):
    def is_dir(self: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with pytest.raises(ModelFolderError, match=r"model cannot be read \(Permission denied\)"):
        model_folder.check_model_folder(copy)


def test_check_tells_a_file_from_a_missing_folder(model: Path):
    with pytest.raises(ModelFolderError, match="it is a file, not a folder"):
        model_folder.check_model_folder(model / "config.json")
    with pytest.raises(ModelFolderError, match="there is no such folder"):
        model_folder.check_model_folder(model / "mislaid")


@pytest.mark.parametrize("name", ["/models/llama", "./llama", "../llama", "~/llama", "llama/", "a/b/c", "."])
def test_looks_like_path(name: str):
    assert model_folder.looks_like_path(name)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-7B-Instruct"])
def test_hub_id_does_not_look_like_a_path(name: str):
    assert not model_folder.looks_like_path(name)


def fails_with(command: list[str], words: str) -> None:
    """The command ends with status 1, ``words`` stand in its last line, and nothing of it is left.

    A traceback of ours ends with one line more, which names the error's entry in the docs.
    """
    with ProcessTree(command) as tree:
        status = tree.wait(SECONDS)
        assert status == 1, f"{status}\n{tree.output()[-3000:]}"
        *before, last = tree.output().strip().splitlines()
        if last.startswith("See docs/reference/errors.md#"):
            last = before[-1]
        assert words in last, tree.output()[-3000:]
        assert tree.survivors() == []


def pipeline_fails(path: str, words: str) -> None:
    fails_with([sys.executable, "-c", TRY_PIPELINE, path], f"dlinfer.errors.ModelFolderError: {words}")


def command_line_fails(arguments: list[str], path: str, words: str) -> None:
    """The command line shows no traceback of ours or LMDeploy's, only the error."""
    command = [LMDEPLOY, *arguments, path, "--backend", "pytorch", "--device", "cpu"]
    fails_with(command, f"lmdeploy: error: {words}")


def message(path: Path | str, broken: Broken) -> str:
    return f"the model folder {str(path)!r} cannot be served: {broken.words}"


def quick(name: str, names: Iterable[str]) -> list:
    """One case for the gate: each is a process of its own, and all of them pass through the check above."""
    return [name, *(pytest.param(one, marks=pytest.mark.full) for one in names if one != name)]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", quick("corrupt tokenizer", THROUGH_LMDEPLOY))
def test_pipeline(name: str, copy: Path):
    THROUGH_LMDEPLOY[name].apply(copy)
    pipeline_fails(str(copy), message(copy, THROUGH_LMDEPLOY[name]))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", quick("/nowhere/llama", ["nobody/no-such-model"]))
def test_pipeline_of_a_missing_folder(name: str):
    pipeline_fails(name, f"the model folder {name!r} cannot be served: there is no such folder")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", quick("truncated weights", THROUGH_LMDEPLOY))
def test_server(name: str, copy: Path):
    THROUGH_LMDEPLOY[name].apply(copy)
    command_line_fails(["serve", "api_server"], str(copy), message(copy, THROUGH_LMDEPLOY[name]))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("arguments", quick("chat", ["serve api_server"]))
@pytest.mark.full
def test_command_line_on_a_missing_folder(arguments: str):
    words = "the model folder '/nowhere/llama' cannot be served: there is no such folder"
    command_line_fails(arguments.split(), "/nowhere/llama", words)


@pytest.mark.full
@pytest.mark.parametrize("name", THROUGH_LMDEPLOY)
def test_chat(name: str, copy: Path):
    THROUGH_LMDEPLOY[name].apply(copy)
    command_line_fails(["chat"], str(copy), message(copy, THROUGH_LMDEPLOY[name]))
