"""The ``torch`` that LMDeploy's own modules see: the real one, with "cuda" meaning the active device.

LMDeploy writes device "cuda" and ``torch.cuda`` in its engine and leaves it to other devices to make that mean
them. Changing torch itself would do so for the whole process and is known to break HF transformers beside it.
So only the name ``torch`` in the modules listed here is replaced, by a view that translates the few names those
modules use and gives everything else unchanged. Modules whose code runs inside the model's forward pass are not
covered: they get the device from their tensors, and graph capture needs the real torch there.
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
    "lmdeploy.pytorch.engine.model_agent.agent": "streams and events; dummy inputs of the warm-up on 'cuda'",
    "lmdeploy.pytorch.engine.model_agent.inputs_maker": "an event for each batch of inputs",
    "lmdeploy.pytorch.engine.executor.mp_executor": "the process of a rank takes its device",
    "lmdeploy.pytorch.engine.cache_engine.engine": "the swap stream and its event",
    "lmdeploy.pytorch.engine.cache_engine.layout": "allocates the KV cache on 'cuda'",
    "lmdeploy.pytorch.engine.logits_process": "the current stream and an event for guided decoding",
    "lmdeploy.pytorch.weight_loader.model_weight_loader": "empties the allocator's cache",
    "lmdeploy.pytorch.models.patch": "builds the model on 'cuda' when no device is given",
    "lmdeploy.pytorch.configurations.utils": "the compute capability, to tell whether flash_mla can be used",
    "lmdeploy.pytorch.nn.norm": "weights on 'cuda' when no device is given",
    "lmdeploy.pytorch.nn.embedding": "weights on 'cuda' when no device is given",
    "lmdeploy.pytorch.strategies.base.model_inputs": "dummy inputs on the device it is told, 'cuda'",
    "lmdeploy.pytorch.strategies.ar.model_inputs": "dummy inputs on the device it is told, 'cuda'",
    "lmdeploy.pytorch.strategies.ar_spec.model_inputs": "dummy inputs of speculative decoding, on the same",
    "lmdeploy.pytorch.spec_decode.spec_agent": "synchronises in the draft model's warm-up",
    "lmdeploy.pytorch.spec_decode.proposers.base": "the stream of the draft model's forward",
}
"""Module -> what it needs the view for."""

_view: "TorchView | None" = None


class Accelerator:
    """Replaces ``torch.cuda``, as LMDeploy's engine uses it: streams and memory are the vendor's.

    device: torch's name of it. described: the vendor's description of it.
    """

    def __init__(self, device: str, described: Device) -> None:
        self._device, self._described = torch.device(device), described
        streams = described.streams
        self.Stream, self.Event = streams.Stream, streams.Event
        self.current_stream, self.stream = streams.current_stream, streams.stream
        self.synchronize, self.empty_cache = streams.synchronize, streams.empty_cache

    def current_device(self) -> torch.device:
        """The device, in a form that ``device=`` takes."""
        return self._device

    def set_device(self, device: Any) -> None:
        """The process of a rank takes the card of its number."""
        if isinstance(device, int):
            self._described.take(device)

    def is_available(self) -> bool:
        """LMDeploy must not use CUDA here."""
        return False

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """The properties that the engine reads."""
        name = str(self._device)
        return SimpleNamespace(name=name, uuid=name, total_memory=self._described.memory().total)


class TorchView(ModuleType):
    """torch with "cuda" translated to another device."""

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
        """``torch.device(...)``, with the active device for every "cuda" device."""
        device = torch.device(*args, **kwargs)
        return torch.device(self._device) if device.type == "cuda" else device

    def _translated(self, factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is not None:
                kwargs["device"] = self._translate(kwargs["device"])
            return factory(*args, **kwargs)

        return make


def _device_class(translate: Callable[..., torch.device]) -> type:
    """A class that makes devices like ``translate``. Its instances are ``torch.device`` objects."""

    class DeviceType(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
            return translate(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.device)

    return DeviceType("device", (), {})


def install(device: str, described: Device) -> None:
    """Show the view to every covered module that is loaded, and to the others when they are."""
    global _view
    _view = TorchView(device, described)
    for module in filter(None, map(sys.modules.get, COVERED)):
        cover(module)


def cover(module: ModuleType) -> None:
    """Show the view to one module, if it is on the list."""
    if _view is not None and module.__name__ in COVERED and vars(module).get("torch") is torch:
        module.torch = _view  # type: ignore[attr-defined]
