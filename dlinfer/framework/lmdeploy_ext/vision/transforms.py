"""The transforms of torchvision that LMDeploy's preprocessing imports, implemented with pillow and torch.

``with_transforms`` returns a copy of a function. In the copy, ``import torchvision`` imports the modules below.
Everywhere else the import is unchanged.
"""

import builtins
from collections.abc import Callable, Sequence
from functools import reduce
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Transform = Callable[[Any], Any]


def _compose(transforms: Sequence[Transform]) -> Transform:
    return lambda image: reduce(lambda done, transform: transform(done), transforms, image)


def _resize(size: tuple[int, int], interpolation: Image.Resampling) -> Transform:
    """Return a transform that resizes a pillow image to (height, width)."""
    wide = size[::-1]
    return lambda image: image if image.size == wide else image.resize(wide, interpolation)


def _to_tensor(image: Any) -> Tensor:
    """Return a pillow image with 8-bit channels as float32 [channels, height, width], in the range 0 to 1."""
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return pixels.permute(2, 0, 1).contiguous().float() / 255


def _normalize(mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Return a transform (x - mean) / std for each channel of x [channels, height, width]."""
    means, deviations = (torch.tensor(values)[:, None, None] for values in (mean, std))
    return lambda x: (x - means) / deviations


_FUNCTIONAL = SimpleNamespace(InterpolationMode=Image.Resampling)
_TRANSFORMS = SimpleNamespace(
    Compose=_compose,
    Lambda=lambda function: function,
    Resize=_resize,
    ToTensor=lambda: _to_tensor,
    Normalize=_normalize,
    InterpolationMode=Image.Resampling,
    functional=_FUNCTIONAL,
)
_MODULES = {
    "torchvision": SimpleNamespace(transforms=_TRANSFORMS),
    "torchvision.transforms": _TRANSFORMS,
    "torchvision.transforms.functional": _FUNCTIONAL,
}


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if name in _MODULES and level == 0:
        return _MODULES[name] if fromlist else _MODULES["torchvision"]
    return builtins.__import__(name, globals, locals, fromlist, level)


def with_transforms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function. In the copy, ``import torchvision`` imports the transforms above."""
    assert isinstance(function, FunctionType)
    names = function.__globals__ | {"__builtins__": vars(builtins) | {"__import__": _import}}
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
