"""Running a model through the engine, and its reference in float64."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer import settings
from dlinfer.vendor.ascend.graph.text import text_of
from tests.vendor.ascend.graph import vendor_process

TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1.5e-1}
"""Of logits around 1 behind two layers: some ten roundings of 2^-11 or 2^-8 each, of terms up to 4."""


def compiled(model: nn.Module, dynamic: Sequence[int], inputs: Sequence[Tensor]) -> Any:
    """The model by the engine. What the engine does not take is an error. dynamic: inputs whose first size changes."""
    for index in dynamic:
        torch._dynamo.mark_dynamic(inputs[index], 0)
    options: dict[str, Any] = {"engine": "ascend", "fallback": "error"}
    return torch.compile(model, backend="dlinfer", options=options, fullgraph=True)


def reference(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """(the result, the inputs as they are then), in float64."""
    wide = [one.double() if one.is_floating_point() else one.clone() for one in inputs]
    with torch.no_grad(), settings.override(fallback="allow"):
        return copy.deepcopy(model).double()(*wide), wide


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), wanted.double(), atol=bound, rtol=bound, equal_nan=True)


def texts() -> list[str]:
    """The graphs that were loaded since the last time, as text."""
    found = [text_of(one) for one in vendor_process.loaded]
    vendor_process.loaded.clear()
    return found
