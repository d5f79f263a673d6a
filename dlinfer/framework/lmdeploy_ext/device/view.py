"""Gives LMDeploy's modules a view of ``torch`` that translates "cuda" to the active device.

LMDeploy's engine writes "cuda" and ``torch.cuda``, and expects other devices to redirect these names. Patching torch
itself would redirect them for the whole process, which is known to break HF transformers. So we replace the name
``torch`` by a view, and only in the modules of ``COVERED``. The view translates the few names that those modules use
for a device, and passes on all other names. Modules that run inside the model's forward pass are not covered: they take
the device from their tensors, and graph capture needs the real torch.
"""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from dlinfer.vendor import Device

_FACTORIES = (
    "arange as_tensor empty empty_like full full_like ones ones_like rand randint randn tensor zeros zeros_like"
).split()

COVERED = {
    "lmdeploy.pytorch.engine.model_agent.agent": "uses streams and events, and dummy inputs on 'cuda' for the warm-up",
    "lmdeploy.pytorch.engine.model_agent.inputs_maker": "records an event for each batch of inputs",
    "lmdeploy.pytorch.engine.executor.mp_executor": "sets the device of a rank's process",
    "lmdeploy.pytorch.engine.executor.ray_executor": "sets the device of a rank's process that Ray starts",
    "lmdeploy.pytorch.engine.cache_engine.engine": "uses a stream and an event to swap blocks",
    "lmdeploy.pytorch.engine.cache_engine.layout": "allocates the KV cache on 'cuda'",
    "lmdeploy.pytorch.engine.logits_process": "uses the current stream, and an event for guided decoding",
    "lmdeploy.pytorch.weight_loader.model_weight_loader": "empties the allocator's cache",
    "lmdeploy.pytorch.models.patch": "builds the model on 'cuda' if no device is given",
    "lmdeploy.pytorch.configurations.utils": "reads the compute capability to decide whether to use flash_mla",
    "lmdeploy.pytorch.nn.norm": "creates weights on 'cuda' if no device is given",
    "lmdeploy.pytorch.nn.embedding": "creates weights on 'cuda' if no device is given",
    "lmdeploy.pytorch.strategies.base.model_inputs": "creates dummy inputs on 'cuda', the device of its caller",
    "lmdeploy.pytorch.strategies.ar.model_inputs": "creates dummy inputs on 'cuda', the device of its caller",
    "lmdeploy.pytorch.strategies.ar_spec.model_inputs": "creates dummy inputs of speculative decoding on 'cuda'",
    "lmdeploy.pytorch.spec_decode.spec_agent": "synchronises in the draft model's warm-up",
    "lmdeploy.pytorch.spec_decode.proposers.base": "uses a stream for the draft model's forward",
}
"""Name of an LMDeploy module -> why the module needs the view: a clause that has the module as subject."""

_view: "TorchView | None" = None


class Accelerator:
    """Replaces ``torch.cuda`` in LMDeploy's engine, with the vendor's streams and memory.

    device: torch's name of the device. described: the vendor's description of the device.
    """

    def __init__(self, device: str, described: Device) -> None:
        self._device, self._described = torch.device(device), described
        streams = described.streams
        self.Stream, self.Event = streams.Stream, streams.Event
        self.current_stream, self.stream = streams.current_stream, streams.stream
        self.synchronize, self.empty_cache = streams.synchronize, streams.empty_cache

    def current_device(self) -> torch.device:
        """Return the active device as a value for torch's argument ``device=``."""
        return self._device

    def set_device(self, device: Any) -> None:
        """Make this process use the card with the index ``device``. LMDeploy passes the rank.

        Values other than an int are ignored.
        """
        if isinstance(device, int):
            self._described.take(device)

    def is_available(self) -> bool:
        """Return False, so that LMDeploy does not use CUDA."""
        return False

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Return the device properties that LMDeploy's engine reads; total_memory is in bytes."""
        name = str(self._device)
        return SimpleNamespace(name=name, uuid=name, total_memory=self._described.memory().total)


class TorchView(ModuleType):
    """A replacement of the module ``torch`` that translates "cuda" to ``device``.

    device: torch's name of the device. described: the vendor's description of the device.
    """

    def __init__(self, device: str, described: Device) -> None:
        super().__init__("torch", torch.__doc__)
        self._device = device
        self.cuda = Accelerator(device, described)
        self.device = _device_class(self._translate)
        for name in _FACTORIES:
            setattr(self, name, self._translated(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def _translate(self, *args: Any, **kwargs: Any) -> torch.device:
        """Return ``torch.device(*args, **kwargs)``, or the active device if that is a "cuda" device."""
        device = torch.device(*args, **kwargs)
        return torch.device(self._device) if device.type == "cuda" else device

    def _translated(self, factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is not None:
                kwargs["device"] = self._translate(kwargs["device"])
            return factory(*args, **kwargs)

        return make


def _device_class(translate: Callable[..., torch.device]) -> type:
    """Return a class that replaces ``torch.device``. Calling the class calls ``translate`` with the same arguments.

    isinstance works with the class as with ``torch.device``.
    """

    class DeviceType(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
            return translate(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.device)

    return DeviceType("device", (), {})


def install(device: str, described: Device) -> None:
    """Create the device's view of torch, and put it into those covered modules that are already imported.

    ``cover`` puts the view into each module that is imported later. described: the vendor's description of the device.
    """
    global _view
    _view = TorchView(device, described)
    for module in filter(None, map(sys.modules.get, COVERED)):
        cover(module)


def cover(module: ModuleType) -> None:
    """Replace the name ``torch`` in a module by the view, if the module is in ``COVERED``."""
    if _view is not None and module.__name__ in COVERED and vars(module).get("torch") is torch:
        module.torch = _view  # type: ignore[attr-defined]
