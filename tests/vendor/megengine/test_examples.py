"""The document's own code examples run as written; those on CUDA also on the CPU, where this machine has no GPU."""

import os
import sys
import textwrap
import threading
import time
import unittest
from typing import Any

import numpy as np
import pytest

from dlinfer.vendor.megengine import lite
from dlinfer.vendor.megengine.errors import LiteError
from tests.vendor.megengine import examples, sealed_models
from tests.vendor.megengine.models import WEIGHT, expected_layer
from tests.vendor.megengine.running import TOLERANCE

ALONE = {name: text for name, text in vars(examples).items() if name.isupper()}
WITH_MODEL = {name: ALONE.pop(name) for name in ("ASYNC_WITH_CALLBACK", "FINISH_CALLBACK")}
WITH_FOLDER = {name: ALONE.pop(name) for name in ("DECRYPTION", "UPDATE_KEY")}
ON_CUDA = [name for name, text in ALONE.items() if "LITE_CUDA" in text]

INPUTS = """
network.get_io_tensor("data").set_data_by_copy(DATA)
network.get_io_tensor("weight").set_data_by_copy(WEIGHT)
output_tensor = network.get_io_tensor("result_0")
"""
DATA = np.arange(32, dtype="float32").reshape(4, 8) / 32
EXAMPLE = "the document's example"


def run(text: str, **known: Any) -> dict[str, Any]:
    names = {name: getattr(lite, name) for name in lite.__all__}
    names |= {"np": np, "os": os, "DATA": DATA, "WEIGHT": WEIGHT, **known}
    exec(compile(text, EXAMPLE, "exec"), names)
    return names


@pytest.mark.parametrize("name", [name for name in ALONE if name not in ON_CUDA])
def test_examples(name):
    run(ALONE[name])


@pytest.mark.parametrize("name", ON_CUDA)
def test_examples_on_cuda(name):
    """As written where there is a GPU, else a clear error; and on the CPU."""
    if lite.LiteGlobal.get_device_count(lite.LiteDeviceType.LITE_CUDA):
        run(ALONE[name])
    else:
        with pytest.raises(LiteError, match="this machine has no LITE_CUDA"):
            run(ALONE[name])
    run(ALONE[name].replace("LITE_CUDA", "LITE_CPU"))


@pytest.fixture
def long_run(monkeypatch):
    """Runs whose end is told only when somebody counts; an example asserts that it has counted before the end."""
    here, told = threading.get_ident(), lite.LiteNetwork.async_with_callback

    def counts() -> bool:
        frame = sys._current_frames()[here]
        while frame is not None and frame.f_code.co_filename != EXAMPLE:
            frame = frame.f_back
        return frame is not None and bool(frame.f_locals.get("count"))

    def telling_late(network, callback):
        def late():
            while not counts():
                time.sleep(0.001)
            return callback()

        told(network, late)

    monkeypatch.setattr(lite.LiteNetwork, "async_with_callback", telling_late)


@pytest.mark.parametrize("name", WITH_MODEL)
def test_examples_with_a_model(name, layer, long_run):
    body = textwrap.indent(WITH_MODEL[name].format(inputs=INPUTS), "    ")

    class Reader:
        correct_data = expected_layer(DATA)

    text = f"def example(self, model_path):\n{body}\n    return output_tensor.to_numpy()\n"
    example = run(text)["example"]
    result = example(Reader(), str(layer))
    np.testing.assert_allclose(result, Reader.correct_data, **TOLERANCE)


@pytest.mark.parametrize("name", WITH_FOLDER)
def test_examples_with_encrypted_models(name, layer, tmp_path):
    pytest.importorskip("cryptography", reason="AES needs the package cryptography")
    (tmp_path / "shufflenet.mge").write_bytes(layer.read_bytes())
    sealed = sealed_models.aes(layer.read_bytes(), bytes(range(32)))
    (tmp_path / "shufflenet_crypt_aes.mge").write_bytes(sealed)
    case = unittest.TestCase()
    case.source_dir = str(tmp_path)  # pyright: ignore[reportAttributeAccessIssue]
    network = run(WITH_FOLDER[name], self=case)["network"]
    assert network.get_all_output_name() == ["result_0"]
