"""Weight files: a file is parsed once, whatever number of tensors is read from it."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dlinfer.framework.lmdeploy_ext.checks.model.weights import _Load
from dlinfer.framework.lmdeploy_ext.conversion import model_files

TENSORS = {
    f"layers.{i}.experts.{j}.scales": torch.full((2,), 10.0 * i + j) for i in range(3) for j in range(20)
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Any]]:
    """Makes a function of a module note its calls: ``counted(module, name)`` returns the list of their arguments."""

    def counted(owner: Any, name: str) -> list[Any]:
        calls: list[Any] = []
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(arguments)
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, call)
        return calls

    return counted


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors with their values, as the check of a checkpoint against its model does."""
    return dict(_Load(path.parent, SimpleNamespace(), {"*"})._tensors(path))


def test_the_header_of_a_safetensors_file_is_parsed_once(tmp_path, counted) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    calls = counted(model_files.json, "loads")
    read_all(path)
    found = read_all(path)
    assert len(calls) == 1
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_file_is_loaded_once_for_its_shapes_and_once_for_its_values(
    tmp_path, counted, zipped
) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=zipped)
    calls = counted(model_files.torch, "load")
    found = read_all(path)
    assert len(calls) == 2
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_file_that_has_changed_is_parsed_again(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    assert list(model_files.header(path)) == ["a"]
    save_file({"b": torch.zeros(4)}, path)  # as many bytes
    os.utime(path, ns=(0, 0))
    assert list(model_files.header(path)) == ["b"]


def test_no_values_are_read_of_a_file_from_which_only_shapes_are_needed(tmp_path, counted) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path)
    calls = counted(model_files.torch, "load")
    found = dict(_Load(tmp_path, SimpleNamespace(), set())._tensors(path))
    assert len(calls) == 1
    assert all(tensor.is_meta for tensor in found.values())
