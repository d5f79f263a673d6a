"""The document's own code examples run as written; those on CUDA also on the CPU, where this machine has no GPU."""

import contextlib
import os
import textwrap
import unittest
from collections.abc import Callable
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


def run(text: str, **known: Any) -> dict[str, Any]:
    names = {name: getattr(lite, name) for name in lite.__all__}
    names |= {"np": np, "os": os, "DATA": DATA, "WEIGHT": WEIGHT, **known}
    exec(compile(text, "the document's example", "exec"), names)
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


def first_without_assertion(work: Callable[[], Any], tries: int) -> Any:
    """An example asserts that it looks before the run has ended, which on a busy machine it may not."""
    for _ in range(tries - 1):
        with contextlib.suppress(AssertionError):
            return work()
    return work()


@pytest.mark.parametrize("name", WITH_MODEL)
def test_examples_with_a_model(name, layer):
    body = textwrap.indent(WITH_MODEL[name].format(inputs=INPUTS), "    ")

    class Reader:
        correct_data = expected_layer(DATA)

    text = f"def example(self, model_path):\n{body}\n    return output_tensor.to_numpy()\n"
    example = run(text)["example"]
    tries = 10 if name == "ASYNC_WITH_CALLBACK" else 1
    result = first_without_assertion(lambda: example(Reader(), str(layer)), tries)
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
