"""What the library shows of its work: the profile of a run, and its log."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dlinfer.vendor.megengine.lite import LiteNetwork


def fill(network: LiteNetwork, **sizes: list[int]) -> None:
    """Ones for every input, of the model's sizes or of those given."""
    for name in network.get_all_input_name():
        tensor = network.get_io_tensor(name)
        tensor.set_data_by_copy(np.ones(sizes.get(name, tensor.layout.shapes), "float32"))


def run_filled(network: LiteNetwork, **sizes: list[int]) -> None:
    fill(network, **sizes)
    network.forward()
    network.wait()


class Profile:
    """The last run of a network, as ``enable_profile_performance`` writes it."""

    def __init__(self, path: Path) -> None:
        written = json.loads(path.read_text())
        self._graph: dict[str, Any] = written["graph_exec"]
        self._variables = {one["name"]: one for one in self._graph["var"].values()}
        self.threads = {thread for by_op in written["profiler"]["host"].values() for thread in by_op}
        self.operators = [self._graph["operator"][one]["type"] for one in self._graph["comp_seq"]]
        self.places = {one["comp_node"].split('"')[1] for one in self._variables.values()}

    def flags(self, variable: str) -> list[str]:
        return self._variables[variable]["flag"]

    def size_is(self, variable: str) -> str:
        """How the sizes are known: CONST, or RT_STATIC where they may change."""
        return self._variables[variable]["static_infer_tags"]["SHAPE"]["infer_type"]

    def address(self, variable: str) -> int:
        return self._variables[variable]["dev_ptr"]

    def workspace(self) -> int:
        """Bytes of the workspaces of all ops."""
        chunks = self._graph["mem_chunk"]
        spaces = [one["id"] for name, one in self._variables.items() if name.endswith(":workspace")]
        return sum(chunks[f"chk{one}"]["size"] for one in spaces)


def profiled(network: LiteNetwork, folder: Path, **sizes: list[int]) -> Profile:
    """The profile of a run of ones."""
    path = folder / "profile.json"
    network.enable_profile_performance(path)
    run_filled(network, **sizes)
    return Profile(path)


Log = Callable[[], str]
"""Gives what the library has printed since it was last asked."""
