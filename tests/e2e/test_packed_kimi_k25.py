"""Kimi-K2.5 as it is published: experts of 4 bits in compressed-tensors' files, all else in floats.

Oracle: transformers' network with the weights that the packed ones stand for, in float32.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.tiny_models.build import REFERENCE, STAMP
from tests.e2e import packed_model
from tests.e2e.harness import Lab
from tests.e2e.packed_experts_model import METHODS
from tests.e2e.test_vision import ask, check
from tests.framework.lmdeploy_ext.conversion.conversion_files import KIMI_K25

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1000)]


def build(floats: Path, folder: Path, at_the_top: bool) -> None:
    """Make ``folder`` the model in ``floats`` with packed experts.

    at_the_top: whether config.json has their description outside ``text_config`` too, as transformers saves it.
    """
    shutil.copytree(floats, folder)
    stored: dict[str, torch.Tensor] = {}
    rounded: dict[str, torch.Tensor] = {}
    for name, weight in load_file(floats / "model.safetensors").items():
        stored[name] = rounded[name] = weight
        if ".experts." in name:
            layer, method = name.removesuffix("weight"), METHODS["experts"]
            rounded[name], parts = packed_model.rounded(weight.to(method.dtype).float(), method)
            parts["weight_shape"] = parts["weight_shape"].int()
            del stored[name]
            stored |= {f"{layer}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(rounded, folder / REFERENCE / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    described = {"quantization_config": KIMI_K25}
    config |= {"text_config": config["text_config"] | described} | (described if at_the_top else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    files = (__file__, packed_model.__file__)
    made = hashlib.sha256("".join(Path(file).read_text() for file in files).encode()).hexdigest()
    stamp = json.loads((floats / STAMP).read_text())
    (folder / STAMP).write_text(json.dumps(stamp | {"fingerprint": f"{stamp['fingerprint']}-{made[:16]}"}))


def compare(lab: Lab, folder: Path, mode: str, at_the_top: bool) -> None:
    build(lab.model("kimi_k25"), folder, at_the_top)
    check("kimi_k25", mode, "base", *ask(lab, "kimi_k25", mode, "base", folder))


def test_packed_experts_in_eager_mode(lab: Lab, tmp_path: Path) -> None:
    compare(lab, tmp_path / "model", "eager", at_the_top=False)


@pytest.mark.full
@pytest.mark.parametrize("at_the_top", [False, True])
def test_packed_experts_as_graphs(lab: Lab, tmp_path: Path, at_the_top: bool) -> None:
    compare(lab, tmp_path / "model", "graph", at_the_top)
