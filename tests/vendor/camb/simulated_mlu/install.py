"""Make the device "mlu" of this process: dlinfer's stand-in under the vendor's name, and a module torch_mlu_ops.

``install`` stands where torch_mlu's entry point does. torch gives PrivateUse1 to one device a process, and for good.
"""

import importlib
import importlib.machinery
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer.conformance import stand_in
from tests.vendor import simulated_graph
from tests.vendor.camb import signatures
from tests.vendor.camb.simulated_mlu.rules import NotAdmittedError

ROOM = __name__.rpartition(".")[0]
MODULES = ("pointwise", "caches", "attention", "products", "experts")

NAME = "mlu"

calls: Counter[str] = Counter()
"""How often each of the vendor's functions was called."""

_installed: list[types.ModuleType] = []


def install() -> None:
    """Make the device and the vendor's modules. For the entry point group ``torch.backends``, or at any time."""
    if _installed:
        return
    stand_in.install(NAME, _Mlu())
    for name, version in (("torch_mlu", "1.30.2"), ("torch_mlu_ops", signatures.VERSION)):
        made = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None)
        made.__dict__["__version__"] = version
        sys.modules[name] = made
        _installed.append(made)
    implementations: dict[str, Callable[..., Any]] = {}
    for name in MODULES:
        implementations |= vars(importlib.import_module(f"{ROOM}.{name}"))
    for name, line in signatures.lines().items():
        setattr(_installed[-1], name, _function(name, line, implementations[name]))


class _Mlu(stand_in.Module):
    """``torch.mlu`` as this adaptor and LMDeploy ask it."""

    def __init__(self) -> None:
        from dlinfer.vendor.streams import HostEvent, HostStream, HostStreams

        streams = HostStreams()
        self.Stream, self.Event = HostStream, HostEvent
        self.current_stream = lambda device=None: streams.current_stream()
        self.stream, self.empty_cache = streams.stream, streams.empty_cache

    @property
    def MLUGraph(self) -> Any:  # noqa: N802 - torch_mlu's name
        return simulated_graph.Graph

    def is_current_stream_capturing(self) -> bool:
        return simulated_graph.capturing()

    def synchronize(self, device: Any = None) -> None:
        """All is done. Raises CaptureFault while a graph is captured."""
        simulated_graph.refuse("synchronize")

    def set_device(self, device: Any) -> None:
        """There is one."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return stand_in.free(), stand_in.TOTAL

    def get_device_name(self, device: Any = None) -> str:
        return "a simulated MLU"


def _function(name: str, line: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    signature = signatures.signature(line)

    def run(*args: Any, **kwargs: Any) -> Any:
        if simulated_graph.capturing():
            return simulated_graph.record(name, run, args, kwargs)
        calls[name] += 1
        bound = signature.bind(*args, **kwargs)  # raises TypeError
        for argument, value in bound.arguments.items():
            _check_type(name, signature.parameters[argument], value)
        bound.apply_defaults()
        given = bound.arguments
        host = {argument: _shown(name, argument, value) for argument, value in given.items()}
        try:
            out = implementation(**host)
        except Exception as cause:
            raise type(cause)(f"{name}: {cause}") from cause
        return _back(out, given)

    run.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _check_type(name: str, parameter: Any, value: Any) -> None:
    """Raise TypeError for a value that is not of the annotated type; a float may be given as an int, never a bool."""
    wanted = parameter.annotation
    if wanted is parameter.empty or value is parameter.default:
        return
    types_ = typing.get_args(wanted) or (wanted,)
    if typing.get_origin(wanted) in (dict, list):
        types_ = (typing.get_origin(wanted),)
    plain = tuple(typing.get_origin(one) or one for one in types_)
    exact = type(value) in plain or (float in plain and type(value) is int)
    if not exact and not (torch.Tensor in plain and isinstance(value, Tensor)):
        raise TypeError(f"{name}: {parameter.name} is a {type(value).__name__}, not {wanted}")


def _shown(function: str, argument: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.device.type != NAME:
        raise NotAdmittedError(f"{function}: {argument} lies on {value.device}")
    return stand_in.on_host(value)


def _back(out: Any, given: dict[str, Any]) -> Any:
    """Results on the device; one that is an argument's memory is that argument."""
    tensors = [one for one in given.values() if isinstance(one, Tensor)]
    places = {stand_in.on_host(one).data_ptr(): one for one in tensors if one.numel()}

    def back(x: Tensor) -> Tensor:
        return places[x.data_ptr()] if x.data_ptr() in places and x.numel() else stand_in.to_device(x)

    return pytree.tree_map_only(Tensor, back, out)
