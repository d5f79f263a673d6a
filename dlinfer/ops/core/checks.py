"""Argument rules of ops. A rule raises an OpArgumentError that names op, argument, expected and actual value.

Rules run on real tensors before every kernel, and on fake tensors under compilers. If a size is symbolic, its rule
becomes a guard of the compiled graph.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dlinfer.errors import OpArgumentError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def ints(tensor: Tensor) -> list[int]:
    """Return the values of a one-dimensional integer or bool tensor. Waits for the device."""
    return tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def floats(tensor: Tensor) -> list[float]:
    """Return the values of a one-dimensional floating tensor. Waits for the device."""
    return tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class Rules:
    """The argument rules of one op. Each method is a rule that raises OpArgumentError if it is broken.

    The op's ``check`` function gets this object as ``rules``.
    """

    def __init__(self, op: str) -> None:
        self.op = op

    def require(
        self,
        condition: object,
        argument: str,
        expected: str | Callable[[], str],
        actual: Callable[[], object],
    ) -> None:
        """Raise OpArgumentError unless ``condition`` holds.

        expected, actual: parts of the error's text. They are functions, which are called only for an error, because
            rules run at every call of an op. ``expected`` may also be a constant text.
        """
        if condition is True:
            return

        def error() -> OpArgumentError:
            return self.error(argument, expected() if callable(expected) else expected, actual())

        if condition is False:
            raise error()
        # A symbolic bool becomes a guard of the compiled graph.
        torch._check(condition, lambda: str(error()))  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]

    def error(self, argument: str, expected: str, actual: object) -> OpArgumentError:
        """Return an OpArgumentError, for a rule that raises by itself instead of by ``require``."""
        return OpArgumentError(op=self.op, argument=argument, expected=expected, given=actual)

    def floating(self, argument: str, tensor: Tensor) -> None:
        """Require float32, float16 or bfloat16. float64 passes too: tests compute expected results in it."""
        if tensor.dtype not in FLOATS and tensor.dtype is not torch.float64:
            raise self.error(argument, "a float32, float16 or bfloat16 tensor", tensor.dtype)

    def integer(self, argument: str, tensor: Tensor) -> None:
        """Require int32 or int64."""
        if tensor.dtype not in (torch.int32, torch.int64):
            raise self.error(argument, "an int32 or int64 tensor", tensor.dtype)

    def dtype(self, argument: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
        """Require one of ``dtypes``. The error's text names only the first of them."""
        if tensor.dtype not in dtypes:
            raise self.error(argument, f"{dtypes[0]}", tensor.dtype)

    def like(self, argument: str, tensor: Tensor, model_name: str, model: Tensor) -> None:
        """Require ``tensor`` to have the dtype and device of another argument of the op.

        model_name, model: the other argument's name and value.
        """
        if tensor.dtype is not model.dtype:
            raise self.error(argument, f"{model.dtype} like {model_name}", tensor.dtype)
        self.same_device(argument, tensor, model_name, model)

    def same_device(self, argument: str, tensor: Tensor, model_name: str, model: Tensor) -> None:
        """Require ``tensor`` to be on the device of another argument of the op.

        model_name, model: the other argument's name and value.
        """
        if tensor.device != model.device:
            raise self.error(argument, f"a tensor on {model.device} like {model_name}", tensor.device)

    def rank(self, argument: str, tensor: Tensor, *ranks: int) -> None:
        """Require a number of dimensions that is in ``ranks``."""
        if tensor.dim() not in ranks:
            expected = " or ".join(str(rank) for rank in ranks)
            raise self.error(argument, f"{expected} dimensions", f"{tensor.dim()}: {tuple(tensor.shape)}")

    def least_rank(self, argument: str, tensor: Tensor, rank: int) -> None:
        """Require at least ``rank`` dimensions."""
        if tensor.dim() < rank:
            raise self.error(
                argument,
                f"at least {rank} dimension{'s' * (rank > 1)}",
                f"{tensor.dim()}: {tuple(tensor.shape)}",
            )

    def same_sizes(self, argument: str, tensor: Tensor, model_name: str, model: Tensor) -> None:
        """Require ``tensor`` to have the shape of another argument of the op.

        model_name, model: the other argument's name and value.
        """
        self.rank(argument, tensor, model.dim())
        for dim in range(model.dim()):
            self.size(argument, tensor, dim, model.shape[dim], f"the shape of {model_name}")

    def size(self, argument: str, tensor: Tensor, dim: int, size: int | torch.SymInt, why: str) -> None:
        """Require ``size`` in dimension ``dim``. why: where this size comes from, for the error."""
        same = tensor.shape[dim] == size
        if same is not True:
            self.require(
                same, argument, f"size {size} in dimension {dim} ({why})", lambda: tuple(tensor.shape)
            )
