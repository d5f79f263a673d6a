"""What OpenVINO does not compile after all is left to torch, under the fallback policy and with OpenVINO's reason."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dlinfer.errors import GraphFallbackError
from tests.vendor.openvino.lowering import lowered


def largest_bool(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).max(1)[0]


def test_a_model_that_is_not_compiled():
    x = torch.randn(3, 4)
    compiled, report = lowered(largest_bool, x, fallback="allow")
    assert "OpenVINO does not compile it" in str(report.refusals()) + str(report.to_dict())
    assert torch.equal(compiled(x)[0], largest_bool(x))
    with pytest.raises(GraphFallbackError, match="OpenVINO does not compile it"):
        lowered(largest_bool, x)


def test_weights_without_elements():
    """They are built in at the first call, so that it is a call that is left to torch."""
    rows = torch.nn.Parameter(torch.empty(0, 3), requires_grad=False)

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("rows", rows)

        def forward(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.linear(rows, weight, bias)

    options: dict[str, Any] = {"engine": "openvino", "fallback": "allow", "small_regions": "engine"}
    run = torch.compile(Product(), backend="dlinfer", options=options)
    with torch.no_grad():
        assert run(torch.randn(1, 3), torch.tensor(1.0)).shape == (0, 1)
