"""No room but a vendor's own says "cpu" where the device is meant: it asks the tensors, or the active vendor."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.imports import PACKAGE, modules

ROOMS = ("dlinfer.ops", "dlinfer.graph", "dlinfer.runtime", "dlinfer.framework")
HOST = "cpu"

HONEST = {
    "dlinfer.ops.core.samples": "the default of a tool: samples are made on the host where no device is named",
    "dlinfer.graph.ir.device": "the one place where graphs name the host, whose tensors graphs of every device take",
    "dlinfer.graph.interface.interface": "a flag of a tensor is read faster than its device is compared",
    "dlinfer.framework.lmdeploy_ext.conversion.model_files": "LMDeploy reads files into the host's memory",
    "dlinfer.framework.lmdeploy_ext.device.vendor_devices": "what serves where LMDeploy's default, cuda, is not there",
    "dlinfer.framework.lmdeploy_ext.ranks.ray_cluster": "Ray's name of a resource",
    "dlinfer.framework.lmdeploy_ext.quantise.calibration_job": "where another library is to round",
    "dlinfer.framework.lmdeploy_ext.quantise.loss_job": "the device whose settings are measured",
    "dlinfer.framework.mindie_ext.cache.pool": "blocks that are swapped out stand on the host",
    "dlinfer.framework.mindie_ext.model.model_wrapper": "a generator's device where no vendor serves NPUs",
    "dlinfer.runtime.session.batch_collector": "a public default: a batch is collected in the host's memory",
}
"""Module -> why it may say so."""


def says_host(source: str) -> Iterator[int]:
    """Lines with a string that names torch's device of the host."""
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if text.partition(":")[0].strip().lower() == HOST:
            yield node.lineno  # pyright: ignore[reportAttributeAccessIssue]


def found(root: Path) -> dict[str, list[int]]:
    every = modules(root).items()
    inside = {name: path for name, path in every if name.startswith(ROOMS)}
    lines = {name: sorted(says_host(path.read_text())) for name, path in inside.items()}
    return {name: numbers for name, numbers in lines.items() if numbers}


def test_the_rooms_name_no_device_but_where_the_host_is_meant():
    assert {name: lines for name, lines in found(PACKAGE.parent).items() if name not in HONEST} == {}


def test_every_exception_is_used():
    assert set(HONEST) - set(found(PACKAGE.parent)) == set()


def test_the_reader_sees():
    for line in (
        'find_engine(name, "cpu")',
        "torch.device('cpu:0')",
        'def f(device="CPU"): ...',
        'x = {"cpu": 1}',
    ):
        assert list(says_host(line)) == [1], line
    for line in ("tensor.cpu()", "import torch.cpu", '"""On a cpu."""', "cpu = 1", "torch.backends.cpu.x"):
        assert list(says_host(line)) == [], line
