"""The few transforms of torchvision that LMDeploy's own preprocessing imports, on pillow and torch.

Only LMDeploy's functions see them: a function is run with an ``import`` of its own that answers for torchvision.
"""

import builtins
from collections.abc import Callable, Sequence
from enum import Enum
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


class InterpolationMode(Enum):
    """Filters by torchvision's names, with pillow's numbers."""

    BICUBIC = 3


class Compose:
    """One transform after another."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Lambda:
    """A function as a transform."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, image: Any) -> Any:
        return self.function(image)


class Resize:
    """A pillow image in the size (height, width)."""

    def __init__(self, size: tuple[int, int], interpolation: InterpolationMode) -> None:
        self.size, self.interpolation = size, interpolation

    def __call__(self, image: Any) -> Any:
        height, width = self.size
        if image.size == (width, height):
            return image
        return image.resize((width, height), self.interpolation.value)


class ToTensor:
    """A pillow image of 8-bit channels as float32 [channels, height, width], 0 to 1."""

    def __call__(self, image: Any) -> Tensor:
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
        return pixels.permute(2, 0, 1).contiguous().float() / 255


class Normalize:
    """(x - mean) / std for each channel of [channels, height, width]."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


_TRANSFORMS = SimpleNamespace(
    Compose=Compose,
    Lambda=Lambda,
    Resize=Resize,
    ToTensor=ToTensor,
    Normalize=Normalize,
    InterpolationMode=InterpolationMode,
    functional=SimpleNamespace(InterpolationMode=InterpolationMode),
)
_MODULES = {
    "torchvision": SimpleNamespace(transforms=_TRANSFORMS),
    "torchvision.transforms": _TRANSFORMS,
    "torchvision.transforms.functional": _TRANSFORMS.functional,
}


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if name in _MODULES and level == 0:
        return _MODULES[name] if fromlist else _MODULES["torchvision"]
    return builtins.__import__(name, globals, locals, fromlist, level)


def with_transforms(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, for which ``import torchvision`` finds the transforms above."""
    assert isinstance(function, FunctionType)
    seen = dict(function.__globals__) | {"__builtins__": vars(builtins) | {"__import__": _import}}
    made = FunctionType(
        function.__code__, seen, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
