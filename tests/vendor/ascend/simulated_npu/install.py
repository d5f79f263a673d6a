"""Make the device "npu" of this process: dlinfer's stand-in under the vendor's name, with the vendor's schemas.

``install`` stands where torch_npu's entry point does. torch gives PrivateUse1 to one device a process, and for good.
"""

import importlib
import importlib.machinery
import sys
import types
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer.conformance import stand_in
from tests.vendor.ascend.simulated_npu import hccl

GOLDEN = Path(__file__).parents[1] / "torch_npu-2.13.0.schemas"
ROOM = __name__.rpartition(".")[0]
MODULES = ("pointwise", "caches", "attention", "sparse", "products", "experts", "workspaces")

NAME = "npu"
HOST_TENSORS = {"context_lens"}
"""Arguments that lie on the host."""

calls: Counter[str] = Counter()
"""How often each of the vendor's ops was called."""
chip = {"name": "Ascend910B2", "version": 223}
"""What the card says that it is; tests change it."""

_libraries: list[torch.library.Library] = []  # a Library that dies takes its kernels along


def install() -> None:
    """Make the device and register the vendor's ops. For the entry point group ``torch.backends``, or at any time."""
    if _libraries:
        return
    stand_in.install(NAME, _Npu())
    _register()
    hccl.register(NAME)
    sys.modules["torch_npu"] = _package()


class _Npu(stand_in.Module):
    """``torch.npu`` as the vendor's package and LMDeploy ask it."""

    @cached_property
    def _graphs(self) -> Any:  # they read dlinfer's settings by way of torch, which is not imported yet
        return importlib.import_module(f"{ROOM}.graphs")

    @cached_property
    def _streams(self) -> Any:
        return importlib.import_module(f"{ROOM}.streams")

    @property
    def NPUGraph(self) -> Any:  # noqa: N802 - torch_npu's name
        return self._graphs.NPUGraph

    @property
    def ExternalEvent(self) -> Any:  # noqa: N802
        return self._graphs.ExternalEvent

    @property
    def Stream(self) -> Any:  # noqa: N802
        return self._streams.Stream

    @property
    def Event(self) -> Any:  # noqa: N802
        return self._streams.Event

    def current_stream(self, device: Any = None) -> Any:
        return self._streams.current()

    def stream(self, stream: Any) -> Any:
        return self._streams.using(stream)

    def __getattr__(self, name: str) -> Any:
        """Functions of graphs."""
        if not name.startswith("graph_task_"):
            raise AttributeError(name)
        return getattr(self._graphs, name)

    def is_current_stream_capturing(self) -> bool:
        from tests.vendor import simulated_graph

        return simulated_graph.capturing()

    def empty_cache(self) -> None:
        """The host's allocator keeps no cache of its own."""

    def synchronize(self, device: Any = None) -> None:
        """All is done. Raises CaptureFault while a graph is captured, and behind a replay that stands."""
        from tests.vendor import simulated_graph

        simulated_graph.refuse("synchronize")
        self._graphs.refuse_standing("synchronize")
        self._streams.wait_for_all()

    def set_device(self, device: Any) -> None:
        """There is one."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return stand_in.free(), stand_in.TOTAL

    def get_device_name(self, device: Any = None) -> str:
        return str(chip["name"])

    def get_soc_version(self) -> int:
        return int(chip["version"])


def _package() -> types.ModuleType:
    """``import torch_npu``: it is loaded. Others, such as transformers, import ops from it by name."""
    package = types.ModuleType("torch_npu")
    package.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)

    def op(name: str) -> Any:
        if not name.startswith("npu_"):
            raise AttributeError(name)

        def call(
            *args: Any, **kwargs: Any
        ) -> Any:  # the op itself may not be simulated, and is imported nevertheless
            return getattr(torch.ops.npu, name)(*args, **kwargs)

        return call

    inside = types.SimpleNamespace(_weak_ref_tensor=_weak_ref_tensor)
    package.__dict__.update(__version__="2.13.0", __getattr__=op, _C=inside)
    return package


def _weak_ref_tensor(tensor: Tensor) -> Tensor:
    return importlib.import_module(f"{ROOM}.graphs").weak_reference(tensor)


def _register() -> None:
    implementations: dict[str, Callable[..., Any]] = {}
    for name in MODULES:
        module = importlib.import_module(f"{ROOM}.{name}")
        implementations |= {
            key: one for key, one in vars(module).items() if key.startswith(("npu_", "_npu_"))
        }
    for space in ("npu", "atb"):
        library = torch.library.Library(space, "DEF")
        for line in GOLDEN.read_text().splitlines():
            if line.startswith(f"{space}::"):
                schema = torch._C.parse_schema(line)
                library.define(line.removeprefix(f"{space}::"))
                name, overload = schema.name.removeprefix(f"{space}::"), schema.overload_name
                found = implementations.get("_".join(filter(None, (name, overload))))
                if found is not None or not overload:
                    kernel = _kernel(name, schema, implementations[name] if found is None else found)
                    library.impl(".".join(filter(None, (name, overload))), kernel, "PrivateUse1")
        _libraries.append(library)


def _kernel(name: str, schema: Any, implementation: Callable[..., Any]) -> Callable[..., Any]:
    positional = [one.name for one in schema.arguments if not one.kwarg_only]
    graphs = importlib.import_module(f"{ROOM}.graphs")

    def run(*args: Any, **kwargs: Any) -> Any:
        given = graphs.bound(schema, args, kwargs)
        if graphs.updating():
            return graphs.tell(schema, given)
        calls[name] += 1
        host = {key: pytree.tree_map_only(Tensor, _shown(name, key), value) for key, value in given.items()}
        leading = [host.pop(one) for one in positional]
        try:
            out = implementation(*leading, **host)
        except Exception as cause:
            raise type(cause)(f"{name}: {cause}") from cause
        return None if out is None else _back(out, given)

    return run


def _shown(op: str, argument: str) -> Callable[[Tensor], Tensor]:
    def show(x: Tensor) -> Tensor:
        on_host = x.device.type == "cpu"
        if on_host is not (argument in HOST_TENSORS):
            raise RuntimeError(f"{op}: {argument} lies on {x.device}")
        return x if on_host else stand_in.on_host(x)

    return show


def _back(out: Any, given: dict[str, Any]) -> Any:
    """Results on the device; one that is an argument's memory is that argument."""
    tensors = [
        one for one in pytree.tree_leaves(given) if isinstance(one, Tensor) and one.device.type == NAME
    ]
    places = {stand_in.on_host(one).data_ptr(): one for one in tensors if one.numel()}

    def back(x: Tensor) -> Tensor:
        return places[x.data_ptr()] if x.data_ptr() in places and x.numel() else stand_in.to_device(x)

    return pytree.tree_map_only(Tensor, back, out if not isinstance(out, list) else list(out))
