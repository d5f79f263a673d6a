"""What torch offers for things that dlinfer does itself, and why it does not do.

Each test is the reason of a decision in docs/internals/architecture.md. Where one fails, torch has changed: look
whether its own way will do now.
"""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_module
from torch.fx.passes.graph_drawer import FxGraphDrawer

from dlinfer import ops

BLOCKS = 8


class Step(nn.Module):
    """Writes one layer's caches, which are cut from one memory as LMDeploy's may be, and reads one."""

    def forward(self, k: Tensor, v: Tensor, caches: Tensor, slots: Tensor) -> tuple[Tensor]:
        ops.fill_kv_cache(k, v, caches[0], caches[1], slots)
        return (caches[0].sum(),)


def arguments() -> tuple[Tensor, ...]:
    return (
        torch.randn(3, 2, 4),
        torch.randn(3, 2, 4),
        torch.zeros(2, BLOCKS, 16, 2, 4),
        torch.tensor([0, 1, 17]),
    )


def test_functionalize_refuses_an_op_that_declares_its_writes():
    with pytest.raises(RuntimeError, match="operator whose output has alias annotations"):
        torch.func.functionalize(Step())(*arguments())


def test_auto_functionalized_gives_new_memory_and_numbers_for_strides():
    """An engine would have to know a higher-order op; run as it is, it copies the caches at each call."""
    given = arguments()
    graph: Any = aot_export_module(Step(), given, trace_joint=False)[0]
    (call,) = (node for node in graph.graph.nodes if "auto_functionalized" in str(node.target))
    assert call.kwargs["_k_cache_size"] == given[2][0].shape
    assert call.kwargs["_v_cache_storage_offset"] == given[2][0].numel()
    content, _ = graph(*given)
    assert content.data_ptr() != given[2].data_ptr()
    assert not given[2].any()  # whoever calls has to copy the content back
    assert content.any()


def test_a_view_of_a_written_input_is_no_view_of_it_any_more():
    class Transposed(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            x[:, 2:4].copy_(y)
            return (x.t(),)

    x = torch.zeros(4, 8)
    content, transposed = aot_export_module(Transposed(), (x, torch.ones(4, 2)), trace_joint=False)[0](
        x, torch.ones(4, 2)
    )
    assert transposed.untyped_storage().data_ptr() == content.untyped_storage().data_ptr() != x.data_ptr()


def test_the_graph_drawer_needs_a_package_and_draws_every_node():
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    if importlib.util.find_spec("pydot") is None:
        with pytest.raises(RuntimeError, match="pydot"):
            FxGraphDrawer(module, "it")
    else:
        drawn = FxGraphDrawer(module, "it").get_dot_graph().get_nodes()
        assert len(drawn) == len(module.graph.nodes)


def test_onnx_export_drops_what_is_written():
    pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")

    class Writes(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            cache[:2].add_(x[:2])
            return x + cache

    program = torch.onnx.export(
        Writes().eval(), (torch.randn(4, 8), torch.zeros(4, 8)), dynamo=True, verbose=False
    )
    assert program is not None
    assert len(program.model.graph.inputs) == 2
    assert len(program.model.graph.outputs) == 1  # the sum; the cache's new content is nowhere


def test_onnx_export_refuses_ops_of_others_that_write():
    pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")
    table = {
        torch.ops.dlinfer.fill_kv_cache.default: lambda k, v, k_cache, v_cache, slots: (k_cache, v_cache)
    }
    with pytest.raises(Exception, match="auto_functionalized"):
        torch.onnx.export(
            Step().eval(), arguments(), dynamo=True, verbose=False, custom_translation_table=table
        )
