"""Finds uses of ``torch.cuda`` and "cuda" in LMDeploy's source. ``device/view.py`` may have to redirect new uses."""

import ast
from collections.abc import Iterator

from dlinfer.framework.lmdeploy_ext.contract.drift import Drift
from dlinfer.framework.lmdeploy_ext.contract.records import Record
from dlinfer.framework.lmdeploy_ext.contract.source import Module, Tree, dotted, within
from dlinfer.framework.lmdeploy_ext.device.view import COVERED

EXCUSED = {
    "lmdeploy.lite": "quantisation on CUDA; `dlinfer quantise` replaces it",
    "lmdeploy.turbomind": "another engine",
    "lmdeploy.pytorch.backends.cuda": "layers for CUDA",
    "lmdeploy.pytorch.kernels.cuda": "kernels for CUDA",
    "lmdeploy.pytorch.third_party": "kernels for CUDA",
    "lmdeploy.pytorch.tools": "not a part of an engine",
    "lmdeploy.pytorch.ray": "names of Ray's resources; ranks/ray_cluster.py replaces them",
    "lmdeploy.pytorch.engine.executor.ray_executor": "ranks/ray_cluster.py and device/view.py replace its uses",
    "lmdeploy.pytorch.engine.mp_engine.ray_engine": "an engine in a Ray actor, which only mp_engine_backend='ray' "
    "starts",
}
"""Package or module of LMDeploy's -> why its mentions of CUDA do not matter on our devices."""


def uses(tree: Tree) -> dict[str, list[str]]:
    """Return a dict from module name to the module's mentions of CUDA. It leaves out the modules in ``EXCUSED``."""
    mentions = {
        module.name: sorted({text for text, _ in _mentions(module)})
        for module in tree.holding("cuda")
        if not any(within(module.name, name) for name in EXCUSED)
    }
    return {name: texts for name, texts in mentions.items() if texts}


def compare(tree: Tree, record: Record) -> Iterator[Drift]:
    """Yield a drift for each mention of CUDA that is not in ``record``, the reviewed LMDeploy release."""
    for name, texts in uses(tree).items():
        module = tree.module(name)
        assert module is not None, "the name comes from the tree"
        for text, line in _mentions(module):
            if text in texts and text not in record.cuda.get(name, ()):
                texts.remove(text)  # one drift for each text
                offered = f"covered by the device view: {COVERED.get(name, 'no')}"
                step = "check that it runs on our device (device/view.py), then record the release"
                where = tree.where(module, line)
                yield Drift("new use of CUDA", "essential", where, f"{name}: {text}", offered, step)


def _mentions(module: Module) -> Iterator[tuple[str, int]]:
    """Yield (text, line) of each mention of CUDA, such as ``torch.cuda.Event``, ``x.cuda`` or ``'cuda'``."""
    inner = {node.value for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            name = dotted(node) or f".{node.attr}"
            if "cuda" in name.split("."):
                yield name, node.lineno
        elif isinstance(node, ast.Constant) and str(node.value).partition(":")[0] == "cuda":
            yield "'cuda'", node.lineno
