"""Attention with a mask and ``is_causal=True``: torch's CPU kernel applies both, and torch 2.15 refuses it."""

import pytest
import torch
import torch.nn.functional as F

from dlinfer.errors import GraphFallbackError
from tests.graph.compiling import compiled


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q + 1, k, v, attn_mask=mask, is_causal=True) * 2


@pytest.mark.parametrize("engine", ["inductor", "openvino", "onnxruntime"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_no_engine_drops_the_mask(engine, kind):
    pytest.importorskip(engine if engine != "inductor" else "torch", reason=f"{engine} is not installed")
    q, k, v = (torch.randn(2, 3, 5, 16) for _ in range(3))
    seen = torch.ones(5, 5, dtype=torch.bool).tril() & (torch.arange(5) != 1)
    mask = seen if kind is torch.bool else torch.zeros(5, 5).masked_fill(~seen, -torch.inf)
    with torch.no_grad():
        try:
            expected = attention(q, k, v, mask)
        except RuntimeError as refused:
            assert "is_causal" in str(refused)
            with pytest.raises(Exception, match="is_causal"):
                compiled(attention, engine=engine, fallback="allow", small_regions="engine")(q, k, v, mask)
            return
        assert not torch.allclose(expected, F.scaled_dot_product_attention(q + 1, k, v, is_causal=True) * 2)
        run = compiled(attention, engine=engine, fallback="allow", small_regions="engine")
        torch.testing.assert_close(run(q, k, v, mask), expected)
        if engine != "inductor":
            torch.compiler.reset()
            with pytest.raises(GraphFallbackError, match="a mask and is_causal"):
                compiled(attention, engine=engine, fallback="error", small_regions="engine")(q, k, v, mask)
