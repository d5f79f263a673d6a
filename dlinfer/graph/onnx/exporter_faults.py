"""Calls that torch.onnx translates wrongly, as torch's op database shows."""

from collections.abc import Callable, Mapping, Sequence

import torch

from dlinfer.graph.onnx.translations.writing import Untranslated
from dlinfer.graph.torch_private.dispatcher import OpOverload

_aten = torch.ops.aten
_BAGS = (
    _aten.embedding_bag.default,
    _aten.embedding_bag.padding_idx,
    _aten._embedding_bag.default,
    _aten._embedding_bag_forward_only.default,
)


def guards() -> Mapping[OpOverload, Callable[..., None]]:
    """Functions that take an op's arguments and raise Untranslated where the translation would be wrong."""
    return {
        **dict.fromkeys(_BAGS, _bags),
        _aten.cross.default: _crossing,
        _aten.avg_pool1d.default: _pooling,
        _aten.avg_pool2d.default: _pooling,
        _aten.avg_pool3d.default: _pooling,
        _aten.as_strided.default: _strided,
        _aten.pad.default: _padding,
        _aten.scatter_reduce.two: _reducing,
        _aten.special_log_ndtr.default: _imprecise,
        _aten.special_erfcx.default: _imprecise,
    }


def _bags(*args: object, **kwargs: object) -> None:
    """The translation is a loop that reads at unchecked offsets. ONNX Runtime ends with SIGSEGV."""
    raise Untranslated("its offsets are read unchecked")


def _crossing(self: object, other: object, dim: int | None = None) -> None:
    """torch uses the first dimension of size 3, the translation the last dimension."""
    if dim is None:
        raise Untranslated("a cross product over a dimension that is not named")


def _pooling(
    self: object,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> None:
    """ONNX counts elements beyond the padding, and torch does not. ONNX has no divisor (``ignored_arguments``)."""
    if ceil_mode and count_include_pad:
        raise Untranslated("an average with ceil_mode that counts its padding")


def _strided(self: object, *args: object, **kwargs: object) -> None:
    """It reads a tensor's memory, and ONNX values have none."""
    raise Untranslated("it reads memory by strides")


def _padding(self: object, pad: Sequence[object], mode: str = "constant", value: float | None = None) -> None:
    """ONNX pads before it cuts, and torch after, which differs where nothing is left to repeat."""
    if mode != "constant" and any(isinstance(size, int) and size < 0 for size in pad):
        raise Untranslated(f"padding by {mode} that cuts at another side")


def _reducing(
    self: object, dim: int, index: object, src: object, reduce: str, *, include_self: bool = True
) -> None:
    """ONNX has no mean, and always includes ``self``."""
    if reduce == "mean" or not include_self:
        raise Untranslated(f"scatter_reduce by {reduce}, include_self={include_self}")


def _imprecise(self: object) -> None:
    """The translation overflows or underflows where torch's kernel does not."""
    raise Untranslated("its translation overflows")
